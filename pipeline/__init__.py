"""Recipes, the graph of stages, the store of their outputs, the runner and the command line."""
