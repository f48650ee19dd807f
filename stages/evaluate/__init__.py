"""Stage evaluate: Scores of the original, the hybrid and every checkpoint."""
