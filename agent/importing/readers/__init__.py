"""Other device plugins' formats, by what the plugins are for: what a configuration means, and what is to be said about it."""
