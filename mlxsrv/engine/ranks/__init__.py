"""Run a model on several ranks: processes that MLX connects, each with its share of the model."""
