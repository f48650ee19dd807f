"""Intervals of scores and losses."""
