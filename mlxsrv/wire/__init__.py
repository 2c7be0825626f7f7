"""The dialects: request and response bodies, streams, errors; the SSE encoder."""
