"""Parts of the search stage: which method runs, and the picture of its trace."""
