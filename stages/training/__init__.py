"""Continual pretraining: the schedule, the data order, the trainer, and what it leaves on disk."""
