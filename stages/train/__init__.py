"""Stage train: continual pretraining of the hybrid model."""
