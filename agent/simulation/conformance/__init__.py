"""A conformance suite for device plugins: drives one beside the simulated kubelet, and judges what it did."""
