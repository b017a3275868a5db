"""What a walk has found, for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from tests.soak.daemon import Sample
from tests.soak.world import END, Findings

MOST_STEP: Final = 0.05
"""Seconds of CPU time that a step of the loop may take."""

MOST_GROWTH: Final = 0.01
_SHOWN: Final = 12  # of the longest steps


def report(found: Findings, counts: Mapping[str, int], how: str, steps: int) -> tuple[str, bool]:
    """The whole text, and whether all is as it should be."""
    grown, growth = _growth(found.samples)
    long_steps = [name for name, (took, _, _) in found.steps.items() if took > MOST_STEP]
    ok = not (found.violations or grown or long_steps)
    lines = [
        f"{steps} steps; pods: {', '.join(f'{n} {what}' for what, n in sorted(found.pods.items())) or 'none'}",
        f"the machine had the soak itself run {found.lateness:.1f} s late in all, which no fault is blamed for",
        "",
        "worst time to be well (where something can be told, and an event tells of it)",
        f"{'times':>6} {'beginning':>11} {'end':>11}  fault",
        *_faults(found, counts),
        "",
        *growth,
        "",
        "longest steps of the loop (ms of CPU, ms on the wall's clock, how often over 20 ms):",
        *_longest(found),
        "",
        *_violations(found),
        "well"
        if ok
        else f"NOT WELL: {len(found.violations)} violations, {len(long_steps)} kinds of long steps, grown: {grown}",
        f"the same walk again: make soak ARGS='{how}'",
    ]
    return "\n".join(lines), ok


def _faults(found: Findings, counts: Mapping[str, int]) -> Iterable[str]:
    worst = {name: max(times) for name, times in found.times.items()}
    names = {*counts, *(name.removeprefix(END) for name in worst)}
    for name in sorted(names, key=lambda name: -max(worst.get(name, 0.0), worst.get(END + name, 0.0))):
        began, ended = (f"{worst[it]:5.2f} s" if it in worst else "      -" for it in (name, END + name))
        yield f"{counts.get(name) or len(found.times[name]):6} {began:>11} {ended:>11}  {name}"


def _growth(samples: Sequence[Sample]) -> tuple[bool, list[str]]:
    """Whether it has grown since it was warm, and lines of it: medians of the last process's third and last quarter."""
    quarter = len(samples) // 4
    if quarter < 1:
        return False, ["too few samples to tell what grows"]
    before, after = samples[2 * quarter : 3 * quarter], samples[-quarter:]
    lines, grown = [f"what it takes, {len(samples)} samples: at first, warm (third quarter), at last (fourth)"], False
    whats: list[tuple[str, str, Callable[[Sample], float]]] = [
        ("RSS", "MB", lambda it: it.rss / 1e6),
        ("open files", "", lambda it: it.files),
        ("threads (idle ones end after a while)", "", lambda it: it.threads),
    ]
    for what, unit, value in whats:
        warm, last = median(map(value, before)), median(map(value, after))
        grows = last > warm * (1 + MOST_GROWTH) and not what.startswith("threads")
        grown = grown or grows
        first = value(samples[0])
        lines.append(
            f"  {what}: {first:.2f} -> {warm:.2f} -> {last:.2f} {unit} "
            f"({(last / warm - 1) * 100:+.2f} %{', TOO MUCH' if grows else ''})"
        )
    return grown, lines


def _longest(found: Findings) -> Iterable[str]:
    longest = sorted(found.steps.items(), key=lambda it: -it[1][0])
    for name, (took, wall, times) in longest[:_SHOWN]:
        yield f"  {took * 1e3:7.1f} {wall * 1e3:7.1f} {times:5}  {name}"
    if not longest:
        yield "  none over 20 ms"


def _violations(found: Findings) -> Iterable[str]:
    for violation in found.violations:
        yield f"VIOLATION in step {violation.step}: {violation.what}"
        yield from (f"    {event}" for event in violation.events)
        yield ""
