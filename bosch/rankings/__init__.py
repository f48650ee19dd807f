"""Layer rules and head rankings: methods without a search."""
