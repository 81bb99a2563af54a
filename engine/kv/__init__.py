"""KV pages and the prefix cache."""
