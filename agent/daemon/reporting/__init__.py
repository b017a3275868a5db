"""Tells the log, its readers and Node Feature Discovery what changes."""
