"""Set up programs that use the server: their variables and configuration files."""
