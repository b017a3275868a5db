"""NVIDIA's GPUs: what is found, what a container gets, and what NVIDIA's driver and library say of them.

`gpus` hands them out, with `gke`, `mps`, `mig` and `char_links`; `procfs`, `nvml` and `platforms` read; `xid` understands the
driver's errors.
"""
