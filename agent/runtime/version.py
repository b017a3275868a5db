"""Reads which version of Fairlead is installed."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    """The distribution's version, `0.1.0`."""
    from importlib import metadata  # noqa: PLC0415  # a twentieth of the daemon's start

    return metadata.version("fairlead")
