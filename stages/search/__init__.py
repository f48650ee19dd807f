"""Stage search: Which KV heads become sliding."""
