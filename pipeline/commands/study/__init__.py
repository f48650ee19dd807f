"""Studies of the search: one module each, beside what they share."""
