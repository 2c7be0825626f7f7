"""Train the demo model and its SAE; this code is not in the wheel."""
