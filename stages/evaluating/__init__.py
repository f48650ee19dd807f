"""Parts of the evaluate stage: samples, generation, score tables."""
