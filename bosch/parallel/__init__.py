"""Parallelism of training."""
