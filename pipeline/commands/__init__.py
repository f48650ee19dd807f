"""The commands beside `run`: compare, study, measure and plan."""
