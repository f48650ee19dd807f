"""Analyses of head masks: distances, turnover, swap test, stability, optimality gap, intervals."""
