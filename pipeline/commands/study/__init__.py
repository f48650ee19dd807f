"""Studies of the search: optimality, cost, turnover, stability."""
