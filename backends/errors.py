"""What the system says of an error, as it goes into a sentence."""

from __future__ import annotations


def reason_of(error: OSError) -> str:
    """Its reason without number and file, in lower case: `permission denied`."""
    return (error.strerror or str(error)).lower()
