"""Speed and memory of a model and its hybrids (BOSCH C.4)."""
