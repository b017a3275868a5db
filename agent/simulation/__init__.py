"""A kubelet and hardware to try things on; the demo and the tests use it."""
