"""The live page: what is shown where, as HTML."""
