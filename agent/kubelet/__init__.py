"""The kubelet's side: its wire format, our servers, registration, and what it tells of pods.

Kubelet contract: A1, A2 and so on are parts of "What kubelets do" in docs/conformance.md.
"""
