"""The kubelet's side: its wire format, our servers, registration, and what it tells of pods."""
