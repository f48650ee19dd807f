"""Samples of tasks: needle questions, RULER."""
