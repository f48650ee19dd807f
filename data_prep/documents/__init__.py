"""Training documents: sources, tokenising, mixture, packing; and the calibration set."""
