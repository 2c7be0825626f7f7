"""One generation from request to outputs; embeddings; steering."""
