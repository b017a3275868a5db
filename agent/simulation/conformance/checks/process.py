"""The plugin's process: its own end, its return, its update by another instance, and what it costs its node."""

from __future__ import annotations

import signal
from functools import partial
from typing import Final

from agent.simulation.conformance.checks.registration import begun, comes
from agent.simulation.conformance.checks.restarts import away
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Asked, Ended, Skipped, Timeline, first, named
from agent.simulation.model import Kind

ending_check = partial(check, subject="ending")
_GRACE: Final = 10.0  # seconds; a pod has 30 by default, and its node's shutdown often fewer
TERM, KILL = signal.SIGTERM.name, signal.SIGKILL.name


async def terminated(stage: Stage) -> None:
    """The plugin is told to end."""
    await stage.begin()
    stage.tell(stage.plugin, signal.SIGTERM)
    await stage.ended(stage.plugin, _GRACE)


@ending_check(terminated, "A3")
def sigterm_ends(t: Timeline) -> str:
    """SIGTERM is how a pod is told to end; after its grace period it is killed, and an update waits for that."""
    return "" if t.of(Ended) else f"it ran on for {_GRACE:g} s after SIGTERM"


@ending_check(terminated, "A2")
def sigterm_registers_no_more(t: Timeline) -> str:
    """A stream that ends means register again, but not if it is your own end: the kubelet would give out devices
    of a plugin that is about to go.
    """
    return first(f"{it.resource} was registered after SIGTERM" for it in t.since(TERM).of(Asked))


async def terminated_alone(stage: Stage) -> None:
    """The plugin is told to end while there is no kubelet."""
    await stage.begin()
    await stage.kubelet.stop()
    await stage.rest()
    stage.tell(stage.plugin, signal.SIGTERM)
    await stage.ended(stage.plugin, _GRACE)


@ending_check(terminated_alone, "A3")
def sigterm_without_kubelet(t: Timeline) -> str:
    """While you wait for a kubelet or try to register, SIGTERM must end you, too."""
    return sigterm_ends(t)


async def killed_twice(stage: Stage) -> None:
    """The plugin is killed and starts at once, and is killed again."""
    await stage.begin()
    stage.tell(stage.plugin, signal.SIGKILL)
    # a real kubelet has seen the end before a process has started (A12.7); this one may be slower on a busy machine
    await stage.until(lambda: not stage.healthy())
    stage.did("start")
    stage.plugin = await stage.launch()
    await stage.until(lambda: bool(stage.timeline().since("start").of(Asked)))
    await begun(stage)
    await stage.rest()
    stage.did("back")
    stage.tell(stage.plugin, signal.SIGKILL)
    await stage.until(lambda: not stage.healthy())


@ending_check(killed_twice, "A2")
def killed_returns(t: Timeline) -> str:
    """A plugin that was killed leaves its socket behind, and starts again at once: remove the old socket or use
    another path, and register.
    """
    after = t.since("start").until("back")
    return comes(t) or ("" if after.allocatable() else "its devices could not be had")


@ending_check(killed_twice, "A2")
def killed_is_noticed(t: Timeline) -> str:
    """If you register before the kubelet has dealt with the end of your predecessor's stream, it forgets *you*:
    your own end goes unnoticed, and pods get devices of no plugin. Wait until its connection is closed, or use a
    path that was never used.
    """
    if killed_returns(t):
        raise Skipped("it did not come back: see killed-returns")
    return "" if not t.allocatable() else "it was killed again, and the kubelet still shows its devices as healthy"


@ending_check(killed_twice, "A7")
def killed_same_devices(t: Timeline) -> str:
    """Pods outlive you, with their IDs: the same device has the same ID in each of your lives."""
    after = t.since("start").until("back").health()
    if not after:
        raise Skipped("it did not come back: see killed-returns")
    lost = t.until("start").health()[-1].keys() - after[-1].keys()
    return f"lost from {t.subject}: {named(lost)}" if lost else ""


async def updated(stage: Stage) -> None:
    """A second instance starts, then the first is told to end, as in an update with maxSurge."""
    await stage.begin()
    first_one = stage.plugin
    await stage.rest(2)  # an update takes longer: who has the second of its start in its socket's name may
    stage.did("second")
    stage.plugin = await stage.launch()
    await stage.until(lambda: len(stage.timeline().since("second").changes(Kind.REGISTERED)) > 0, 4 * stage.terms.quiet)
    await stage.rest()
    stage.tell(first_one, signal.SIGTERM)
    await stage.ended(first_one, _GRACE)
    await stage.rest()
    await begun(stage)
    await stage.rest()
    stage.did("over")
    stage.tell(stage.plugin, signal.SIGKILL)
    await stage.until(lambda: not stage.healthy())


@ending_check(updated, "A12")
def update_keeps_offering(t: Timeline) -> str:
    """In an update with `maxSurge` the new instance starts beside the old one: until the old one ends, the node
    must have its devices.
    """
    both = t.since("second").until(TERM)
    views = [it for it in both.changes(Kind.LIST, Kind.DISCONNECTED, resource=t.subject) if it.after]
    return first("no device could be had while both ran" for it in views if it.after and not it.after.allocatable)


@ending_check(updated, "A12")
def update_returns(t: Timeline) -> str:
    """When the old instance ends, the node must have the new one's devices. A kubelet until 1.36 closes the *new*
    one's stream when the old one's ends, and one from 1.37 on refuses a path that is connected: use a path of
    your own for each process, do not remove another's socket, and register when your stream ends.
    """
    return comes(t) or ("" if t.until("over").allocatable() else "its devices could not be had after the update")


@ending_check(updated, "A12")
def update_is_noticed(t: Timeline) -> str:
    """After an update the new instance's end must be noticed, too: it is not where the kubelet took it for the
    old one.
    """
    if update_returns(t):
        raise Skipped("it did not come back: see update-returns")
    return (
        "" if not t.allocatable() else "the new instance was killed, and the kubelet still shows its devices as healthy"
    )


# --- processor, memory and descriptors ---

cost_check = partial(check, subject="resources")
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


@cost_check(idle, "A3")
def idle_processor(t: Timeline) -> str:
    """A plugin runs on each node, next to what the node is for: wait for events, do not look again and again."""
    return _cpu(t, "idle", "later")


@cost_check(idle, "A3")
def idle_lists(t: Timeline) -> str:
    """A kubelet writes its checkpoint to disk for each list: send one when something has changed, and not else."""
    lists = t.since("idle").changes(Kind.LIST)
    return f"{len(lists)} lists came though nothing had changed" if len(lists) > 1 else ""


@cost_check(away, "A6")
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


@cost_check(restarting_often, "A6", follows="restart-registers")
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


@cost_check(restarting_often, "A6")
def restarts_memory(t: Timeline) -> str:
    """What each restart of the kubelet leaves behind in your memory is a leak, and ends with the node's memory or
    your limit.
    """
    before, after, _, _ = _between(t)
    grown = after > before * _GROWTH + _GROWTH_BYTES
    return f"it grew from {before >> 10} to {after >> 10} KiB" if grown else ""


@cost_check(restarting_often, "A6")
def restarts_descriptors(t: Timeline) -> str:
    """Close each connection, socket and watch that a restart has ended: 1,024 descriptors are what a process
    usually has.
    """
    _, _, before, after = _between(t)
    return f"it had {before} descriptors, and has {after}" if after > before + _MORE_FILES else ""
