"""Bytes to values and back: no MLX, no HTTP framework."""
