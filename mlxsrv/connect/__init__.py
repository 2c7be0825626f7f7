"""Tell programs that use the server where it is: their variables and configuration files."""
