"""The process: what is wired to what, how it starts and ends, and how its configuration is exchanged."""
