"""Encoders that mlx-lm does not have: BERT and ModernBERT, with their heads."""
