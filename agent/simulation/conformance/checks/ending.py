"""The plugin's own end, its return, and its update by another instance."""

from __future__ import annotations

import signal
from typing import Final

from agent.simulation.conformance.checks.registration import begun, comes
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Asked, Ended, Skipped, Timeline, first, named
from agent.simulation.model import Kind

_GRACE: Final = 10.0  # seconds; a pod has 30 by default, and its node's shutdown often fewer
TERM, KILL = signal.SIGTERM.name, signal.SIGKILL.name


async def terminated(stage: Stage) -> None:
    """The plugin is told to end."""
    await stage.begin()
    stage.tell(stage.plugin, signal.SIGTERM)
    await stage.ended(stage.plugin, _GRACE)


@check(terminated, "A3")
def sigterm_ends(t: Timeline) -> str:
    """SIGTERM is how a pod is told to end; after its grace period it is killed, and an update waits for that."""
    return "" if t.of(Ended) else f"it ran on for {_GRACE:g} s after SIGTERM"


@check(terminated, "A2")
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


@check(terminated_alone, "A3")
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


@check(killed_twice, "A2")
def killed_returns(t: Timeline) -> str:
    """A plugin that was killed leaves its socket behind, and starts again at once: remove the old socket or use
    another path, and register.
    """
    after = t.since("start").until("back")
    return comes(t) or ("" if after.allocatable() else "its devices could not be had")


@check(killed_twice, "A2")
def killed_is_noticed(t: Timeline) -> str:
    """If you register before the kubelet has dealt with the end of your predecessor's stream, it forgets *you*:
    your own end goes unnoticed, and pods get devices of no plugin. Wait until its connection is closed, or use a
    path that was never used.
    """
    if killed_returns(t):
        raise Skipped("it did not come back: see killed-returns")
    return "" if not t.allocatable() else "it was killed again, and the kubelet still shows its devices as healthy"


@check(killed_twice, "A7")
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


@check(updated, "A12")
def update_keeps_offering(t: Timeline) -> str:
    """In an update with `maxSurge` the new instance starts beside the old one: until the old one ends, the node
    must have its devices.
    """
    both = t.since("second").until(TERM)
    views = [it for it in both.changes(Kind.LIST, Kind.DISCONNECTED, resource=t.subject) if it.after]
    return first("no device could be had while both ran" for it in views if it.after and not it.after.allocatable)


@check(updated, "A12")
def update_returns(t: Timeline) -> str:
    """When the old instance ends, the node must have the new one's devices. A kubelet until 1.36 closes the *new*
    one's stream when the old one's ends, and one from 1.37 on refuses a path that is connected: use a path of
    your own for each process, do not remove another's socket, and register when your stream ends.
    """
    return comes(t) or ("" if t.until("over").allocatable() else "its devices could not be had after the update")


@check(updated, "A12")
def update_is_noticed(t: Timeline) -> str:
    """After an update the new instance's end must be noticed, too: it is not where the kubelet took it for the
    old one.
    """
    if update_returns(t):
        raise Skipped("it did not come back: see update-returns")
    return (
        "" if not t.allocatable() else "the new instance was killed, and the kubelet still shows its devices as healthy"
    )
