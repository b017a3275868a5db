"""Registration: how a plugin comes to the kubelet, and what it does while there is none; and what its lists say of its devices."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from pathlib import PurePosixPath
from typing import Final

import anyio

from agent.kubelet.api.v1beta1 import Device
from agent.kubelet.wire import HEALTHY, UNHEALTHY
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Asked, Judge, NotApplicable, Skipped, Timeline, first, named
from agent.simulation.kubelet import unhindered
from agent.simulation.model import Change, Kind
from agent.simulation.plugin_client import DIAL_TIMEOUT, MESSAGE_LIMIT, PluginError
from agent.simulation.registration import API_VERSION, is_extended_resource

_REFUSALS: Final = 2
_LONGER: Final = 4  # times as long as for others: who tries again each 30 s comes after a minute
MISSING: Final = "missing"
_REFUSING_SECONDS: Final = 0.5  # for which kubelet.sock is there and nothing listens; a real kubelet takes 3 ms


async def starting(stage: Stage) -> None:
    """The plugin starts beside a kubelet, and is left alone."""
    await stage.kubelet.start()
    stage.plugin = await stage.launch()
    await stage.offered()
    for resource in stage.timeline().resources:
        await stage.options(resource)
    await stage.rest(2)


def _asked(t: Timeline) -> list[Asked]:
    """Its Registers.

    Raises:
        Skipped: there was none.
    """
    if not (found := t.of(Asked)):
        raise Skipped("it never called Register: see registration-arrives")
    return found


@check(starting, "A1")
def registration_arrives(t: Timeline) -> str:
    """A kubelet looks for no plugin: it waits on `kubelet.sock` in `/var/lib/kubelet/device-plugins` until the
    plugin connects there and calls `v1beta1.Registration/Register`.
    """
    return "" if t.of(Asked) else "Register was never called"


@check(starting, "A1")
def registration_version(t: Timeline) -> str:
    """A kubelet accepts the version `v1beta1` alone, and refuses every other one."""
    return first(
        f"{it.resource} was registered with version {it.version!r}" for it in _asked(t) if it.version != API_VERSION
    )


@check(starting, "A1")
def registration_resource_name(t: Timeline) -> str:
    """A kubelet refuses a resource's name unless it is `domain/name`: one slash, a lower-case DNS domain that is
    not Kubernetes' own, and at most 63 letters, digits, `-`, `_` and `.` that begin and end with a letter or
    digit.
    """
    return first(f"{it.resource!r} is no such name" for it in _asked(t) if not is_extended_resource(it.resource))


@check(starting, "A1")
def registration_endpoint(t: Timeline) -> str:
    """A kubelet joins `endpoint` to its plugin directory: it must be the path of your socket relative to that, as
    `mine.sock` or `mine/1.sock`; an absolute path or an empty one is dialled for 10 s, and then Register fails.
    """
    for it in _asked(t):
        path = PurePosixPath(it.endpoint)
        if not it.endpoint or path.is_absolute() or ".." in path.parts:
            return f"{it.resource} was registered with the endpoint {it.endpoint!r}"
    return ""


@check(starting, "A1")
def registration_serves_first(t: Timeline) -> str:
    """A kubelet dials your socket before it answers Register, and tries again only after a second: listen and
    serve, then register.
    """
    wrong = registration_endpoint(t)
    if wrong:
        raise Skipped(f"{wrong}: see registration-endpoint")
    return first(f"{it.endpoint} could not be connected to: {it.unreachable}" for it in _asked(t) if it.unreachable)


@check(starting, "A1")
def registration_deadline(t: Timeline) -> str:
    """From 1.36 on the deadline of your Register is also that of the kubelet's dial, which may take 10 s on a
    busy node: have none, or a longer one.
    """
    return first(
        f"Register of {it.resource} has a deadline of {it.deadline:.1f} s"
        for it in _asked(t)
        if it.deadline is not None and it.deadline < DIAL_TIMEOUT - 0.5  # some of it had passed
    )


@check(starting, "A1")
def registration_options(t: Timeline) -> str:
    """A kubelet calls `GetDevicePluginOptions` before it answers Register; an error there fails the registration.
    A plugin without options answers with an empty message.
    """
    _asked(t)
    return first(
        f"GetDevicePluginOptions of {it.resource} failed: {it.error}"
        for it in t.calls("options")
        if "rpc error" in it.error
    )


@check(starting, "A1")
def registration_options_agree(t: Timeline) -> str:
    """A kubelet ignores the options in Register: what `GetDevicePluginOptions` answers counts."""
    answers = {it.resource: it.chosen for it in t.calls("options") if not it.error}
    with_options = [it for it in _asked(t) if it.options]
    if not with_options:
        raise NotApplicable("Register has no options")
    asked = [it for it in with_options if it.resource in answers]
    if not asked:
        raise Skipped("GetDevicePluginOptions failed: see registration-options")
    return first(
        f"Register of {it.resource} has {lost.pop()}, which GetDevicePluginOptions does not answer"
        for it in asked
        if (lost := set(it.options) - set(answers[it.resource]))
    )


@check(starting, "A2")
def registration_once(t: Timeline) -> str:
    """One Register is one stream, for as long as the kubelet runs. A second one while the first stream is open
    makes a kubelet until 1.36 forget the plugin when either stream ends; a kubelet from 1.37 on refuses it, and
    may refuse that path until it restarts.
    """
    _asked(t)
    has_stream: set[str] = set()
    for it in t:
        if isinstance(it, Asked) and it.resource in has_stream:
            return f"{it.resource} was registered again, while its stream was open"
        if isinstance(it, Change) and it.kind is Kind.REGISTERED:
            has_stream.add(it.resource)
        elif isinstance(it, Change) and it.kind is Kind.STREAM_ENDED:
            has_stream.discard(it.resource)
    return ""


@check(starting, "A3")
def registration_keeps_stream(t: Timeline) -> str:
    """When `ListAndWatch` returns, all devices are unhealthy at once and pods are refused: keep the stream open
    for as long as you live, and send each change on it.
    """
    _asked(t)
    ended = [it for it in t.changes(Kind.STREAM_ENDED) if "larger than max" not in it.text]
    return first(f"the stream of {it.resource} ended by itself: {it.text}" for it in ended) or t.ended()


def comes(t: Timeline) -> str:
    """What is wrong if its devices could not be had in the end."""
    return first(it.text for it in t.did(MISSING))


async def begun(stage: Stage, times: int = 1) -> None:
    """Wait until there are devices; put on record what is missing if they do not come."""
    seconds = stage.terms.patience * times
    if not await stage.offered(seconds):
        within = "" if stage.timeline().ended() else f" within {seconds:g} s"
        stage.did(MISSING, stage.missing() + within)
    elif not await stage.until(lambda: bool(stage.healthy())):
        stage.did(MISSING, "it registered, and listed no healthy device")


async def refused(stage: Stage) -> None:
    """The kubelet refuses the first Registers, and then accepts."""
    left: dict[str, int] = {}

    async def refuse() -> None:
        resource = stage.timeline().of(Asked)[-1].resource
        left[resource] = left.get(resource, _REFUSALS) - 1
        if left[resource] >= 0:
            raise PluginError("the kubelet is not ready for it")

    stage.before_register = refuse
    await stage.kubelet.start()
    stage.plugin = await stage.launch()
    await begun(stage, _LONGER)


@check(refused, "A1")
def registration_retries(t: Timeline) -> str:
    """A Register may fail for a moment, on a kubelet that is just starting or very busy: try again, with growing
    pauses, for ever.
    """
    _asked(t)
    return comes(t)


async def early(stage: Stage) -> None:
    """The plugin starts before the kubelet."""
    stage.plugin = await stage.launch()
    await stage.rest(2)
    await stage.kubelet.start()
    await begun(stage)


@check(early, "A6")
def registration_waits(t: Timeline) -> str:
    """At boot a plugin may start before its kubelet: wait for `kubelet.sock` to be made, and then register."""
    return comes(t)


async def not_listening(stage: Stage) -> None:
    """The kubelet's socket is there before anything listens."""
    made = asyncio.Event()

    async def slow() -> None:
        made.set()
        await anyio.sleep(_REFUSING_SECONDS)

    stage.kubelet.before_listening = slow
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stage.kubelet.start)
        await made.wait()
        stage.plugin = await stage.launch()
    await begun(stage)


