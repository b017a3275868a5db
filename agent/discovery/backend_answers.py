"""Checks each answer of a backend once, at the door, and blames the backend for what its interface does not allow.

Behind it nothing is checked again: the sources, the health book and the lists take what passed as it is. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from backends.base import (
    ALL,
    ANY_SUBSYSTEM,
    All,
    Backend,
    Clears,
    ContainerEdits,
    Device,
    Discovery,
    HostPath,
    Link,
    Measure,
    Mount,
    Node,
    Problem,
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
    poll = answer.poll
    allowed = {
        "subsystems": _is_names(answer.subsystems),
        "directories": _is_all(answer.directories, frozenset, _is_path),
        "facts": _is_names(answer.facts),
        "kernel_lines": _is_names(answer.kernel_lines),
        "links": isinstance(answer.links, bool),
        "poll": poll is None or (_is_number(poll) and poll > 0),
    }
    _refuse("Watches", answer, allowed)
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
    listed = list(answer)
    if wrong := [unit for unit in listed if not _is_name(unit)]:
        raise NonsenseError(f"it returned {wrong[0]!r} where a unit's name is due")
    return frozenset(listed)


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
            "hardware": _is_name(signal.hardware),
            "reason": _is_name(signal.reason),
            "verdict": isinstance(signal.verdict, Verdict),
            "message": isinstance(signal.message, str),
            "after": _is_duration(signal.after),
            "recover_after": _is_duration(signal.recover_after),
            "clears_on": _is_all(signal.clears_on, frozenset, _is_clearing),
            "measure": signal.measure is None or _is_measure(signal.measure),
            "unless_held": isinstance(signal.unless_held, bool),
        }
        _refuse(f"{call}() returned a Signal", signal, allowed)
    return said


# --- what there is ---


def discovery(answer: Any, unit: str) -> Discovery:
    """What `discover()` returned for a unit.

    Raises:
        NonsenseError: it cannot be.
    """
    if not isinstance(answer, Discovery):
        raise NonsenseError(f"discover() returned {type(answer).__name__} where a Discovery is due")
    _check_all(answer.devices, Device)
    _check_all(answer.problems, Problem)
    _check_all(answer.links, Link)
    _check_all(answer.beside, Device)
    for link in answer.links:
        if not (_is_name(link.one) and _is_name(link.other) and _is_whole(link.weight)):
            raise NonsenseError(f"discover() returned the impossible {link}")
    for problem in answer.problems:
        if not (_is_text(problem.subject) and _is_text(problem.sentence)):
            raise NonsenseError(f"discover() returned the impossible {problem}")
    for device in (*answer.devices, *answer.beside):
        _check_device(device, unit)
    return answer


def _check_all(answer: Any, kind: type) -> None:
    if not isinstance(answer, tuple):
        raise NonsenseError(f"discover() returned {type(answer).__name__} where a tuple of {kind.__name__} is due")
    if wrong := [item for item in answer if not isinstance(item, kind)]:
        raise NonsenseError(f"discover() returned {type(wrong[0]).__name__} where a {kind.__name__} is due")


def _check_device(device: Any, unit: str) -> None:
    numa = device.numa_node
    allowed = {
        "key": _is_name(device.key),
        "unit": device.unit == unit,
        "resource": device.resource is None or isinstance(device.resource, str),
        "hardware": device.hardware and _is_names(device.hardware),
        "depends": _is_names(device.depends),
        "exclusive": _is_names(device.exclusive),
        "parts": isinstance(device.parts, tuple) and all(part and _is_names(part) for part in device.parts),
        "identity": isinstance(device.identity, str),
        "bindings": isinstance(device.bindings, Mapping)
        and all(_is_name(name) for pair in device.bindings.items() for name in pair),
        "unusable": isinstance(device.unusable, str),
        "no_reset": isinstance(device.no_reset, str),
        "nodes": _is_all(device.nodes, tuple, _is_node),
        "mounts": _is_all(device.mounts, tuple, _is_mount),
        "ancestry": _is_all(device.ancestry, tuple, _is_name),
        "numa_node": numa is None or (isinstance(numa, int) and 0 <= numa < _NUMA_NODES),
        "attributes": isinstance(device.attributes, Mapping)
        and all(
            isinstance(name, str) and _is_all(values, tuple, _is_text) for name, values in device.attributes.items()
        ),
    }
    if wrong := [name for name, right in allowed.items() if not right]:
        what = f"{wrong[0]} {getattr(device, wrong[0])!r}"
        raise NonsenseError(f"discover() returned device {device.key!r} with the impossible {what}")


# --- what is offered and given ---


def ids(answer: Any) -> tuple[str, ...]:
    """What `ids()` returned, each once.

    Raises:
        NonsenseError: one of them cannot be sent to a kubelet.
    """
    if isinstance(answer, str):
        raise NonsenseError(f"ids() returned the string {answer!r} where IDs are due")
    unique = tuple(dict.fromkeys(answer))
    if wrong := [device_id for device_id in unique if not _is_name(device_id)]:
        raise NonsenseError(f"{wrong[0]!r} is no ID")
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
    names = answer if isinstance(answer, str) else list(answer)
    if isinstance(names, str) or not all(map(_is_name, names)):
        raise NonsenseError(f"prepare() returned {names!r} where the names of hardware are due")
    return frozenset(names)


def needs_claim(backend: Backend[Any], resource: Resource[Any]) -> bool:
    """Does the backend make hardware of this resource ready?

    Raises:
        Exception: whatever the backend raises.
    """
    return bool(ask(lambda: backend.needs_claim(resource)))


# --- what values are ---


def _refuse(what: str, answer: Any, allowed: Mapping[str, object]) -> None:
    if wrong := [name for name, right in allowed.items() if not right]:
        raise NonsenseError(f"{what} with the impossible {wrong[0]} {getattr(answer, wrong[0])!r}")


def _is_name(answer: Any) -> bool:
    """Text that can be written down; a file's name may have bytes that are none."""
    if not isinstance(answer, str) or not answer:
        return False
    try:
        answer.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_names(answer: Any) -> bool:
    return isinstance(answer, frozenset) and all(map(_is_name, answer))


def _is_all(answer: Any, kind: type[tuple[Any, ...]] | type[frozenset[Any]], right: Callable[[Any], bool]) -> bool:
    return isinstance(answer, kind) and all(map(right, answer))


def _is_text(answer: Any) -> bool:
    return isinstance(answer, str)


def _is_path(answer: Any) -> bool:
    return isinstance(answer, HostPath) and "\0" not in answer.text


def _is_node(answer: Any) -> bool:
    if not isinstance(answer, Node):
        return False
    return _is_path(answer.path) and _is_text(answer.container_path) and _is_text(answer.permissions)


def _is_mount(answer: Any) -> bool:
    return isinstance(answer, Mount) and _is_path(answer.path) and _is_text(answer.container_path)


def _is_whole(answer: Any) -> bool:
    return isinstance(answer, int)


def _is_number(answer: Any) -> bool:
    return isinstance(answer, int | float) and math.isfinite(answer)


def _is_clearing(answer: Any) -> bool:
    return isinstance(answer, Clears)


def _is_duration(answer: Any) -> bool:
    return _is_number(answer) and answer >= 0


def _is_measure(answer: Any) -> bool:
    if not isinstance(answer, Measure):
        return False
    trend: Any = answer.trend
    return _is_name(answer.name) and _is_whole(answer.value) and isinstance(trend, Trend)
