"""The device thread and everything that it drives; MLX is called here only."""
