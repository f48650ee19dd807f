"""Bring the stages of a recipe up to date: graph, keys, store, locks, runner, worker, launch."""
