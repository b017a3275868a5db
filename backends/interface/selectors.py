"""Compares selectors with what a device is said to be."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

Selector = Mapping[str, tuple[str, ...]]
"""Attribute → the values any of which must be among the device's."""


_MOST_NAMED: Final = 8
"""Values of a selector that a sentence names; a range may have hundreds."""


@lru_cache(maxsize=1024)  # a selector's are asked for with every device, and a range may have hundreds
def _folded(wanted: tuple[str, ...]) -> frozenset[str]:
    return frozenset(value.lower() for value in wanted)


def mismatch(selector: Selector, attributes: Mapping[str, tuple[str, ...]]) -> str | None:
    """Why the selector does not match, or None if it does."""
    for name, wanted in selector.items():
        found = attributes.get(name, ())
        if _folded(wanted).isdisjoint(value.lower() for value in found):
            meant = " or ".join(wanted) if len(wanted) <= _MOST_NAMED else f"any of the {len(wanted)} that are selected"
            return f"{name} is {' or '.join(found) or 'unknown'}, not {meant}"
    return None
