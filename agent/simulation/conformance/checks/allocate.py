"""Allocate: what a container gets of the devices that the kubelet has chosen; and the calls beside it that a plugin may have.

Those are GetPreferredAllocation and PreStartContainer, where the plugin's options say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Final

import anyio

from agent.kubelet.api.v1beta1 import ContainerAllocateResponse
from agent.simulation.conformance.stage import PRE_START, PREFERRED, Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Called, NotApplicable, Skipped, Timeline, first, named

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


# --- GetPreferredAllocation and PreStartContainer ---

choice_check = partial(check, subject="choosing")
_LABELS: Final = ("one of all", "all", "with the last")


async def choosing(stage: Stage) -> None:
    """The kubelet asks which devices a container should get, and says that it is about to start."""
    await stage.begin()
    options = (await stage.options()).chosen
    ids = stage.healthy()
    if PREFERRED in options:
        await stage.prefer("one of all", ids, (), 1)
        await stage.prefer("all", ids, (), min(len(ids), 2))
        await stage.prefer("with the last", ids, ids[-1:], min(len(ids), 2))
        await stage.prefer("with a stranger", (_STRANGER, *ids), (), 1)
    if PRE_START in options:
        await stage.allocate("allocate", ids[0])
        await stage.pre_start("start", ids[0])
        await stage.pre_start("start again", ids[0])


def _need(t: Timeline, option: str) -> None:
    """Raise unless the plugin's options have this one."""
    options = t.call("options")
    if options.error:
        raise Skipped("GetDevicePluginOptions failed: see registration-options")
    if option not in options.chosen:
        raise NotApplicable(f"its options do not have {option}")


def _preferred(t: Timeline, *, answered: bool = True) -> list[Called]:
    """What it was asked.

    Raises:
        NotApplicable: it has not said that it can be asked.
        Skipped: it answered with an error.
    """
    _need(t, PREFERRED)
    found = [t.call(label) for label in _LABELS]
    if answered and not (found := [it for it in found if not it.error]):
        raise Skipped("GetPreferredAllocation failed: see preferred-answers")
    return found


@choice_check(choosing, "A4")
def preferred_answers(t: Timeline) -> str:
    """An error of GetPreferredAllocation fails the pod for good: rather answer with any devices, or none."""
    return first(it.error for it in _preferred(t, answered=False))


@choice_check(choosing, "A4")
def preferred_available(t: Timeline) -> str:
    """Choose among the IDs in `available`: the kubelet ignores any others, and takes what comes first in their
    place.
    """
    for it in _preferred(t):
        if strangers := set(it.chosen) - set(it.ids):
            return f"it chose {named(strangers)}, which was not available"
    return ""


@choice_check(choosing, "A4")
def preferred_must_include(t: Timeline) -> str:
    """The IDs in `must_include` are those that the pod's init containers had: they are part of the answer."""
    for it in _preferred(t):
        if it.chosen and (left := set(it.must) - set(it.chosen)):
            return f"it did not choose {named(left)}, which had to be included"
    return ""


@choice_check(choosing, "A4")
def preferred_size(t: Timeline) -> str:
    """Choose as many as `allocation_size` says, each once; the kubelet fills up what is missing with whatever is
    free.
    """
    return first(
        f"it chose {len(it.chosen)} devices, {len(set(it.chosen))} of them different, where {it.size} were asked for"
        for it in _preferred(t)
        if it.chosen and (len(it.chosen) != it.size or len(set(it.chosen)) != it.size)
    )


@choice_check(choosing, "A4")
def preferred_in_time(t: Timeline) -> str:
    """GetPreferredAllocation runs in the kubelet's only loop for pods, as Allocate does."""
    return first(f"it took {it.seconds:.1f} s" for it in _preferred(t) if it.seconds > _IN_TIME)


@choice_check(choosing, "A4")
def preferred_stranger(t: Timeline) -> str:
    """`available` may have an ID that has just left your list: leave it out, an error would fail the pod."""
    _preferred(t)
    called = t.call("with a stranger")
    if _STRANGER in called.chosen:
        return f"it chose {_STRANGER!r}, which was never listed"
    return called.error


def _started(t: Timeline) -> None:
    """Raise unless it wants to be told of starts, and has given a device."""
    _need(t, PRE_START)
    if t.call("allocate").error:
        raise Skipped("Allocate failed: see allocate-answers")


@choice_check(choosing, "A4")
def prestart_answers(t: Timeline) -> str:
    """With `pre_start_required` the kubelet calls PreStartContainer before a container starts; an error, or 30 s,
    and it does not start (CreateContainerConfigError).
    """
    _started(t)
    return t.call("start").error


@choice_check(choosing, "A4")
def prestart_again(t: Timeline) -> str:
    """PreStartContainer comes before *every* start: a container that crashed starts again with the devices that
    it has.
    """
    _started(t)
    if t.call("start").error:
        raise Skipped("PreStartContainer failed: see prestart-answers")
    return t.call("start again").error
