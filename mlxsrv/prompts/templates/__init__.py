"""Chat templates: what a conversation must be for one to take it, and how it is run."""
