"""What can be served, and what of it is loaded."""
