"""Allocate: what a container gets of the devices that the kubelet has chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import anyio

from agent.kubelet.api.v1beta1 import ContainerAllocateResponse
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import NotApplicable, Skipped, Timeline, first

_AT_ONCE: Final = 20
_CANCELLED_AFTER: Final = (0.001, 0.003, 0.01, 0.1)  # seconds: with some of them the call is under way
_IN_TIME: Final = 1.0  # seconds; the kubelet admits no other pod meanwhile
_STRANGER: Final = "no-such-device"
_CDI_NAME: Final = re.compile(r"[a-zA-Z][\w.-]*[a-zA-Z0-9]/[a-zA-Z][\w-]*[a-zA-Z0-9]=[a-zA-Z0-9]([\w.:-]*[a-zA-Z0-9])?")
"""`vendor/class=device` (container-device-interface, pkg/parser)."""


async def allocating(stage: Stage) -> None:
    """Pods get devices, as the kubelet asks for them."""
    await stage.begin()
    ids = stage.healthy()
    await stage.allocate("one", ids[0])
    await stage.allocate("again", ids[0])
    if len(ids) > 1:
        await stage.allocate("forwards", *ids[:2])
        await stage.allocate("backwards", *reversed(ids[:2]))
    async with anyio.create_task_group() as tasks:
        for one in ids[:_AT_ONCE]:
            tasks.start_soon(stage.allocate, "at once", one)
    await stage.allocate("stranger", _STRANGER)
    await stage.allocate("after the stranger", ids[0])
    for seconds in _CANCELLED_AFTER:
        with anyio.move_on_after(seconds):
            await stage.allocate("cancelled", ids[0])
    await stage.allocate("after the cancelled", ids[0])


@check(allocating, "A4")
def allocate_answers(t: Timeline) -> str:
    """A kubelet calls Allocate for each container that gets devices; an error fails the pod for good, and your
    message is what the pod's owner reads.
    """
    called = t.call("one")
    return f"{called.ids[0]!r} is healthy, and Allocate failed: {called.error}" if called.error else ""


def _answered(t: Timeline) -> list[ContainerAllocateResponse]:
    """The answers for healthy devices.

    Raises:
        Skipped: there is none.
    """
    if t.call("one").error:
        raise Skipped("Allocate failed: see allocate-answers")
    return [
        reply for label in ("one", "again", "forwards", "backwards") for it in t.calls(label) for reply in it.replies
    ]


@check(allocating, "A4")
def allocate_one_container(t: Timeline) -> str:
    """A kubelet asks for one container at a time, and takes the one response for it: an answer without one fails
    the pod.
    """
    _answered(t)
    number = len(t.call("one").containers)
    return f"the answer for one container has {number} container responses" if number != 1 else ""


@check(allocating, "A4")
def allocate_in_time(t: Timeline) -> str:
    """Allocate runs in the kubelet's only loop for pods, without a deadline: while you take your time, no pod of
    the node starts or stops.
    """
    _answered(t)
    return first(f"it took {it.seconds:.1f} s" for it in (t.call("one"), t.call("again")) if it.seconds > _IN_TIME)


@check(allocating, "A4")
def allocate_again(t: Timeline) -> str:
    """A pod's containers get the devices of its init containers again, and there is no call that gives a device
    back: an ID that was handed out already is no error.
    """
    _answered(t)
    return t.call("again").error


def _repeated(t: Timeline) -> None:
    """Raise Skipped unless a device can be had more than once: the calls that follow ask for the same ones."""
    _answered(t)
    if t.call("again").error:
        raise Skipped("it gives no device again: see allocate-again")


@check(allocating, "A4")
def allocate_any_order(t: Timeline) -> str:
    """The IDs come in random order: sort them where the order matters."""
    _repeated(t)
    if not t.calls("forwards"):
        raise NotApplicable("there is one device")
    errors = [t.call("forwards").error, t.call("backwards").error]
    if all(errors):
        raise NotApplicable(f"it gives no container two devices: {errors[0]}")
    return first(errors)


@check(allocating, "A4")
def allocate_stranger(t: Timeline) -> str:
    """The kubelet may ask for an ID that has just left your list: refuse what you do not know, for the container
    would start without its device.
    """
    return "" if t.call("stranger").error else f"Allocate of {_STRANGER!r}, which was never listed, was answered"


@check(allocating, "A4")
def allocate_after_refusal(t: Timeline) -> str:
    """A pod that was refused is no reason for the next one to be."""
    _repeated(t)
    return t.ended() or t.call("after the stranger").error


@check(allocating, "A4")
def allocate_after_cancelled(t: Timeline) -> str:
    """A kubelet that ends cancels the calls under way; the next one asks for the same devices."""
    _repeated(t)
    return t.ended() or t.call("after the cancelled").error


@check(allocating, "A4")
def allocate_at_once(t: Timeline) -> str:
    """Calls may overlap, as those of a kubelet that restarts with those of the next: answer each, for its own devices."""
    _repeated(t)
    if len(t.calls("at once")) == 1:
        raise NotApplicable("there is one device")
    return first(it.error for it in t.calls("at once"))


def _paths(t: Timeline) -> Iterator[tuple[str, str]]:
    """Container path and host path of all that answers have."""
    for reply in _answered(t):
        yield from ((it.container_path, it.host_path) for it in reply.devices)
        yield from ((it.container_path, it.host_path) for it in reply.mounts)


def _some_paths(t: Timeline) -> list[tuple[str, str]]:
    if not (found := list(_paths(t))):
        raise NotApplicable("the answers have neither device nodes nor mounts")
    return found


@check(allocating, "A4")
def allocate_absolute_paths(t: Timeline) -> str:
    """Paths of device nodes and mounts are handed to the container runtime as they are: a relative one makes no
    container.
    """
    return first(
        f"an answer has the path {path!r}"
        for pair in _some_paths(t)
        for path in pair
        if not PurePosixPath(path).is_absolute()
    )


@check(allocating, "A4")
def allocate_paths_exist(t: Timeline) -> str:
    """A device node or a mount's source that the host lacks makes no container (CreateContainerError), again and
    again, with the device taken: answer with what is there.
    """
    return first(
        f"{host} is not there" for _, host in _some_paths(t) if host.startswith("/") and not Path(host).exists()
    )


@check(allocating, "A4")
def allocate_permissions(t: Timeline) -> str:
    """A device node's permissions are some of `r`, `w` and `m` (mknod); others make no container."""
    nodes = [node for reply in _answered(t) for node in reply.devices]
    if not nodes:
        raise NotApplicable("the answers have no device nodes")
    return first(
        f"{it.host_path} has the permissions {it.permissions!r}"
        for it in nodes
        if not it.permissions or set(it.permissions) - set("rwm")
    )


@check(allocating, "A4")
def allocate_cdi_names(t: Timeline) -> str:
    """A CDI device is called `vendor.example/class=name`; a runtime that cannot resolve it makes no container."""
    names = [it.name for reply in _answered(t) for it in reply.cdi_devices]
    if not names:
        raise NotApplicable("the answers have no CDI devices")
    return first(f"{name!r} is no such name" for name in names if not _CDI_NAME.fullmatch(name))
