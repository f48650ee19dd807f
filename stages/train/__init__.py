"""Stage train: Continual pretraining of the hybrid model."""
