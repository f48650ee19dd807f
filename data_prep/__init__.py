"""Training data and needle tasks: sources, tokenising, mixture, packing, retrieval samples."""
