"""Which of the free devices a pod should get; pure."""
