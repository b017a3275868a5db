"""Finds AMD's GPUs, hands them out, and reads what AMD's driver and exporter say of them."""
