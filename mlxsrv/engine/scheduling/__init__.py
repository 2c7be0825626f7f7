"""Decide what the next round does, from orders and measurements; no MLX."""
