"""Sources: what the kernel says, turned into hints and records."""
