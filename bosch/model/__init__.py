"""Any decoder as a hybrid: families, search mode, deploy mode, caches, loading and saving."""
