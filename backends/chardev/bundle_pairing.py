"""How bundles are put together from what each of their paths matches: generic-device-plugin's rule, and their names.

Each path's matches are sorted, and the list of them is repeated `limit` times; the n-th bundle takes the n-th entry of
every path. There are as many bundles as the path with the most matches has matches, but no more than the shortest of
the repeated lists has entries. Paths that are optional and match nothing do not count; a required one leaves no bundle.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

Match = TypeVar("Match", bound=Hashable)


class Matches(Struct, Generic[Match], frozen=True):
    """What one path of a bundle matches, sorted."""

    found: Sequence[Match]
    limit: int = 1
    optional: bool = False


class Bundle(Struct, Generic[Match], frozen=True):
    """One match of every path; None where an optional path has none."""

    members: tuple[Match | None, ...]
    named: tuple[int, ...]
    """The paths whose matches tell this bundle from all others."""


def pair(paths: Sequence[Matches[Match]], names: Sequence[int]) -> list[Bundle[Match]]:
    """The bundles that these matches make.

    A bundle is named after the match that no other bundle has, so that it keeps its name whatever happens to other
    matches: that of the first path of `names` (an order of preference) whose matches are not repeated. Where all
    are, it is named after all that it holds, which no other does: the path with the most matches repeats none.
    """
    present = [path for path in paths if path.found or not path.optional]
    if not present:
        return []
    most = max(len(path.found) for path in present)
    length = min(most, *(len(path.found) * path.limit for path in present))
    sole = next(((k,) for k in names if paths[k].found and paths[k].limit == 1), None)
    named = sole or tuple(k for k, path in enumerate(paths) if path.found)
    return [
        Bundle(tuple(path.found[n % len(path.found)] if path.found else None for path in paths), named)
        for n in range(length)
    ]
