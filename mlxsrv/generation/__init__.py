"""What is asked of a model and what comes back, in no dialect."""
