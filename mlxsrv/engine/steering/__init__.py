"""Add SAE features and control vectors to a model, and watch activations."""
