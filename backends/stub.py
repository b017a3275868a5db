"""The backend `stub`: made-up devices, for trying pods, schedulers and alerts on a node without hardware.

A small text file gives their states, one device a line; the last line about a device counts:

    # ID       state      sentence, if any
    *          healthy
    stub-0     unhealthy  It is on fire.
    stub-1     degraded
    stub-2     gone

`*` is every device. Devices that the file does not name are healthy, and all are if there is no file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

import msgspec
from msgspec import Struct, field

from backends.base import (
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    HostPath,
    Known,
    OptionsError,
    PathChange,
    Problem,
    Resource,
    Signal,
    Verdict,
    Watches,
)
from backends.errors import not_short, reason_of
from backends.linux import files

_VERDICTS: Final = {"unhealthy": Verdict.NOW, "degraded": Verdict.DEGRADED}
_MOST_BYTES: Final = 1 << 20  # of a file of states
_STATES: Final = ("healthy", *_VERDICTS, "gone")


class StubDevice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number of devices that are alike."""

    count: int = 1
    """How many of them there are."""
    numa_node: int | None = None
    """The NUMA node that the kubelet is told; by default none."""
    attributes: dict[str, str] = {}
    """What selectors match."""


class StubOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `stub` resource."""

    devices: int | list[StubDevice]
    """How many there are, or how many of each kind; the kinds are numbered in one sequence."""
    file: str | None = None
    """The path on the host of the file with their states."""


StubResource = Resource[StubOptions]


def complaints(resource: StubResource) -> Iterator[OptionsError]:
    """Finds numbers below zero, and a file without an absolute path."""
    options = resource.spec.options
    if isinstance(options.devices, int) and options.devices < 0:
        yield OptionsError(("devices",), f"is {options.devices}; there cannot be fewer than none")
    for index, kind in enumerate(options.devices if isinstance(options.devices, list) else ()):
        if kind.count < 0:
            yield OptionsError(("devices", index, "count"), f"is {kind.count}; there cannot be fewer than none")
        if kind.numa_node is not None and kind.numa_node < 0:
            yield OptionsError(("devices", index, "numa_node"), "is below 0; leave it out where there is none")
    if options.file is not None and not options.file.startswith("/"):
        yield OptionsError(("file",), f"{options.file!r} is not an absolute path")


class _States(Struct, frozen=True):
    """The content of a file."""

    every: tuple[str, str] = ("healthy", "")
    """The state of the devices it does not name, and the sentence."""
    named: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def of(self, key: str) -> tuple[str, str]:
        return self.named.get(key, self.every)


class Stub(Backend[StubOptions]):
    """Offers devices that a text file describes; a resource is one unit, since the file is read as a whole."""

    options_type: ClassVar = StubOptions
    complaints: ClassVar = staticmethod(complaints)

    @classmethod
    def fixed_ids(cls, resource: StubResource) -> Iterable[str]:
        """The IDs of all devices, since they are made up."""
        keys = (f"stub-{n}" for n in range(sum(kind.count for kind in _kinds(resource.spec.options))))
        replicas = resource.spec.replicas
        return keys if replicas == 1 else (f"{key}::{n}" for key in keys for n in range(replicas))

    def units(self) -> Iterable[str]:
        """The resources."""
        return [resource.name for resource in self.resources]

    def discover(self, unit: str) -> Discovery:
        """The devices of the resource, without those that are gone."""
        resource = self.resource(unit)
        states = self._states(resource)
        every = tuple(_devices(resource))
        strangers = states.named.keys() - {device.key for device in every}
        sentences = [*states.problems, *(f"there is no device {key}" for key in sorted(strangers))]
        file = resource.spec.options.file or ""
        return Discovery(
            devices=tuple(device for device in every if states.of(device.key)[0] != "gone"),
            problems=tuple(Problem(file, f"{file}: {sentence}") for sentence in sentences),
        )

    def probe(self, device: Device) -> Iterable[Signal]:
        """What the file says of the device."""
        state, sentence = self._states(self.resource(device.unit)).of(device.key)
        if verdict := _VERDICTS.get(state):
            (hardware,) = device.hardware
            yield Signal(hardware, f"stub-{state}", verdict, sentence or f"the stub's file says {state}")

    def edits(self, resource: StubResource, grants: Sequence[Grant]) -> ContainerEdits:
        """A variable with the IDs that the container has."""
        name = "FAIRLEAD_STUB_" + re.sub("[^A-Z0-9]", "_", resource.name.upper())
        return ContainerEdits(env={name: ",".join(grant.id for grant in grants)})

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # the files do not move
        """The directories of the files: a watch on a file would end when it is replaced."""
        return Watches(directories=frozenset(file.parent for file in self._files().values()))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:  # noqa: ARG002
        """The resources of the file that changed; a ConfigMap's files change with the link `..data` beside them."""
        if not isinstance(hint, PathChange):
            return ()
        return [
            name for name, file in self._files().items() if hint.path in (file, file.parent, file.parent / "..data")
        ]

    def _files(self) -> dict[str, HostPath]:
        return {r.name: HostPath(r.spec.options.file) for r in self.resources if r.spec.options.file is not None}

    def _states(self, resource: StubResource) -> _States:
        if resource.spec.options.file is None:
            return _States()
        try:
            text = files.read(self.host.local(HostPath(resource.spec.options.file)), _MOST_BYTES).decode(
                errors="replace"
            )
        except FileNotFoundError:
            return _States()
        except OSError as error:
            not_short(error)
            return _States(problems=(f"it cannot be read: {reason_of(error)}",))
        return _parse(text)


@functools.lru_cache(maxsize=8)  # each device's probe reads the file
def _parse(text: str) -> _States:
    every, named, problems = ("healthy", ""), dict[str, tuple[str, str]](), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        key, state, sentence = (*line.split(maxsplit=2), "", "", "")[:3]
        if key.startswith("#"):
            continue
        if key and state not in _STATES:
            problems.append(f"line {number}: {state!r} is not one of {', '.join(_STATES)}")
        elif key == "*":
            every, named = (state, sentence), {}
        elif key:
            named[key] = (state, sentence)
    return _States(every, named, tuple(problems))


def _kinds(options: StubOptions) -> list[StubDevice]:
    return [StubDevice(options.devices)] if isinstance(options.devices, int) else options.devices


def _devices(resource: StubResource) -> Iterator[Device]:
    kinds = [kind for kind in _kinds(resource.spec.options) for _ in range(kind.count)]
    for n, kind in enumerate(kinds):
        yield Device(
            key=f"stub-{n}",
            unit=resource.name,
            resource=resource.name,
            hardware=frozenset({f"stub:{resource.name}/stub-{n}"}),
            numa_node=kind.numa_node,
            attributes={name: (value,) for name, value in kind.attributes.items()},
        )
