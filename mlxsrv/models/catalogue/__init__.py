"""Find models by name: in folders, in the hub cache, on the hub."""
