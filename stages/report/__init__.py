"""Stage report: the page of a run's results."""
