"""Decide who may use the server: API keys, origins, hosts, rate limits."""