@check(not_listening, "A6")
def registration_connection_refused(t: Timeline) -> str:
    """`kubelet.sock` can be seen some ms before anything listens: a connection that is refused then is no reason
    to give up.
    """
    return comes(t)


async def dying(stage: Stage) -> None:
    """The kubelet dies while it looks at the first Register; another one starts."""
    came = asyncio.Event()

    async def never() -> None:
        came.set()
        await asyncio.Event().wait()

    stage.before_register = never
    await stage.kubelet.start()
    stage.plugin = await stage.launch()
    await stage.until(came.is_set)
    await stage.kubelet.stop(kill=True)
    stage.before_register = unhindered
    await stage.rest()
    await stage.kubelet.start()
    await begun(stage)


@check(dying, "A6")
def registration_kubelet_dies(t: Timeline) -> str:
    """A kubelet may die while your Register is under way: the call fails, or is never answered by the one that
    comes after it. Register with that one.
    """
    _asked(t)
    return comes(t)


# --- lists ---

# Calls of Allocate while the kubelet reads nothing: their lists may not all fit into what a connection holds.
_CALLS: Final = 8
list_check = partial(check, subject="lists")


def _lists(t: Timeline) -> list[tuple[str, list[Device]]]:
    """Every list that came.

    Raises:
        Skipped: none did.
    """
    if not (found := t.lists()):
        raise Skipped(f"no list came{_see(t)}")
    return found


