"""Makes the metrics: gauges of the status, counters and histograms of the counts; works while it is iterated."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from resource import RLIMIT_NOFILE, RUSAGE_SELF, getrlimit, getrusage
from typing import Final, Literal

from agent.console.http.prometheus_format import head, histogram, sample
from agent.console.views import Resource, Status
from agent.inventory.shortfall import REASONS
from agent.runtime.counts import (
    ALLOCATION_RESULTS,
    PREPARE_RESULTS,
    REGISTRATION_RESULTS,
    SLICE_RESULTS,
    Counts,
    Histogram,
)

_STATES: Final = ("Healthy", "Degraded", "Unhealthy")
_NAMED: Final = 200  # devices that are not offered; a card without its driver may have thousands of functions
_USUAL_REASONS: Final = ("healthy", "gone")  # the others are the backends' own


def exposition(status: Status, counts: Counts) -> Iterator[str]:
    """All metrics, in pieces of a few lines; label values that are known in advance are there from the start."""
    yield from _about_us(status)
    yield from process_samples(status.started)
    resources = (
        _devices,
        _device_healthy,
        _device_not_healthy,
        _device_info,
        _device_assigned,
        _registered,
        _overtaken,
    )
    for metric in resources:
        yield from metric(status.resources)
    yield from _not_offered(status)
    yield from _streams(status, counts)
    yield from _transitions(status.resources, counts)
    yield from _by_result("registrations_total", "Registrations with the kubelet, by how they ended.",
                          counts.registrations, REGISTRATION_RESULTS, status.resources)  # fmt: skip
    yield from _by_result("allocations_total", "Containers that asked for devices, by what they were told.",
                          counts.allocations, ALLOCATION_RESULTS, status.resources)  # fmt: skip
    yield from _duration("allocate_duration_seconds", "From an Allocate to its reply.", counts.allocating)
    yield from _duration(
        "preferred_allocation_duration_seconds", "From a GetPreferredAllocation to its reply.", counts.preferring
    )
    yield from _claims(status.resources, counts)
    yield from _events(counts)
    yield from _backends(status, counts)
    yield from _duration(
        "loop_delay_seconds", "How late the event loop turned, seen every few seconds.", counts.lateness
    )
    yield head("log_lines_lost_total", "counter", "Lines of the log that stderr did not take.")
    yield sample("log_lines_lost_total", counts.lost_lines())


def _about_us(status: Status) -> Iterator[str]:
    configuration = status.configuration
    yield head("build_info", "gauge", "The version that runs.") + sample("build_info", 1, version=status.version)
    yield head("config_last_reload_successful", "gauge", "Whether the configuration was read without a mistake.")
    yield sample("config_last_reload_successful", int(not configuration.mistakes))
    yield head("config_last_reload_timestamp_seconds", "gauge", "When the configuration in force was read.")
    yield sample("config_last_reload_timestamp_seconds", configuration.loaded)
    yield head("problems", "gauge", "What does not work, by the backend or the part of Fairlead that it concerns.")
    problems = Counter({resource.backend: 0 for resource in status.resources if resource.backend})
    problems.update(problem.backend or problem.subject for problem in status.problems)
    yield from (sample("problems", number, part=part) for part, number in problems.items())
    unkept = any(problem.subject == "state" and not problem.backend for problem in status.problems)
    yield head("standing_by", "gauge", "Whether another Fairlead serves the node, and this one is ready to take over.")
    yield sample("standing_by", int(status.standing_by))
    yield head("standby_ready", "gauge", "Whether another Fairlead is ready to take over from this one.")
    yield sample("standby_ready", int(bool(status.standby)))
    yield head("state_kept", "gauge", "Whether drains and claims are on the disk, and were found whole at the start.")
    yield sample("state_kept", int(not unkept))


# --- what there is ---


def _devices(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("devices", "gauge", "IDs that the kubelet is told of, by their health.")
    for resource in resources:
        number = Counter(dict.fromkeys(_STATES, 0))
        for device in resource.devices:
            number[device.state] += len(device.ids)
        for state, ids in number.items():
            yield sample("devices", ids, resource_name=resource.name, health=state)


def _device_healthy(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("device_healthy", "gauge", "Whether all IDs of a device are offered to pods.")
    for resource in resources:
        bad = {device.key for device in resource.devices if device.state == "Unhealthy"}
        yield from (
            sample("device_healthy", int(key not in bad), resource_name=resource.name, device=key)
            for key in dict.fromkeys(device.key for device in resource.devices)
        )


def _device_not_healthy(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("device_not_healthy", "gauge", "IDs of a device that is Degraded or Unhealthy, by the reason.")
    for resource in resources:
        number = Counter[tuple[str, str, str]]()
        for device in resource.devices:
            if device.state != "Healthy":
                number[device.key, device.state, device.reason] += len(device.ids)
        for (key, state, reason), ids in number.items():
            yield sample(
                "device_not_healthy", ids, resource_name=resource.name, device=key, health=state, reason=reason
            )


def _device_info(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("device_info", "gauge", "What a device is and where; a label is empty where nobody knows it.")
    for resource in resources:
        for device in {device.key: device for device in resource.devices}.values():
            yield sample(
                "device_info", 1,
                resource_name=resource.name, device=device.key, backend=resource.backend,
                numa_node="" if device.numa_node is None else str(device.numa_node),
                hardware=",".join(device.hardware), name=device.name, model=device.model,
            )  # fmt: skip


def _device_assigned(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("device_assigned", "gauge", "How many IDs of a device a container holds.")
    for resource in resources:
        number = Counter[tuple[str, str, str, str]]()
        for device in resource.devices:
            for held in device.held:
                number.update((device.key, who.namespace, who.pod, who.container) for who in held.holders if who.pod)
            yield ""  # a device may have thousands of holders
        for (key, namespace, pod, container), ids in number.items():
            yield sample(
                "device_assigned", ids,
                resource_name=resource.name, device=key, namespace=namespace, pod=pod, container=container,
            )  # fmt: skip


def _registered(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("registered", "gauge", "Whether the kubelet has the resource, with an open stream.")
    for resource in resources:
        yield sample("registered", int(resource.served), resource_name=resource.name)


def _overtaken(resources: Iterable[Resource]) -> Iterator[str]:
    yield head("overtaken", "gauge", "Whether another plugin has registered the resource since we did.")
    for resource in resources:
        yield sample("overtaken", int(resource.overtaken), resource_name=resource.name)


def _not_offered(status: Status) -> Iterator[str]:
    yield head("devices_not_offered", "gauge", "Devices that the resource is meant to have and no pod can get.")
    names = (*(it.name for it in status.resources), *(it.name for it in status.templates))
    usual = {(name, reason): 0 for name in names for reason in REASONS}
    counted = Counter((it.resource, it.reason) for it in status.unclaimed if it.resource)
    for (name, reason), number in (usual | counted).items():
        yield sample("devices_not_offered", number, resource_name=name, reason=reason)
    yield head("device_not_offered", "gauge", f"Each of these devices, {_NAMED:,} at most.")
    for it in [it for it in status.unclaimed if it.resource][:_NAMED]:
        yield sample(
            "device_not_offered", 1,
            resource_name=it.resource, device=it.device, name=it.name, model=it.model, reason=it.reason,
        )  # fmt: skip


# --- what happened ---


def _streams(status: Status, counts: Counts) -> Iterator[str]:
    yield head("list_and_watch_streams", "gauge", "Streams that the kubelet has open.")
    yield sample("list_and_watch_streams", sum(resource.streaming for resource in status.resources))
    yield head("list_and_watch_updates_total", "counter", "Lists that were written to streams.")
    yield sample("list_and_watch_updates_total", counts.updates)


def _transitions(resources: Iterable[Resource], counts: Counts) -> Iterator[str]:
    yield head(
        "health_transitions_total", "counter", "Devices that changed their state, by the reason for the new one."
    )
    usual = {(resource.name, reason): 0 for resource in resources for reason in _USUAL_REASONS}
    for (name, reason), number in (usual | counts.transitions).items():
        yield sample("health_transitions_total", number, resource_name=name, reason=reason)


def _by_result(
    name: str, meaning: str, counted: Counter[tuple[str, str]], results: Iterable[str], resources: Iterable[Resource]
) -> Iterator[str]:
    yield head(name, "counter", meaning)
    usual = {(resource.name, result): 0 for resource in resources for result in results}
    for (resource_name, result), number in (usual | counted).items():
        yield sample(name, number, resource_name=resource_name, result=result)


def _claims(resources: Sequence[Resource], counts: Counts) -> Iterator[str]:
    yield head("claims_held", "gauge", "ResourceClaims whose pods have devices of the resource.")
    for resource in resources:
        holders = (who for device in resource.devices for held in device.held for who in held.holders if who.claim)
        yield sample("claims_held", len({(who.namespace, who.claim) for who in holders}), resource_name=resource.name)
    yield from _by_result("claim_prepares_total", "ResourceClaims that the kubelet had prepared, by what it was told.",
                          counts.prepares, PREPARE_RESULTS, resources)  # fmt: skip
    yield from _duration("claim_prepare_duration_seconds", "From a NodePrepareResources to what a claim is told.",
                         counts.preparing)  # fmt: skip
    yield head("resource_slice_writes_total", "counter", "ResourceSlices that were made, replaced or deleted.")
    for result in SLICE_RESULTS:
        yield sample("resource_slice_writes_total", counts.slice_writes[result], result=result)


def _events(counts: Counts) -> Iterator[str]:
    yield head("uevents_total", "counter", "Kernel events of the subsystems that backends watch.")
    for (subsystem, action), number in list(counts.uevents.items()):
        yield sample("uevents_total", number, subsystem=subsystem, action=action)
    yield head(
        "uevent_overflows_total", "counter", "How often the kernel dropped events; everything is looked at then."
    )
    yield sample("uevent_overflows_total", counts.overflows)
    yield from _duration(
        "hotplug_latency_seconds", "From a kernel event to the list that it changed, written to the stream.",
        counts.hotplug,
    )  # fmt: skip


def _backends(status: Status, counts: Counts) -> Iterator[str]:
    kinds = sorted({resource.backend for resource in status.resources if resource.backend} | counts.discovery.keys())
    yield head("discovery_duration_seconds", "histogram", "Looks at a backend's hardware, at all of it or a part.")
    for kind in kinds:
        yield from histogram("discovery_duration_seconds", counts.discovery.get(kind) or Histogram(), backend=kind)
    down = {problem.backend for problem in status.problems if problem.subject == problem.backend}
    yield head("backend_up", "gauge", "Whether a backend can tell what hardware there is.")
    for kind in kinds:
        yield sample("backend_up", int(kind not in down), backend=kind)


def _duration(name: str, meaning: str, counted: Histogram) -> Iterator[str]:
    yield head(name, "histogram", meaning)
    yield from histogram(name, counted)


# --- what this process takes of the machine, as every Prometheus client tells it (`process_*`) ---

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def process_samples(started: float) -> Iterator[str]:
    """The samples; `started` is in seconds since 1970. Where /proc is not to be read, without what it would tell."""
    usage = getrusage(RUSAGE_SELF)
    yield _process_sample("cpu_seconds_total", "counter", "User and system CPU time.", usage.ru_utime + usage.ru_stime)
    yield _process_sample("start_time_seconds", "gauge", "When it started.", started)
    yield _process_sample("max_fds", "gauge", "How many files it may open.", getrlimit(RLIMIT_NOFILE)[0])
    try:
        virtual, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
        files, threads = (sum(1 for _ in Path("/proc/self", it).iterdir()) for it in ("fd", "task"))
    except OSError:
        return
    yield _process_sample("virtual_memory_bytes", "gauge", "Virtual memory.", virtual * _PAGE)
    yield _process_sample("resident_memory_bytes", "gauge", "Resident memory.", resident * _PAGE)
    yield _process_sample("open_fds", "gauge", "Open files.", files)
    yield _process_sample("threads", "gauge", "Threads.", threads)


def _process_sample(name: str, kind: Literal["gauge", "counter"], meaning: str, value: float) -> str:
    return f"# HELP process_{name} {meaning}\n# TYPE process_{name} {kind}\nprocess_{name} {value}\n"
