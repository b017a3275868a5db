"""The metrics, as one table, and Prometheus' text format (version 0.0.4) of them; works while it is iterated.

prometheus_client makes a whole exposition in one go and takes 20 us for each sample: 60 ms with 1,000 devices, in which
nothing else on the loop could run. A sample takes 1 us here. The tests have prometheus_client read it.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from resource import RLIMIT_NOFILE, RUSAGE_SELF, getrlimit, getrusage
from typing import Any, Final, Literal

from msgspec import Struct

from agent.console.views import Resource, Status, Unclaimed
from agent.inventory.shortfall import REASONS
from agent.runtime.counts import (
    ALLOCATION_RESULTS,
    BOUNDS,
    PREPARE_RESULTS,
    REGISTRATION_RESULTS,
    SLICE_RESULTS,
    Counts,
    Histogram,
)

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_NAMED: Final = 200  # devices that are not offered; a card without its driver may have thousands of functions
_USUAL_REASONS: Final = ("healthy", "gone")  # the others are the backends' own
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


class Seen:
    """What the metrics are made of."""

    def __init__(self, status: Status, counts: Counts) -> None:
        self.status, self.counts, self.resources = status, counts, status.resources

    @cached_property
    def lacking(self) -> list[Unclaimed]:
        """Devices that resources are meant to have and no pod can get."""
        return [it for it in self.status.unclaimed if it.resource]

    @cached_property
    def kinds(self) -> list[str]:
        """The backends."""
        return sorted({it.backend for it in self.resources if it.backend} | self.counts.discovery.keys())

    @cached_property
    def process(self) -> Mapping[str, float]:
        """What /proc tells of this process; nothing where it is not to be read."""
        with suppress(OSError):
            virtual, resident = map(int, Path("/proc/self/statm").read_text().split()[:2])
            files, threads = (sum(1 for _ in Path("/proc/self", it).iterdir()) for it in ("fd", "task"))
            return {"virtual": virtual * _PAGE, "resident": resident * _PAGE, "files": files, "threads": threads}
        return {}


Sample = tuple[Any, ...]
"""The value (of a histogram its counts), then the labels' values; empty: nothing, so that other tasks have their turn."""


class Metric(Struct, frozen=True):
    """One metric."""

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    """One line."""
    labels: tuple[str, ...]
    read: Callable[[Seen], Iterable[Sample]]


# --- what there is ---


def _problems(seen: Seen) -> Iterator[Sample]:
    problems = Counter({resource.backend: 0 for resource in seen.resources if resource.backend})
    problems.update(problem.backend or problem.subject for problem in seen.status.problems)
    return ((number, part) for part, number in problems.items())


def _is_state_kept(seen: Seen) -> bool:
    return not any(problem.subject == "state" and not problem.backend for problem in seen.status.problems)


def _devices(seen: Seen) -> Iterator[Sample]:
    for resource in seen.resources:
        number = resource.by_state
        number["Unhealthy"] += number.pop("Drained")  # as the kubelet has them
        yield from ((ids, resource.name, state) for state, ids in number.items())


def _not_offered(seen: Seen) -> Iterator[Sample]:
    names = (*(it.name for it in seen.resources), *(it.name for it in seen.status.templates))
    return _usual(names, REASONS, Counter((it.resource, it.reason) for it in seen.lacking))


def _device_healthy(seen: Seen) -> Iterator[Sample]:
    for resource in seen.resources:
        bad = {device.key for device in resource.devices if device.state == "Unhealthy"}
        for key in dict.fromkeys(device.key for device in resource.devices):
            yield key not in bad, resource.name, key


def _device_not_healthy(seen: Seen) -> Iterator[Sample]:
    for resource in seen.resources:
        number = Counter[tuple[str, str, str]]()
        for device in resource.devices:
            if device.state != "Healthy":
                number[device.key, device.state, device.reason] += len(device.ids)
        yield from ((ids, resource.name, *what) for what, ids in number.items())


def _device_info(seen: Seen) -> Iterator[Sample]:
    for resource in seen.resources:
        for it in {device.key: device for device in resource.devices}.values():
            numa = "" if it.numa_node is None else str(it.numa_node)
            yield 1, resource.name, it.key, resource.backend, numa, ",".join(it.hardware), it.name, it.model


def _device_assigned(seen: Seen) -> Iterator[Sample]:
    for resource in seen.resources:
        number = Counter[tuple[str, str, str, str]]()
        for device in resource.devices:
            for held in device.held:
                number.update((device.key, who.namespace, who.pod, who.container) for who in held.holders if who.pod)
            yield ()  # a device may have thousands of holders
        yield from ((ids, resource.name, *who) for who, ids in number.items())


def _claims_held(seen: Seen) -> Iterator[Sample]:
    for resource in seen.resources:
        holders = (who for device in resource.devices for held in device.held for who in held.holders if who.claim)
        yield len({(who.namespace, who.claim) for who in holders}), resource.name


