"""`bosch plan`: what a run needs and costs, from the recipe and config.json alone."""
