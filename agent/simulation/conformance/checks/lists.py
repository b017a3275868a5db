"""Lists: what a plugin says of its devices."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from agent.kubelet.api.v1beta1 import Device
from agent.kubelet.wire import HEALTHY, UNHEALTHY
from agent.simulation.changes import Change, Kind
from agent.simulation.conformance.checks.registration import (
    registration_arrives,
    registration_endpoint,
    registration_options,
    registration_resource_name,
    registration_serves_first,
    registration_version,
    starting,
)
from agent.simulation.conformance.stage import Stage
from agent.simulation.conformance.suite import check
from agent.simulation.conformance.timeline import Judge, NotApplicable, Skipped, Timeline, first, named
from agent.simulation.plugin_client import MESSAGE_LIMIT

_CALLS: Final = (
    8  # of Allocate while the kubelet reads nothing: their lists may not all fit into what a connection holds
)


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


@check(starting, "A3")
def list_arrives(t: Timeline) -> str:
    """The kubelet knows of no device before the first message on `ListAndWatch`: send one at once, an empty one
    if there is none.
    """
    streams = t.changes(Kind.STREAM_OPENED)
    if not streams:
        raise Skipped(f"no stream was opened{_see(t)}")
    listed = {it.resource for it in (*t.changes(Kind.LIST), *_too_large(t))}
    return first(f"no list of {it.resource} came" for it in streams if it.resource not in listed)


@check(starting, "A1")
def list_size(t: Timeline) -> str:
    """A kubelet receives 4 MiB in one message; it ends the stream of a longer list, and all devices are gone."""
    if not _too_large(t):
        _lists(t)
    return first(f"a list of {it.resource} has more than {MESSAGE_LIMIT >> 20} MiB: {it.text}" for it in _too_large(t))


@check(starting, "A3")
def list_ids_unique(t: Timeline) -> str:
    """A kubelet counts an ID that comes twice in a list as two devices, and can give out only one of them."""
    for resource, devices in _lists(t):
        twice = [one for one, times in Counter(device.id for device in devices).items() if times > 1]
        if twice:
            return f"a list of {resource} has more than once: {named(twice)}"
    return ""


@check(starting, "A3")
def list_ids_say_something(t: Timeline) -> str:
    """A device is known by its ID alone, in the checkpoint (the kubelet's file of which pod has what) and to those
    who monitor pods: no ID may be empty.
    """
    return first(
        f"a list of {resource} has an empty ID" for resource, devices in _lists(t) if not all(it.id for it in devices)
    )


@check(starting, "A11")
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


@check(starting, "A3")
def list_health(t: Timeline) -> str:
    """Only a device whose health is exactly `Healthy` is given out; the other word that others understand is
    `Unhealthy`.
    """
    for resource, devices in _lists(t):
        odd = {device.health for device in devices} - {HEALTHY, UNHEALTHY}
        if odd:
            return f"a list of {resource} has the health {named(odd)}"
    return ""


@check(starting, "A5")
def list_topology(t: Timeline) -> str:
    """A device with a `topology` without nodes is left out of `GetAllocatableResources`: leave `topology` out
    where there is none.
    """
    for resource, devices in _lists(t):
        for device in devices:
            if device.is_set("topology") and not device.topology.nodes:
                return f"{device.id!r} of {resource} has an empty topology"
    return ""


@check(starting, "A5")
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


@check(not_reading, "A3")
def list_reader_stalls(t: Timeline) -> str:
    """A busy kubelet reads its streams late, so that sending may block; an Allocate must be answered meanwhile."""
    return first(it.error for it in t.calls("stalled"))