def _backend_up(seen: Seen) -> Iterator[Sample]:
    down = {problem.backend for problem in seen.status.problems if problem.subject == problem.backend}
    return ((kind not in down, kind) for kind in seen.kinds)


# --- what was counted ---


def _usual(names: Iterable[str], values: Iterable[str], counted: Counter[tuple[str, str]]) -> Iterator[Sample]:
    """What was counted of each resource, and 0 for the values that are known in advance."""
    every = {(name, value): 0 for name in names for value in values} | counted
    return ((number, *what) for what, number in every.items())


def _by_result(counted: Callable[[Counts], Counter[tuple[str, str]]], results: Iterable[str]) -> Callable[[Seen], Any]:
    return lambda it: _usual((resource.name for resource in it.resources), results, counted(it.counts))


# --- the table ---


def _one(name: str, kind: Literal["gauge", "counter"], meaning: str, value: Callable[[Seen], float | None]) -> Metric:
    """A metric without labels; without a sample where its value is not known."""
    return Metric(name, kind, meaning, (), lambda it: [(known,) for known in [value(it)] if known is not None])


def _duration(name: str, meaning: str, counted: Callable[[Counts], Histogram]) -> Metric:
    return Metric(name, "histogram", meaning, (), lambda it: [(counted(it.counts),)])


def _yes(name: str, meaning: str, labels: tuple[str, ...], value: Callable[[Resource], bool]) -> Metric:
    """Whether something is so, of each resource."""
    return Metric(name, "gauge", meaning, labels, lambda it: [(value(one), one.name) for one in it.resources])


_OF: Final = ("resource_name",)
_DEVICE: Final = (*_OF, "device")
_RESULT: Final = (*_OF, "result")

