"""Finds NVIDIA's GPUs, hands them out, and reads what NVIDIA's driver and library say of them."""
