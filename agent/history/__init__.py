"""What became of each device in the last 24 hours."""
