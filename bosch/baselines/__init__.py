"""Layer rules, head rankings and profiles of heads: methods without a search."""
