"""The BOSCH procedure (Algorithms 1 to 3) and its ablations, independent of any model."""
