"""Write what the device thread is told, plans and does to a file, and plan again from one."""
