"""What `mlxsrv connect` writes, and what it leaves alone."""
