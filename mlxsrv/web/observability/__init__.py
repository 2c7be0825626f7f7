"""Metrics and traces, and the record of each request that they receive."""
