"""Steering: what is added to hidden states while a model runs, and what is read off them."""
