"""The small interface that a kind of hardware implements; all that a backend needs is imported from here.

A backend reads a `Host` and its `Resource`s and answers with `Device`s, `Signal`s and `ContainerEdits`; it holds
no mutable state and never imports `agent`. How to write one: docs/writing-a-backend.md.
"""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic

from backends.errors import reason_of
from backends.interface.host import Host, HostPath
from backends.interface.values import (
    ALL,
    ANY_SUBSYSTEM,
    PLACEHOLDER,
    Adopt,
    All,
    Clears,
    ContainerEdits,
    Device,
    Discovery,
    Edits,
    Grant,
    Heard,
    Hint,
    Known,
    Link,
    LinkChange,
    Measure,
    Mount,
    Node,
    Options,
    PathChange,
    Placement,
    PreStart,
    Problem,
    Record,
    Released,
    Resource,
    ResourceSpec,
    Serve,
    Signal,
    Trend,
    Uevent,
    Verdict,
    Watches,
)
from backends.interface.written import HEX4, NUMBER, NUMBERS, TEXT, Attribute, Seconds, Selector, assumed, one_of

__all__ = [
    "ALL", "ANY_SUBSYSTEM", "HEX4", "NUMBER", "NUMBERS", "PLACEHOLDER", "TEXT", "Adopt", "All", "AllocationRefused",
    "Attribute", "Backend", "Clears", "ContainerEdits", "Device", "Discovery", "Edits", "Grant", "Heard", "Hint",
    "Host", "HostPath", "Known", "Link", "LinkChange", "Measure", "Mount", "Node", "NotReady", "Options",
    "OptionsError", "PathChange", "Placement", "PreStart", "Problem", "Record", "Released", "Resource",
    "ResourceSpec", "Seconds", "Selector", "Serve", "Signal", "Trend", "Uevent", "Verdict", "Watches", "assumed",
    "one_of",
]  # fmt: skip


class AllocationRefused(Exception):  # noqa: N818  # the name the design gives it, and what it says
    """The allocation cannot be granted; the sentence is shown to the pod's owner as it is."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


class NotReady(Exception):  # noqa: N818  # as AllocationRefused
    """Hardware cannot be made ready, or given back; one sentence, for the node's administrator."""


class OptionsError(ValueError):
    """An option's value is impossible.

    `path` is the key inside the resource, as a config error names it: `("paths", 0, "permissions")`.
    """

    def __init__(self, path: tuple[str | int, ...], sentence: str) -> None:
        super().__init__(sentence)
        self.path = path
        self.sentence = sentence

    @staticmethod
    def raise_all(errors: Iterable[OptionsError]) -> None:
        """Raise what was found, all at once: nothing if nothing was, one error as it is, several as a group."""
        if not (found := list(errors)):
            return
        raise found[0] if len(found) == 1 else ExceptionGroup("impossible options", found)


