"""Requests to a model and their answers, in no dialect."""
