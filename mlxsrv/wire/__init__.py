"""Request and response bodies, and the SSE encoder."""
