"""Stage rival: the hybrid of a rule or ranking."""
