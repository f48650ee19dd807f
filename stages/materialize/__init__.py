"""Stage materialize: the deployable hybrid model."""
