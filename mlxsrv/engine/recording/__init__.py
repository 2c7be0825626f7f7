"""Record the device thread's orders, plans and outcomes in a file, and plan again from one."""
