"""Everything that touches MLX: the device thread, the batch, the sampler, loading."""
