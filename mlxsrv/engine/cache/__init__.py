"""KV caches of rows, sub-batches and prompts."""
