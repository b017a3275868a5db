"""Reads, checks and resets PCI functions."""
