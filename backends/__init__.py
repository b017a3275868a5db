"""Kinds of hardware, one file each: what a backend author sees, and nothing of gRPC."""
