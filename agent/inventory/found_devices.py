"""Indexes the devices that were found by their hardware and IDs, so that those that compete are known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from agent.inventory.competition import Candidate, Placed
from agent.model import Health, Held
from agent.runtime import limits
from backends.base import Device, Link

Ref = tuple[str, str, str, str]
"""Names one found device: backend, unit, the resource it was built for or "", key."""


class Found(Struct, gc=False):
    """A device that was found, and what became of it."""

    ref: Ref
    device: Device
    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    """Why the resources that do not select it do not."""
    placed: Placed | None = None
    lost: tuple[str, ...] = ()
    """Why the resources that do select it did not get it."""

    @property
    def why(self) -> str:
        """Why no resource has it, if none has."""
        homeless = f"it was made for {self.device.resource}, which is not configured for its backend"
        return "; ".join(self.lost + self.refused) or homeless

    def why_not(self, resource: str) -> str:
        """Why a resource that selects it does not have it: "selects it, but …"."""
        lost = dict(refusal.split(" ", 1) for refusal in self.lost)
        has = self.placed.resource if self.placed else ""
        return lost.get(resource, f"selects it, but {has} comes before it in the configuration and has it")


class Facts(Struct, frozen=True):
    """Whatever an inventory is told; none of it changes."""

    units: Mapping[str, Mapping[str, tuple[Device, ...]]] = field(default_factory=dict)
    """Backend → unit → its devices."""
    links: Mapping[str, Mapping[str, Sequence[Link]]] = field(default_factory=dict)
    """The same for links."""
    health: Mapping[str, Health] = field(default_factory=dict)
    """Of hardware that is not healthy."""
    held: Mapping[tuple[str, str], Held] = field(default_factory=dict)
    """By slot."""


class Unclaimed(Struct, frozen=True):
    """A device that no resource has, or not a certain one, and why."""

    device: Device
    backend: str
    why: str


_Index = dict[str, tuple[Ref, ...]]


class Indexes(Struct, frozen=True):
    """Where a piece of hardware, or an ID, leads."""

    owned: _Index = field(default_factory=dict)
    """Hardware → who owns it."""
    minded: _Index = field(default_factory=dict)
    """Hardware → who owns it or depends on it."""
    wanted: defaultdict[str, _Index] = field(default_factory=lambda: defaultdict(dict))
    """Resource → ID → whose it would be."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Resource → the bytes of a list with all that it would have."""
    full: dict[str, str] = field(default_factory=dict)
    """Resources whose lists would be longer than can be sent, each with why it takes no more devices."""

    def _places(self, found: Found) -> Iterator[tuple[_Index, Collection[str]]]:
        """Every index, and the keys under which this device is filed there."""
        yield self.owned, found.device.hardware
        yield self.minded, found.device.hardware | found.device.depends
        for candidate in found.candidates:
            yield self.wanted[candidate.resource], candidate.ids

    def add(self, found: Found) -> None:
        """File a device."""
        for candidate in found.candidates:
            resource = candidate.resource
            self.sizes[resource] += _bytes_of(candidate.ids, found.device.numa_node)
            if (size := self.sizes[resource]) > limits.MESSAGE_LIMIT and resource not in self.full:
                fit = (len(self.wanted[resource]) + len(candidate.ids)) * limits.MESSAGE_LIMIT // size
                self.full[resource] = f"its list is full: {fit:,} such IDs fit in the 4 MiB that a kubelet receives"
        alone = (found.ref,)
        for index, keys in self._places(found):
            if index.keys().isdisjoint(keys):
                index.update(dict.fromkeys(keys, alone))
            else:
                index.update({key: (*index.get(key, ()), found.ref) for key in keys})

    def remove(self, found: Found) -> set[Ref]:
        """Take a device out; those that were filed beside it."""
        for candidate in found.candidates:
            self.sizes[candidate.resource] -= _bytes_of(candidate.ids, found.device.numa_node)
            if self.sizes[candidate.resource] <= limits.MESSAGE_LIMIT:
                self.full.pop(candidate.resource, None)
        rivals: set[Ref] = set()
        for index, keys in self._places(found):
            for key in keys:
                refs = index.pop(key)
                if len(refs) > 1:
                    index[key] = tuple(ref for ref in refs if ref != found.ref)
                    rivals.update(index[key])
        return rivals

    def connected(self, refs: Iterable[Ref], found: Mapping[Ref, Found]) -> set[Ref]:
        """Of what was found, these and all that share hardware or IDs with them, directly or through others."""
        todo, connected = list(refs), set[Ref]()
        while todo:
            ref = todo.pop()
            if ref in connected or ref not in found:
                continue
            connected.add(ref)
            for hardware in found[ref].device.hardware:
                todo.extend(self.owned[hardware])
            for candidate in found[ref].candidates:
                index = self.wanted[candidate.resource]
                for device_id in candidate.ids:
                    if len(rivals := index[device_id]) > 1:
                        todo.extend(rivals)
        return connected


def _bytes_of(ids: Iterable[str], numa_node: int | None) -> int:
    """What a device's IDs take of a list; they are of few lengths."""
    lengths = Counter(len(device_id.encode()) for device_id in ids)
    return sum(limits.slot_bytes("x" * length, numa_node) * count for length, count in lengths.items())
