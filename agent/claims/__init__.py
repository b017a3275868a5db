"""Who holds what: the claims of pods, and the hardware that they lead to."""
