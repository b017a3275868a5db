"""What any daemon needs."""