METRICS: Final = (
    Metric("fairlead_build_info", "gauge", "The version that runs.", ("version",),
           lambda it: [(1, it.status.version)]),
    _one("fairlead_config_last_reload_successful", "gauge", "Whether the configuration was read without a mistake.",
         lambda it: not it.status.configuration.mistakes),
    _one("fairlead_config_last_reload_timestamp_seconds", "gauge", "When the configuration in force was read.",
         lambda it: it.status.configuration.loaded),
    Metric("fairlead_problems", "gauge", "What does not work, by the backend or the part of Fairlead that it concerns.",
           ("part",), _problems),
    _one("fairlead_standing_by", "gauge", "Whether another Fairlead serves the node, and this one is ready to take over.",
         lambda it: it.status.standing_by),
    _one("fairlead_standby_ready", "gauge", "Whether another Fairlead is ready to take over from this one.",
         lambda it: bool(it.status.standby)),
    _one("fairlead_state_kept", "gauge", "Whether drains and claims are on the disk, and were found whole at the start.",
         _is_state_kept),
    _one("process_cpu_seconds_total", "counter", "User and system CPU time.",
         lambda _: sum(getrusage(RUSAGE_SELF)[:2])),
    _one("process_start_time_seconds", "gauge", "When it started.", lambda it: it.status.started),
    _one("process_max_fds", "gauge", "How many files it may open.", lambda _: getrlimit(RLIMIT_NOFILE)[0]),
    _one("process_virtual_memory_bytes", "gauge", "Virtual memory.", lambda it: it.process.get("virtual")),
    _one("process_resident_memory_bytes", "gauge", "Resident memory.", lambda it: it.process.get("resident")),
    _one("process_open_fds", "gauge", "Open files.", lambda it: it.process.get("files")),
    _one("process_threads", "gauge", "Threads.", lambda it: it.process.get("threads")),
    Metric("fairlead_devices", "gauge", "IDs that the kubelet is told of, by their health.", (*_OF, "health"), _devices),
    Metric("fairlead_device_healthy", "gauge", "Whether all IDs of a device are offered to pods.",
           _DEVICE, _device_healthy),
    Metric("fairlead_device_not_healthy", "gauge", "IDs of a device that is Degraded or Unhealthy, by the reason.",
           (*_DEVICE, "health", "reason"), _device_not_healthy),
    Metric("fairlead_device_info", "gauge", "What a device is and where; a label is empty where it is unknown.",
           (*_DEVICE, "backend", "numa_node", "hardware", "name", "model"), _device_info),
    Metric("fairlead_device_assigned", "gauge", "How many IDs of a device a container holds.",
           (*_DEVICE, "namespace", "pod", "container"), _device_assigned),
    _yes("fairlead_registered", "Whether the kubelet has the resource, with an open stream.", _OF, lambda it: it.served),
    _yes("fairlead_overtaken", "Whether another plugin has registered the resource since we did.", _OF,
         lambda it: it.overtaken),
    Metric("fairlead_devices_not_offered", "gauge", "Devices that the resource is meant to have and no pod can get.",
           (*_OF, "reason"), _not_offered),
    Metric("fairlead_device_not_offered", "gauge", f"Each of these devices, {_NAMED:,} at most.",
           (*_DEVICE, "name", "model", "reason"),
           lambda seen: [(1, it.resource, it.device, it.name, it.model, it.reason) for it in seen.lacking[:_NAMED]]),
    _one("fairlead_list_and_watch_streams", "gauge", "Streams that the kubelet has open.",
         lambda it: sum(resource.streaming for resource in it.resources)),
    _one("fairlead_list_and_watch_updates_total", "counter", "Lists that were written to streams.",
         lambda it: it.counts.updates),
    Metric("fairlead_health_transitions_total", "counter",
           "Devices that changed their state, by the reason for the new one.", (*_OF, "reason"),
           _by_result(lambda it: it.transitions, _USUAL_REASONS)),
    Metric("fairlead_registrations_total", "counter", "Registrations with the kubelet, by how they ended.", _RESULT,
           _by_result(lambda it: it.registrations, REGISTRATION_RESULTS)),
    Metric("fairlead_allocations_total", "counter", "Containers that asked for devices, by what they were told.", _RESULT,
           _by_result(lambda it: it.allocations, ALLOCATION_RESULTS)),
    _duration("fairlead_allocate_duration_seconds", "From an Allocate to its reply.", lambda it: it.allocating),
    _duration("fairlead_preferred_allocation_duration_seconds", "From a GetPreferredAllocation to its reply.",
              lambda it: it.preferring),
    Metric("fairlead_claims_held", "gauge", "ResourceClaims whose pods have devices of the resource.", _OF, _claims_held),
    Metric("fairlead_claim_prepares_total", "counter",
           "ResourceClaims that the kubelet had prepared, by what it was told.", _RESULT,
           _by_result(lambda it: it.prepares, PREPARE_RESULTS)),
    _duration("fairlead_claim_prepare_duration_seconds", "From a NodePrepareResources to what a claim is told.",
              lambda it: it.preparing),
    Metric("fairlead_resource_slice_writes_total", "counter", "ResourceSlices that were made, replaced or deleted.",
           ("result",), lambda it: [(it.counts.slice_writes[result], result) for result in SLICE_RESULTS]),
    Metric("fairlead_uevents_total", "counter", "Kernel events of the subsystems that backends watch.",
           ("subsystem", "action"), lambda it: [(number, *what) for what, number in it.counts.uevents.items()]),
    _one("fairlead_uevent_overflows_total", "counter",
         "How often the kernel dropped events; everything is looked at then.", lambda it: it.counts.overflows),
    _duration("fairlead_hotplug_latency_seconds",
              "From a kernel event to the list that it changed, written to the stream.", lambda it: it.hotplug),
    Metric("fairlead_discovery_duration_seconds", "histogram", "Looks at a backend's hardware, at all of it or a part.",
           ("backend",), lambda it: [(it.counts.discovery.get(kind) or Histogram(), kind) for kind in it.kinds]),
    Metric("fairlead_backend_up", "gauge", "Whether a backend can tell what hardware there is.", ("backend",),
           _backend_up),
    _duration("fairlead_loop_delay_seconds", "How late the event loop turned, seen every few seconds.",
              lambda it: it.lateness),
    _one("fairlead_log_lines_lost_total", "counter", "Lines of the log that stderr did not take.",
         lambda it: it.counts.lost_lines()),
)  # fmt: skip


# --- the format ---


def exposition(status: Status, counts: Counts) -> Iterator[str]:
    """All metrics, in pieces of a few lines; label values that are known in advance are there from the start."""
    seen = Seen(status, counts)
    for metric in METRICS:
        yield from written(metric, seen)


def written(metric: Metric, seen: Seen) -> Iterator[str]:
    """One metric, line by line."""
    yield f"# HELP {metric.name} {metric.meaning}\n# TYPE {metric.name} {metric.kind}\n"
    line = _line(metric.name, metric.labels)
    for it in metric.read(seen):
        if metric.kind == "histogram":
            yield from _histogram(metric, it[0], [_escaped(text) for text in it[1:]])
        else:
            yield line % (*map(_escaped, it[1:]), +it[0]) if it else ""  # + makes 1 of True


def _line(name: str, labels: Iterable[str]) -> str:
    """A sample's line, for the labels' values and its own."""
    inside = ",".join(f'{label}="%s"' for label in labels)
    return f"{name}{{{inside}}} %s\n" if inside else f"{name} %s\n"


def _histogram(metric: Metric, counted: Histogram, texts: Sequence[str]) -> Iterator[str]:
    """The samples of a histogram, each bucket with those before it."""
    so_far, line = 0, _line(f"{metric.name}_bucket", (*metric.labels, "le"))
    for bound, number in zip((*map(str, BOUNDS), "+Inf"), counted.buckets, strict=True):
        so_far += number
        yield line % (*texts, bound, so_far)
    yield _line(f"{metric.name}_sum", metric.labels) % (*texts, counted.total)
    yield _line(f"{metric.name}_count", metric.labels) % (*texts, so_far)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
