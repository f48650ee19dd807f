"""Speed and memory of a model beside its hybrids, over lengths, ratios and windows (BOSCH C.4)."""
