"""Stage original: scores of the original model."""
