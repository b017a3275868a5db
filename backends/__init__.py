"""Kinds of hardware, one file or folder each: what a backend author sees, and nothing of gRPC."""
