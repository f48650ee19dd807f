"""Algorithms 1 to 3, their ablations, bosch_plus and every other method by its name."""
