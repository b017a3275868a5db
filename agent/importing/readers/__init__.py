"""Other device plugins' formats, one file each: what a configuration means, and what is to be said about it."""
