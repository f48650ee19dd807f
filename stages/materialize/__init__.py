"""Stage materialize: The deployable hybrid model."""
