"""Stage evaluate: scores of the original, the hybrid and every checkpoint."""
