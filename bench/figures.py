"""Figures from samples, compared with the design's limits; as a table and as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import linear_regression
from typing import Any, Final

from bench.limits import LIMITS, Limit

_COLUMNS: Final = (
    "figure",
    "size",
    "unit",
    "min",
    "p50",
    "p99",
    "{} p50",
    "p99",
    "ratio",
    "bare min",
    "p50",
    "ratio",
    "limit",
    "",
    "n",
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured quantity at one size, the agent's beside the baseline's."""

    name: str
    size: str
    unit: str
    p50: float
    p99: float | None
    """None where there are fewer than 100 samples: it would be their maximum."""
    baseline_p50: float
    baseline_p99: float | None
    ratio: float | None
    """Of the two p50; None where the baseline's is nothing."""
    samples: int
    how: str
    """What exactly was measured, in one sentence."""
    limit: str | None = None
    least: float | None = None
    """What a busy machine hardly changes."""
    bare_least: float | None = None
    bare_p50: float | None = None
    """Of the second baseline, a plugin on bare grpclib, where it was measured."""
    bare_ratio: float | None = None
    met: bool | None = None
    """None where the design sets no limit."""
    reason: str | None = None
    """Why the limit is missed, as far as it is known."""


def percentile(samples: Iterable[float], share: float) -> float:
    """The smallest sample that at least this share of all samples does not exceed (nearest rank)."""
    ordered = sorted(samples)
    rank = -(-len(ordered) * share // 1)  # rounded up
    return ordered[max(0, int(rank) - 1)]


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """What each size more costs: the slope of the line of least squares."""
    return linear_regression(sizes, costs).slope


def growth(name: str, what: str, unit: str, figures: Mapping[float, Figure]) -> Figure:
    """What one more of something costs, by what a figure was with so many of it; a bare plugin's beside it."""
    sizes, all_bare = list(figures), [it.bare_p50 for it in figures.values()]
    agent = slope(sizes, [it.p50 for it in figures.values()])
    baseline = slope(sizes, [it.baseline_p50 for it in figures.values()])
    known = [it for it in all_bare if it is not None]
    bare = [slope(sizes, known)] if len(known) == len(sizes) else []
    how = f"the slope of the line of least squares through the p50 at {', '.join(f'{it:g}' for it in sizes)}"
    return figure(f"{name}_growth", what, unit, [agent], [baseline], how, bare)


def figure(
    name: str,
    size: str,
    unit: str,
    agent: Sequence[float],
    baseline: Sequence[float],
    how: str,
    bare: Sequence[float] = (),
) -> Figure:
    """The figure that these samples make, judged by its limit."""
    p50, baseline_p50 = percentile(agent, 0.50), percentile(baseline, 0.50)
    ratio = p50 / baseline_p50 if baseline_p50 else None
    bare_p50 = percentile(bare, 0.50) if bare else None
    bare_ratio = p50 / bare_p50 if bare_p50 else None
    limit = LIMITS.get((name, size))
    met = None if limit is None else _is_met(limit, p50, ratio, bare_ratio)
    return Figure(
        name, size, unit, p50, _p99(agent), baseline_p50, _p99(baseline), ratio, len(agent), how,
        least=min(agent),
        bare_least=min(bare, default=None),
        bare_p50=bare_p50,
        bare_ratio=bare_ratio,
        limit=None if limit is None else str(limit),
        met=met,
        reason=limit.missed_because if limit is not None and met is False else None,
    )  # fmt: skip


def _p99(samples: Sequence[float]) -> float | None:
    return percentile(samples, 0.99) if len(samples) >= 100 else None


def _is_met(limit: Limit, p50: float, ratio: float | None, bare_ratio: float | None) -> bool | None:
    """None where there is nothing to compare with."""
    found = p50 if limit.p50 is not None else ratio if limit.ratio is not None else bare_ratio
    return None if found is None else found <= limit.bound


def table(figures: Sequence[Figure], baseline: str = "grpcio") -> str:
    """For people: one line a figure, then why limits were missed; `baseline` is what the first one is called."""
    rows = [tuple(name.format(baseline) for name in _COLUMNS), *(_row(it) for it in figures)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    missed = [f"{it.name} ({it.size}) misses {it.limit}: {it.reason}" for it in figures if it.met is False]
    return "\n".join([*lines, *missed])


def _row(it: Figure) -> tuple[str, ...]:
    numbers = (
        it.least,
        it.p50,
        it.p99,
        it.baseline_p50,
        it.baseline_p99,
        it.ratio,
        it.bare_least,
        it.bare_p50,
        it.bare_ratio,
    )
    verdict = {None: "", True: "met", False: "MISSED"}[it.met]
    return (it.name, it.size, it.unit, *map(_number, numbers), it.limit or "", verdict, str(it.samples))


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def document(figures: Sequence[Figure], machine: Mapping[str, Any]) -> str:
    """For programs."""
    return json.dumps({"machine": machine, "figures": [asdict(it) for it in figures]}, indent=2) + "\n"
