"""Recipes: YAML, overrides, checks, the model's shape, input files and processes."""
