"""The files that `mlxsrv connect` writes, and those that it leaves alone."""
