"""Steer requests: attached SAEs, profiles, and the activation monitor."""
