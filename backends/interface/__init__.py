"""What `backends.base` is made of: the values that backends and the daemon share, and how they are written."""
