"""Analyses of head masks: distances, turnover, swap test, stability, optimality gap, intervals.

Needs numpy only, as the masks do; intervals need scipy.
"""
