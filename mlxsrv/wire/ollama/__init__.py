"""Ollama's API: requests, answers, lines of streams and of downloads."""
