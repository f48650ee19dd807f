"""Rivals of the search that need no optimiser."""
