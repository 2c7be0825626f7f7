"""Metrics, traces, and what they are told of each request."""
