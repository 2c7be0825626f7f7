"""Vectors that PyTorch has made of known weights, and the weights."""
