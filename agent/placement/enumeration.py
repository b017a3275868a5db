"""Finds the best subset of each size by looking at all combinations; pure.

For few of them this is faster than `search`, and it gives all sizes at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Final

_MOST: Final = 1024  # combinations; 1 us each


def are_few(tables: Sequence[Sequence[int]]) -> bool:
    """Are all combinations of these parts few enough?"""
    return prod(map(len, tables)) <= _MOST


def enumerate_all(
    tables: Sequence[Sequence[int]], weights: Sequence[Sequence[int]]
) -> Mapping[int, tuple[int, Sequence[int]]]:
    """Size → what the best of that size is worth, and how many slots of each part make it.

    Args:
        tables: of each part, the worth of none, one, two ... of its slots.
        weights: what slots of two parts are worth together.
    """
    values, sizes = [0], [0]
    for part, table in enumerate(tables):
        near = [0]  # what one slot of this part is worth to each combination of those before it
        for before in range(part):
            weight = weights[part][before]
            near = [value + number * weight for number in range(len(tables[before])) for value in near]
        values = [
            value + worth + number * gain
            for number, worth in enumerate(table)
            for value, gain in zip(values, near, strict=True)
        ]
        sizes = [size + number for number in range(len(table)) for size in sizes]
    best: dict[int, int] = {}
    for combination, size in enumerate(sizes):
        if size not in best or values[combination] > values[best[size]]:
            best[size] = combination
    return {size: (values[best[size]], _counts(best[size], tables)) for size in sorted(best)}


def _counts(combination: int, tables: Sequence[Sequence[int]]) -> Sequence[int]:
    """Its number has a digit for each part, the first part's the lowest."""
    counts = []
    for table in tables:
        combination, count = divmod(combination, len(table))
        counts.append(count)
    return counts
