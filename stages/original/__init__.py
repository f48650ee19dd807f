"""Stage original: Scores of the original model."""
