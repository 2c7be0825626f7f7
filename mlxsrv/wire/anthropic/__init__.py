"""Anthropic's API: Messages, the count of their tokens, and its list of models."""
