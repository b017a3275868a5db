"""Measures what the design promises, beside a baseline in the same run."""
