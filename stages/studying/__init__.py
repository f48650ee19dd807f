"""Studies: every method against the true optimum, against its cost, against itself."""
