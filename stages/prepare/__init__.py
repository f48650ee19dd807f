"""Stage prepare: Training data and calibration set."""
