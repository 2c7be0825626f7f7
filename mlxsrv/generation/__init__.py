"""Requests to a model and their answers, in no dialect; the state of models and steering."""
