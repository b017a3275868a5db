"""USB sticks by vendor, product and serial: each a device of its own, or several as one."""