class Backend(ABC, Generic[Options]):
    """A kind of hardware.

    Write `units`, `discover` and `edits`; the rest has defaults. One instance serves all resources of its
    kind. `units`, `discover`, `listen`, `probe`, `glance`, `adopt`, `claim`, `prepare` and `release` run in worker threads and may
    block; everything else is pure and runs on the event loop, `ids` also in a thread.
    """

    options_type: ClassVar[type[Any]]
    """A msgspec struct; every key of a resource beyond the common ones is decoded into it."""
    attributes: ClassVar[Mapping[str, Attribute] | None] = None
    """All that its devices may have for selectors and templates: others are refused as mistakes. None: anything may be."""
    company: ClassVar[frozenset[str]] = frozenset()
    """Kinds of hardware that a container usually asks for together with this one: with adapters, GPUs. Its devices are
    preferred where such hardware is free, if the kubelet asks for them first."""

    hears: ClassVar[str] = "what it tells by itself"
    """What `listen` hears, as a person calls it: "NVIDIA's library (NVML)"."""

    def __init__(self, host: Host, resources: Sequence[Resource[Options]]) -> None:
        self.host = host
        self.resources = tuple(resources)

    def resource(self, name: str) -> Resource[Options]:
        """The resource of that name.

        Raises:
            LookupError: this backend has none of that name.
        """
        for resource in self.resources:
            if resource.name == name:
                return resource
        raise LookupError(f"there is no resource {name}")

    @staticmethod
    def complaints(resource: Resource[Options]) -> Iterable[OptionsError]:  # noqa: ARG004  # a default
        """Every mistake in the options of a resource that no hardware could make right; `check` raises them."""
        return ()

    @classmethod
    def check(cls, resource: Resource[Options]) -> None:
        """Refuse options: by default those that `complaints` finds.

        Raises:
            OptionsError: with the offending key and a sentence.
            ExceptionGroup: of several of them (see `OptionsError.raise_all`).
        """
        OptionsError.raise_all(cls.complaints(resource))

    @classmethod
    def fixed_ids(cls, resource: Resource[Options]) -> Iterable[str]:
        """The IDs that the resource will list whatever the hardware is, as far as the config fixes them.

        Validation uses them to refuse a list that could never pass the kubelet.
        """
        return ()

    @classmethod
    def tokens(cls, resource: Resource[Options]) -> Iterable[tuple[tuple[str | int, ...], int]]:
        """How many IDs one device has, and the key that says so, as in `OptionsError`.

        Validation refuses more than a list can hold before any ID is made.
        """
        yield ("replicas",), resource.spec.replicas

    @abstractmethod
    def units(self) -> Iterable[str]:
        """Name, cheaply, every unit there is to look at now."""

    @abstractmethod
    def discover(self, unit: str) -> Discovery:
        """Look at one unit; a unit that is gone has no devices."""

    @abstractmethod
    def edits(self, resource: Resource[Options], grants: Sequence[Grant]) -> ContainerEdits:
        """What a container gets with these grants, which come in the order of their IDs; pure.

        Raises:
            AllocationRefused: these devices cannot be had together; with the sentence for the pod's owner.
        """

    def watches(self, known: Known) -> Watches:
        """What to listen to, given what is known."""
        return Watches()

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """The units to look at again after this hint; none if it means nothing here."""
        return ALL

    def signals(self, record: Record) -> Iterable[Signal]:
        """The signals that follow from a record; pure. They latch until something in their `clears_on` happens.

        A FINE one says what has happened: the hardware's latched signals that wait for any of it end.
        """
        return ()

    def listen(self, hardware: frozenset[str]) -> Iterator[Heard | None]:
        """Yield what this hardware tells by a way of its own (a vendor's library), for ever; `signals` makes sense of it.

        Runs in a thread of its own, for the hardware that `Watches.listen` or `listen_without_log` names and that no
        operator has drained. It must yield at least each 10 s, None where there is nothing: only then can it be closed, as
        it is where other hardware is to be heard, and at the end. What it has open belongs into a `with` or `finally`. One
        that hangs is left alone. One that raises or ends is told in `status`, and called again later.
        """
        yield from ()

    def probe(self, device: Device) -> Iterable[Signal]:
        """All signals about the device's health now; by default whether its nodes are there."""
        hardware = min(device.hardware)
        for node in device.nodes:
            try:
                mode = self.host.local(node.path).stat().st_mode
            except OSError as error:
                reason = reason_of(error)
                yield Signal(hardware, "node-missing", Verdict.NOW, f"{node.path} cannot be used: {reason}")
                continue
            if not (stat.S_ISCHR(mode) or stat.S_ISBLK(mode)):
                yield Signal(hardware, "not-a-device", Verdict.NOW, f"{node.path} is not a device node")

    def glance(self, device: Device) -> object:
        """A value that differs whenever health may have changed without an event; cheap, since asked each `Watches.poll`.

        The device is probed if it does not equal the value of the last time, or if the device is ill. By default it
        never equals that.
        """
        return object()

    def ids(self, resource: Resource[Options], device: Device) -> Sequence[str]:
        """The IDs under which the device is offered; unique within the resource, stable for ever."""
        if resource.spec.replicas == 1:
            return (device.key,)
        return tuple(f"{device.key}::{n}" for n in range(resource.spec.replicas))

    def adopts(self, resource: Resource[Options]) -> bool:
        """Whether `adopt` has anything to do for this resource. By default: if the backend has its own `adopt`."""
        return type(self).adopt is not Backend.adopt

    def adopt(self, resource: Resource[Options], device: Device) -> bool:
        """Make hardware ready that has joined the resource, before any pod asks (bind a driver); may block 60 s.

        Called by the daemon alone, never for `fairlead discover`: for a device that is new or has changed, once every
        backend had its first scan, so that hardware which another resource has is left alone. May be called again
        for the same.

        Returns:
            whether anything was done: then the unit is looked at again.

        Raises:
            NotReady: told in the log; it is tried again.
        """
        return False

    def needs_claim(self, resource: Resource[Options]) -> bool:
        """Whether `claim` has anything to do for this resource. By default: if the backend has its own `claim`."""
        return type(self).claim is not Backend.claim

    def claim(self, resource: Resource[Options], grants: Sequence[Grant]) -> None:
        """Make the hardware ready before it is handed out (bind a driver, make a node); may block 10 s.

        Idempotent: a pod that is created again claims again, also what was never released; and at our start, after a
        reboot say, what pods still have is claimed again, once. The devices are looked at again before `edits`.

        Raises:
            AllocationRefused: with the sentence for the pod's owner.
        """

    def prefers(self, resource: Resource[Options]) -> bool:
        """Whether it matters which free devices a pod gets: then the kubelet is told to ask. By default: to share."""
        return resource.spec.replicas > 1

    def prepare(self, resource: Resource[Options], grants: Sequence[Grant]) -> Iterable[str]:
        """Reset the hardware before a container starts (`pre_start = "reset"`); may block 27 s.

        It is asked only for hardware that no other pod has. A backend that does not write this cannot be asked to reset.

        Returns:
            the hardware that was reset: latched signals that wait for `Clears.OUR_RESET` end.

        Raises:
            AllocationRefused: with the sentence for the pod's owner.
        """
        return ()

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:
        """Undo `claim` for what pods no longer hold; `idle` is hardware that no pod holds any more; may block 30 s.

        Idempotent: one that raises or hangs is made again, also by our next run, until it works.
        """
