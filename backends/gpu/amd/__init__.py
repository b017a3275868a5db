"""AMD's GPUs: what is found, what a container gets, and what AMD's driver and exporter say of them.

`gpus` hands them out; `kfd` and `exporter` read.
"""
