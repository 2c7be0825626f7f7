"""Grammars of every kind, checked and translated for llguidance."""
