"""Change other libraries at run time; each change has a switch and a log line."""
