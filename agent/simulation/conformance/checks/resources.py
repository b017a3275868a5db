"""What the plugin costs its node: processor, memory and descriptors."""

from __future__ import annotations

from typing import Final

from agent.simulation.conformance.checks.restarts import away
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Skipped, Timeline, first
from agent.simulation.model import Kind

_CPU: Final = 0.05
"""Of one processor, while nothing happens: a plugin that polls each second takes less."""
_GROWTH: Final = 1.25  # a collector runs when it likes
_GROWTH_BYTES: Final = 8 << 20  # that an allocator may take beside
_MORE_FILES: Final = 3
_MINUTES: Final = 120.0  # seconds that all restarts may take
_FEW: Final = 10  # restarts, of which nothing can be said


async def idle(stage: Stage) -> None:
    """Nothing happens."""
    await stage.begin()
    await stage.rest(2)
    stage.did("idle")
    stage.use("idle")
    await stage.rest(6)
    stage.use("later")


def _cpu(t: Timeline, before: str, after: str) -> str:
    first_one, last = t.used(before), t.used(after)
    share = (last.cpu - first_one.cpu) / (last.at - first_one.at)
    return f"it took {share:.0%} of a processor" if share > _CPU else ""


@check(idle, "A3")
def idle_processor(t: Timeline) -> str:
    """A plugin runs on each node, next to what the node is for: wait for events, do not look again and again."""
    return _cpu(t, "idle", "later")


@check(idle, "A3")
def idle_lists(t: Timeline) -> str:
    """A kubelet writes its checkpoint to disk for each list: send one when something has changed, and not else."""
    lists = t.since("idle").changes(Kind.LIST)
    return f"{len(lists)} lists came though nothing had changed" if len(lists) > 1 else ""


@check(away, "A6")
def away_processor(t: Timeline) -> str:
    """A kubelet may be away for hours: wait for its socket's creation, do not try to connect in a circle."""
    return _cpu(t, "before", "after")


async def restarting_often(stage: Stage) -> None:
    """The kubelet restarts again and again."""
    await stage.begin()
    before, until = 0, stage.timeline().events[0].at + _MINUTES
    for number in range(1, stage.terms.rounds + 1):
        await stage.kubelet.restart()
        if not await stage.offered():
            stage.did("lost", f"it did not register after restart {number}")
            return
        if number == max(stage.terms.rounds // 4, _FEW):
            before = number
            stage.use("settled")
        if stage.timeline().events[-1].at > until:
            break
    stage.did("restarts", str(number - before if before else 0))
    stage.use("at the end")


@check(restarting_often, "A6", follows="restart-registers")
def restarts_register(t: Timeline) -> str:
    """A node lives for years: each of two hundred restarts of the kubelet is followed by a registration."""
    return first(it.text for it in t.did("lost"))


def _between(t: Timeline) -> tuple[int, int, int, int]:
    """Memory and descriptors before and after the restarts.

    Raises:
        Skipped: it did not come through them, or they were too few.
    """
    if t.did("lost"):
        raise Skipped("it did not come through all restarts: see restarts-register")
    if not t.did("restarts") or int(t.did("restarts")[0].text) < _FEW:
        raise Skipped("too few restarts were made to tell")
    before, after = t.used("settled"), t.used("at the end")
    return before.memory, after.memory, before.files, after.files


@check(restarting_often, "A6")
def restarts_memory(t: Timeline) -> str:
    """What each restart of the kubelet leaves behind in your memory is a leak, and ends with the node's memory or
    your limit.
    """
    before, after, _, _ = _between(t)
    grown = after > before * _GROWTH + _GROWTH_BYTES
    return f"it grew from {before >> 10} to {after >> 10} KiB" if grown else ""


@check(restarting_often, "A6")
def restarts_descriptors(t: Timeline) -> str:
    """Close each connection, socket and watch that a restart has ended: 1,024 descriptors are what a process
    usually has.
    """
    _, _, before, after = _between(t)
    return f"it had {before} descriptors, and has {after}" if after > before + _MORE_FILES else ""
