"""Devices that go and come back: what a person does by hand, a hook does here."""

from __future__ import annotations

import anyio

from agent.kubelet.wire import HEALTHY
from agent.simulation.conformance.checks.registration import begun
from agent.simulation.conformance.checks.restarts import RESTART, lists_after
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import NotApplicable, Skipped, Timeline, named
from agent.simulation.model import Kind

UNPLUG, PLUG = "unplug", "plug"


async def going(stage: Stage) -> None:
    """A device that no pod has goes, and comes back."""
    stage.need_hooks()
    await stage.begin()
    await stage.rest()
    if gone := await stage.unplug():
        await stage.rest()
        if gone in stage.kubelet.resources[stage.subject].unhealthy:
            await stage.allocate("unhealthy", gone)
    await stage.hook(PLUG)
    await stage.until(lambda: gone in stage.healthy())
    await stage.rest()


def _gone(t: Timeline) -> set[str]:
    """The devices that were healthy before it, and are not after.

    Raises:
        Skipped: there is none.
    """
    found = _healthy(t.until(UNPLUG)) - _healthy(t.since(UNPLUG).until(PLUG).until(RESTART))
    if not found or not t.since(UNPLUG).until(PLUG).until(RESTART).health():
        raise Skipped("no device was seen to go: see unplug-is-told")
    return found


def _healthy(t: Timeline) -> set[str]:
    lists = t.health()
    return {one for one, health in lists[-1].items() if health == HEALTHY} if lists else set()


@check(going, "A3")
def unplug_is_told(t: Timeline) -> str:
    """Pods get each device that the last list had as healthy: when one goes, send a list that has it as
    `Unhealthy`, or no more.
    """
    if not t.since(UNPLUG).until(PLUG).health():
        return "no list came after a device had gone"
    return (
        ""
        if _healthy(t.until(UNPLUG)) - _healthy(t.since(UNPLUG).until(PLUG))
        else "no device turned unhealthy or left the list"
    )


@check(going, "A3")
def unplug_leaves_others(t: Timeline) -> str:
    """Each message is a full replacement: a device that is not in it is gone, and cannot be given to pods."""
    gone, after = _gone(t), t.since(UNPLUG).health()
    kept = _healthy(t.until(UNPLUG)) - gone
    for one in after:
        if lost := {it for it in kept if one.get(it) != HEALTHY}:
            return f"one device went, and a list came without {named(lost)}"
    lost = gone - t.since(UNPLUG).until(PLUG).until(RESTART).health()[-1].keys()
    # IDs that are one piece of hardware go together: listed as Unhealthy, they are not left out
    return f"with one device {named(lost)} left the list" if not kept and len(lost) > (lost == gone) else ""


@check(going, "A4")
def unplug_refuses(t: Timeline) -> str:
    """The kubelet gives a pod's next container the devices of its init containers, healthy or not: refuse what is
    `Unhealthy`, with a sentence for the pod's owner.
    """
    _gone(t)
    if not t.calls("unhealthy"):
        raise NotApplicable("the device left the list")
    called = t.call("unhealthy")
    return "" if called.error else f"Allocate of {called.ids[0]!r}, which is Unhealthy, was answered"


@check(going, "A3")
def plug_brings_back(t: Timeline) -> str:
    """A device that comes back is the same device to pods and monitors: list it as `Healthy` under the ID that it
    had.
    """
    left = _gone(t) - _healthy(t.since(PLUG))
    return f"{named(left)} did not come back" if left else ""


async def going_while_held(stage: Stage) -> None:
    """All devices are held by a pod; one goes, and the kubelet restarts."""
    stage.need_hooks()
    await stage.begin()
    held = stage.pod(len(stage.healthy()))
    status = await stage.admit(held)
    stage.did("held", status.message if status else "the kubelet panicked")
    await stage.unplug()
    await stage.rest()
    stage.did(RESTART)
    await stage.kubelet.restart()
    await begun(stage)
    await stage.rest()
    await stage.hook(PLUG)


def _held(t: Timeline) -> set[str]:
    """What the pod had."""
    if why := t.did("held")[0].text:
        raise Skipped(f"the pod that should have all devices was refused: {why}")
    return set(t.until(UNPLUG).health()[-1])


@check(going_while_held, "A7")
def unplug_keeps_held(t: Timeline) -> str:
    """A device that a pod has stays in the list, as `Unhealthy`, until the pod is gone (podresources, the
    kubelet's API of who has what, tells): if it is missing, its pod is shown with a healthy device, and the kubelet
    may crash at its next start.
    """
    held = _held(t)
    _gone(t)
    for one in t.since(UNPLUG).until(RESTART).health():
        if lost := held - one.keys():
            return f"a pod has {named(lost)}, and a list came without it"
    return ""


@check(going_while_held, "A7")
def unplug_keeps_held_for_restart(t: Timeline) -> str:
    """A kubelet whose first list lacks a device that a pod has panics at that start and at each one after it, if
    another device has a NUMA node and a topology policy is set.
    """
    held = _held(t)
    _gone(t)
    for one in lists_after(t):
        if lost := held - one.keys():
            return f"a pod has {named(lost)}, and a list after the kubelet's restart came without it"
    return ""


async def going_in_flight(stage: Stage) -> None:
    """A device goes while pods ask for it."""
    stage.need_hooks()
    await stage.begin()
    before, over, asked = set(stage.healthy()), False, False

    def changed() -> bool:
        return over or not set(stage.healthy()) >= before or bool(stage.kubelet.panics)

    async def ask() -> None:
        nonlocal asked
        while not changed():
            pod = stage.pod(len(before))
            status, asked = await stage.admit(pod), True
            if status is None or status.message:
                return
            stage.kubelet.end(pod)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await stage.until(lambda: asked or changed())
        await stage.hook(UNPLUG)
        await stage.until(changed)
        over = True
    await stage.rest()
    await stage.hook(PLUG)


@check(going_in_flight, "A7")
def unplug_in_flight(t: Timeline) -> str:
    """A kubelet panics if a device leaves the list while its Allocate is under way: keep an ID that is asked for,
    and for a second after your answer, as `Unhealthy`.
    """
    panics = t.changes(Kind.PANIC)
    return panics[0].text if panics else ""


async def restart_and_going(stage: Stage) -> None:
    """The kubelet restarts, and then a device goes."""
    stage.need_hooks()
    await stage.begin()
    await stage.kubelet.restart()
    stage.did(RESTART)
    await begun(stage)
    await stage.rest()
    await stage.unplug()
    await stage.hook(PLUG)


@check(restart_and_going, "A2")
def restart_then_unplug(t: Timeline) -> str:
    """After a restart of the kubelet the old stream's handler may still wait for the next change, and take it
    from the new one: end it with its connection.
    """
    lists_after(t.until(UNPLUG))
    return unplug_is_told(t)
