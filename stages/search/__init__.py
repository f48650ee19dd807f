"""Stage search: which KV heads become sliding."""
