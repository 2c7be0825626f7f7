"""KV caches of rows, batches and prompts."""
