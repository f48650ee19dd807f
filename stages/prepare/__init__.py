"""Stage prepare: training data and calibration set."""