def _too_large(t: Timeline) -> list[Change]:
    return [it for it in t.changes(Kind.STREAM_ENDED) if "larger than max" in it.text]


def _see(t: Timeline) -> str:
    """Which check says why there is no list."""
    causes: tuple[Judge, ...] = (
        registration_arrives,
        registration_version,
        registration_resource_name,
        registration_endpoint,
        registration_options,
        registration_serves_first,
        list_size if _too_large(t) else list_arrives,
    )
    opened = bool(t.changes(Kind.STREAM_OPENED))
    cause = causes[-1] if opened else next((it for it in causes[:-1] if it(t)), None)
    return f": see {cause.__name__.replace('_', '-')}" if cause else ""


@list_check(starting, "A3")
def list_arrives(t: Timeline) -> str:
    """The kubelet knows of no device before the first message on `ListAndWatch`: send one at once, an empty one
    if there is none.
    """
    streams = t.changes(Kind.STREAM_OPENED)
    if not streams:
        raise Skipped(f"no stream was opened{_see(t)}")
    listed = {it.resource for it in (*t.changes(Kind.LIST), *_too_large(t))}
    return first(f"no list of {it.resource} came" for it in streams if it.resource not in listed)


@list_check(starting, "A1")
def list_size(t: Timeline) -> str:
    """A kubelet receives 4 MiB in one message; it ends the stream of a longer list, and all devices are gone."""
    if not _too_large(t):
        _lists(t)
    return first(f"a list of {it.resource} has more than {MESSAGE_LIMIT >> 20} MiB: {it.text}" for it in _too_large(t))


@list_check(starting, "A3")
def list_ids_unique(t: Timeline) -> str:
    """A kubelet counts an ID that comes twice in a list as two devices, and can give out only one of them."""
    for resource, devices in _lists(t):
        twice = [one for one, times in Counter(device.id for device in devices).items() if times > 1]
        if twice:
            return f"a list of {resource} has more than once: {named(twice)}"
    return ""


@list_check(starting, "A3")
def list_ids_say_something(t: Timeline) -> str:
    """A device is known by its ID alone, in the checkpoint (the kubelet's file of which pod has what) and to those
    who monitor pods: no ID may be empty.
    """
    return first(
        f"a list of {resource} has an empty ID" for resource, devices in _lists(t) if not all(it.id for it in devices)
    )


@list_check(starting, "A11")
def list_ids_of_one_resource(t: Timeline) -> str:
    """Until kubernetes 140323 a change of health can reach the status of a pod that has the same ID of another
    resource: keep IDs unique across your resources, unless they are the same hardware.
    """
    owners: dict[str, set[str]] = {}
    for resource, devices in _lists(t):
        for device in devices:
            owners.setdefault(device.id, set()).add(resource)
    if len(t.resources) < 2:
        raise NotApplicable("there is one resource")
    return first(f"{' and '.join(sorted(of))} both have {one!r}" for one, of in sorted(owners.items()) if len(of) > 1)


@list_check(starting, "A3")
def list_health(t: Timeline) -> str:
    """Only a device whose health is exactly `Healthy` is given out; the other word that others understand is
    `Unhealthy`.
    """
    for resource, devices in _lists(t):
        odd = {device.health for device in devices} - {HEALTHY, UNHEALTHY}
        if odd:
            return f"a list of {resource} has the health {named(odd)}"
    return ""


@list_check(starting, "A5")
def list_topology(t: Timeline) -> str:
    """A device with a `topology` without nodes is left out of `GetAllocatableResources`: leave `topology` out
    where there is none.
    """
    for resource, devices in _lists(t):
        for device in devices:
            if device.is_set("topology") and not device.topology.nodes:
                return f"{device.id!r} of {resource} has an empty topology"
    return ""


@list_check(starting, "A5")
def list_numa_nodes(t: Timeline) -> str:
    """Sysfs says -1 where a device has no NUMA node. A kubelet takes -1 for a node, and with the policy
    `single-numa-node` refuses each pod (`TopologyAffinityError`): leave `topology` out then.
    """
    for resource, devices in _lists(t):
        for device in devices:
            if any(node.id < 0 for node in device.topology.nodes):
                return f"{device.id!r} of {resource} has the NUMA node {min(node.id for node in device.topology.nodes)}"
    return ""


async def not_reading(stage: Stage) -> None:
    """The kubelet is busy and reads no lists for a while; pods ask for devices meanwhile."""
    reads = asyncio.Event()
    reads.set()

    async def when_it_reads() -> None:
        await reads.wait()

    stage.kubelet.before_list = when_it_reads
    await stage.begin()
    reads.clear()
    for number in range(_CALLS):
        if (await stage.allocate(f"stalled {number}", stage.healthy()[0])).error:
            break
    reads.set()
    await stage.rest()


@list_check(not_reading, "A3")
def list_reader_stalls(t: Timeline) -> str:
    """A busy kubelet reads its streams late, so that sending may block; an Allocate must be answered meanwhile."""
    return first(it.error for it in t.calls("stalled"))
