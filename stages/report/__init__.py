"""Stage report: The page of a run's results."""
