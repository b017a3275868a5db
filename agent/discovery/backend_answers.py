"""Checks each answer of a backend once, at the door, and blames the backend for what its interface does not allow.

Behind it nothing is checked again: the sources, the health book and the lists take what passed as it is. Pure. The backends are
made here, too: for one that cannot be made, another stands that lists no units and says why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NoReturn, TypeVar

import msgspec

from agent.runtime.errors import shown
from backends import registry
from backends.base import (
    ALL,
    ANY_SUBSYSTEM,
    All,
    Backend,
    Clears,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Heard,
    Host,
    HostPath,
    Link,
    Measure,
    Mount,
    Node,
    Problem,
    Released,
    Resource,
    Signal,
    Trend,
    Verdict,
    Watches,
)

T = TypeVar("T")

_NUMA_NODES: Final = 1 << 31  # the kernel's are ints


class NonsenseError(Exception):
    """A backend answered something that its interface does not allow."""


def ask(call: Callable[[], T]) -> T:
    """Make a call of a backend on the event loop; whatever it raises is an `Exception`.

    Raises:
        NonsenseError: it raised what would end more than this call: SystemExit, CancelledError.
        Exception: as the backend raised it.
    """
    try:
        return call()
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise NonsenseError(f"it raised {type(error).__name__}") from error


# --- what to listen to, and what it means ---


def watches(backend: Backend[Any], answer: Any) -> Watches:
    """What `watches()` returned.

    Raises:
        NonsenseError: no source could serve it.
    """
    if not isinstance(answer, Watches):
        raise NonsenseError(f"it returned {answer!r} where Watches are due")
    directories: Any = answer.directories
    poll = answer.poll
    allowed = {
        "subsystems": _are_names(answer.subsystems),
        "directories": isinstance(directories, frozenset) and all(map(_is_path, directories)),
        "facts": _are_names(answer.facts),
        "kernel_lines": _are_names(answer.kernel_lines),
        "links": isinstance(answer.links, bool),
        "listen": _are_names(answer.listen),
        "listen_without_log": _are_names(answer.listen_without_log),
        "poll": poll is None or (_is_number(poll) and poll > 0),
    }
    if not all(allowed.values()):
        raise _impossible("Watches", answer, allowed)
    if ANY_SUBSYSTEM in answer.subsystems and type(backend).affects is Backend.affects:
        raise NonsenseError("asks for every event of the node, and affects() does not say what each is about")
    return answer


def affected(answer: Any) -> frozenset[str] | All:
    """What `affects()` returned.

    Raises:
        NonsenseError: these are no units.
    """
    return ALL if answer is ALL else units(answer)


def units(answer: Any) -> frozenset[str]:
    """What a backend named as units.

    Raises:
        NonsenseError: these are no names.
    """
    if isinstance(answer, str):
        raise NonsenseError(f"it returned the string {answer!r} where units are due")
    listed = tuple(answer)
    if not _are_names(listed, tuple):
        wrong = next(unit for unit in listed if not _are_names((unit,), tuple))
        raise NonsenseError(f"it returned {wrong!r} where a unit's name is due")
    return frozenset(listed)


def probed(backend: Backend[Any], devices: Iterable[Device]) -> tuple[Signal, ...]:
    """What `probe()` says of these devices.

    Raises:
        NonsenseError: these are no signals.
        Exception: whatever the backend raises.
    """
    said = tuple(signal for device in devices for signal in backend.probe(device))
    return signals("probe", said) if said else ()


def signals(call: str, answer: Iterable[Any]) -> tuple[Signal, ...]:
    """What `probe` or `signals` said of hardware.

    Raises:
        NonsenseError: these are no signals.
    """
    said = tuple(answer)
    for signal in said:
        if not isinstance(signal, Signal):
            raise NonsenseError(f"{call}() returned {signal!r} where a Signal is due")
        allowed = {
            "hardware": _are_names((signal.hardware,), tuple),
            "reason": _are_names((signal.reason,), tuple),
            "verdict": isinstance(signal.verdict, Verdict),
            "message": isinstance(signal.message, str),
            "after": _is_number(signal.after) and signal.after >= 0,
            "recover_after": _is_number(signal.recover_after) and signal.recover_after >= 0,
            "clears_on": _are_all(signal.clears_on, frozenset, Clears),
            "measure": signal.measure is None or _is_measure(signal.measure),
            "unless_held": isinstance(signal.unless_held, bool),
            "fault": isinstance(signal.fault, str),
            "pid": signal.pid is None or isinstance(signal.pid, int),
            "process": isinstance(signal.process, str),
        }
        if not all(allowed.values()):
            raise _impossible(f"{call}() returned a Signal", signal, allowed)
    return said


def heard(answer: Any) -> Heard | None:
    """What `listen()` yielded.

    Raises:
        NonsenseError: it can be no record.
    """
    if answer is None:
        return None
    if not isinstance(answer, Heard):
        raise NonsenseError(f"listen() yielded {answer!r} where a Heard or None is due")
    properties: Any = answer.properties
    allowed = {
        "source": _are_names((answer.source,), tuple) and answer.source not in ("kmsg", "uevent"),
        "text": isinstance(answer.text, str),
        "properties": isinstance(properties, Mapping) and _are_all((*properties, *properties.values()), tuple, str),
    }
    if not all(allowed.values()):
        raise _impossible("listen() yielded a Heard", answer, allowed)
    return answer


# --- what there is ---


def discovery(answer: Any, unit: str) -> Discovery:
    """What `discover()` returned for a unit.

    Raises:
        NonsenseError: it cannot be.
    """
    if not isinstance(answer, Discovery):
        raise NonsenseError(f"discover() returned {type(answer).__name__} where a Discovery is due")
    kinds = ((answer.devices, Device), (answer.problems, Problem), (answer.links, Link), (answer.beside, Device))
    for found, kind in kinds:
        if not isinstance(found, tuple):
            raise NonsenseError(f"discover() returned {type(found).__name__} where a tuple of {kind.__name__} is due")
        if wrong := [item for item in found if not isinstance(item, kind)]:
            raise NonsenseError(f"discover() returned {type(wrong[0]).__name__} where a {kind.__name__} is due")
    for link in answer.links:
        if not (_are_names((link.one, link.other), tuple) and _are_all((link.weight,), tuple, int)):
            raise NonsenseError(f"discover() returned the impossible {link}")
    for problem in answer.problems:
        if not _are_all((problem.subject, problem.sentence, problem.resource), tuple, str):
            raise NonsenseError(f"discover() returned the impossible {problem}")
    if not (_are_all((answer.settles,), tuple, (float, int)) and 0 <= answer.settles < math.inf):
        raise NonsenseError(f"discover() returned the impossible settles={answer.settles!r}")
    devices: tuple[Any, ...] = (*answer.devices, *answer.beside)
    for device in devices:
        numa = device.numa_node
        allowed = {
            "key": _are_names((device.key,), tuple),
            "unit": device.unit == unit,
            "resource": device.resource is None or isinstance(device.resource, str),
            "hardware": device.hardware and _are_names(device.hardware),
            "depends": _are_names(device.depends),
            "exclusive": _are_names(device.exclusive),
            "parts": isinstance(device.parts, tuple) and all(part and _are_names(part) for part in device.parts),
            "identity": isinstance(device.identity, str),
            "aliases": _are_names(device.aliases),
            "place": _are_names(device.place),
            "bindings": isinstance(device.bindings, Mapping)
            and _are_names((*device.bindings.keys(), *device.bindings.values()), tuple),
            "unusable": isinstance(device.unusable, str),
            "by_design": isinstance(device.by_design, bool),
            "no_reset": isinstance(device.no_reset, str),
            "nodes": _lie_at_paths(device.nodes, Node) and all(isinstance(it.permissions, str) for it in device.nodes),
            "mounts": _lie_at_paths(device.mounts, Mount),
            "ancestry": _are_names(device.ancestry, tuple),
            "numa_node": numa is None or (isinstance(numa, int) and 0 <= numa < _NUMA_NODES),
            "attributes": isinstance(device.attributes, Mapping)
            and all(
                isinstance(name, str) and _are_all(values, tuple, str) for name, values in device.attributes.items()
            ),
        }
        if not all(allowed.values()):
            raise _impossible(f"discover() returned device {device.key!r}", device, allowed)
    return answer


# --- what is offered and given ---


def ids(answer: Any) -> tuple[str, ...]:
    """What `ids()` returned, each once.

    Raises:
        NonsenseError: one of them cannot be sent to a kubelet.
    """
    if isinstance(answer, str):
        raise NonsenseError(f"ids() returned the string {answer!r} where IDs are due")
    unique = tuple(dict.fromkeys(answer))
    if not _are_names(unique, tuple):
        raise NonsenseError(f"{next(it for it in unique if not _are_names((it,), tuple))!r} is no ID")
    return unique


def edits(answer: Any) -> ContainerEdits:
    """What `edits()` returned; its parts are checked where they are put into bytes.

    Raises:
        NonsenseError: it is something else.
    """
    if not isinstance(answer, ContainerEdits):
        raise NonsenseError(f"edits() returned {type(answer).__name__}")
    return answer


def reset(answer: Any) -> frozenset[str]:
    """The hardware that `prepare()` has reset.

    Raises:
        NonsenseError: these are no names.
    """
    names = answer if isinstance(answer, str) else tuple(answer)
    if not _are_names(names, tuple):
        raise NonsenseError(f"prepare() returned {names!r} where the names of hardware are due")
    return frozenset(names)


def needs_claim(backend: Backend[Any], resource: Resource[Any]) -> bool:
    """Whether the backend makes hardware of this resource ready.

    Raises:
        Exception: whatever the backend raises.
    """
    return bool(ask(lambda: backend.needs_claim(resource)))


# --- what values are ---


def _impossible(what: str, answer: Any, allowed: Mapping[str, object]) -> NonsenseError:
    wrong = next(name for name, right in allowed.items() if not right)
    return NonsenseError(f"{what} with the impossible {wrong} {getattr(answer, wrong)!r}")


def _are_names(answer: Any, kind: type[frozenset[Any] | tuple[Any, ...]] = frozenset) -> bool:
    """Whether these are texts that can be written down. A file's name may have bytes that cannot."""
    if not isinstance(answer, kind) or "" in answer:
        return False
    try:
        "".join(answer).encode()
    except (TypeError, UnicodeEncodeError):
        return False
    return True


