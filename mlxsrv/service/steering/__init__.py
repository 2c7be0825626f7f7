"""Steering of requests: attached SAEs, profiles, and the monitor of activations."""
