"""The simulated kubelet's device manager: what it believes, gives out and writes down."""