def _are_all(answer: Any, kind: type[frozenset[Any] | tuple[Any, ...]], item: type | tuple[type, ...]) -> bool:
    return isinstance(answer, kind) and all(isinstance(it, item) for it in answer)


def _is_path(answer: Any) -> bool:
    return isinstance(answer, HostPath) and answer.text.startswith("/") and "\0" not in answer.text


def _lie_at_paths(answer: Any, kind: type[Node | Mount]) -> bool:
    """Whether these are nodes, or mounts, from a path of the host to one of the container."""
    return isinstance(answer, tuple) and all(
        isinstance(it, kind) and _is_path(it.path) and isinstance(it.container_path, str) for it in answer
    )


def _is_number(answer: Any) -> bool:
    return isinstance(answer, int | float) and math.isfinite(answer)


def _is_measure(answer: Any) -> bool:
    if not isinstance(answer, Measure):
        return False
    trend: Any = answer.trend
    return _are_names((answer.name,), tuple) and _are_all((answer.value,), tuple, int) and isinstance(trend, Trend)


# --- making backends ---


def make_backends(host: Host, resources: Sequence[Resource[Any]]) -> dict[str, Backend[Any]]:
    """One backend for each kind that the resources name, with all resources of that kind."""
    by_kind: defaultdict[str, list[Resource[Any]]] = defaultdict(list)
    for resource in resources:
        by_kind[resource.spec.backend].append(resource)
    return {kind: _make(kind, host, of_kind) for kind, of_kind in by_kind.items()}


def _make(kind: str, host: Host, resources: list[Resource[Any]]) -> Backend[Any]:
    try:
        return ask(lambda: registry.load(kind)(host, resources))
    except Exception as error:  # noqa: BLE001  # a backend may raise anything; the others go on
        return _Unmade(host, resources, error)


def why_unmade(backend: Backend[Any]) -> str:
    """Why it could not be started; empty if it could."""
    return f"it could not be started: {shown(backend.error)}" if isinstance(backend, _Unmade) else ""


class _Unmade(Backend[msgspec.Struct]):
    """Stands for a backend whose constructor raised: its resources are served, empty, with the reason."""

    options_type: ClassVar = msgspec.Struct

    def __init__(self, host: Host, resources: Sequence[Resource[Any]], error: Exception) -> None:
        super().__init__(host, resources)
        self.error = error

    def _raise(self) -> NoReturn:
        raise RuntimeError(why_unmade(self)) from self.error

    def units(self) -> Iterable[str]:
        self._raise()

    def discover(self, unit: str) -> Discovery:
        raise LookupError(unit)

    def edits(self, resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:  # noqa: ARG002
        raise LookupError(resource.name)

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        self._raise()
