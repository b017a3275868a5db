"""Indexes the devices that were found by their hardware and IDs, so that those that compete are known."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct, field

from agent.inventory.competition import Candidate
from agent.inventory.tombstones import places
from agent.model import Held, SlotKey
from agent.runtime import limits
from backends.base import Device

Ref = tuple[str, str, str, str]
"""Names one found device: backend, unit, the resource it was built for or "", key."""


class Found(Struct, gc=False, eq=False):
    """A device that was found, and what became of it; the same only as itself."""

    backend: str
    unit: str
    device: Device
    candidates: tuple[Candidate, ...]
    refused: tuple[str, ...]
    """Why the resources that do not select it do not."""
    placed: Candidate | None = None
    """The one that it joined, if any."""
    lost: tuple[str, ...] = ()
    """Why the resources that do select it did not get it."""

    @property
    def ref(self) -> Ref:
        """Names it."""
        return self.backend, self.unit, self.device.resource or "", self.device.key

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


_Index = dict[str, tuple[Found, ...]]


class Indexes(Struct, frozen=True):
    """Where a piece of hardware, or an ID, leads."""

    minded: _Index = field(default_factory=dict)
    """Hardware → who owns it or depends on it."""
    at: _Index = field(default_factory=dict)
    """Place → who is there."""
    wanted: defaultdict[str, _Index] = field(default_factory=lambda: defaultdict(dict))
    """Resource → ID → whose it would be."""
    sizes: Counter[str] = field(default_factory=Counter)
    """Resource → the bytes of a list with all that it would have."""
    full: dict[str, str] = field(default_factory=dict)
    """Resources whose lists would be longer than can be sent, each with why it takes no more devices."""

    def owners(self, hardware: Iterable[str]) -> list[Found]:
        """The devices that own any of this, in the order of their refs."""
        owners = {it for name in hardware for it in self.minded.get(name, ()) if name in it.device.hardware}
        return sorted(owners, key=lambda it: it.ref) if len(owners) > 1 else list(owners)

    def add(self, found: Found) -> None:
        """File a device."""
        for candidate in found.candidates:
            resource = candidate.resource
            self.sizes[resource] += _bytes_of(candidate.ids, found.device.numa_node)
            if (size := self.sizes[resource]) > limits.MESSAGE_LIMIT and resource not in self.full:
                fit = (len(self.wanted[resource]) + len(candidate.ids)) * limits.MESSAGE_LIMIT // size
                self.full[resource] = f"its list is full: {fit:,} such IDs fit in the 4 MiB that a kubelet receives"
        alone = (found,)
        for index, keys in self._places(found):
            if index.keys().isdisjoint(keys):
                index.update(dict.fromkeys(keys, alone))
            else:
                index.update({key: (*index.get(key, ()), found) for key in keys})

    def remove(self, found: Found) -> set[Found]:
        """Take a device out; those that were filed beside it."""
        for candidate in found.candidates:
            self.sizes[candidate.resource] -= _bytes_of(candidate.ids, found.device.numa_node)
            if self.sizes[candidate.resource] <= limits.MESSAGE_LIMIT:
                self.full.pop(candidate.resource, None)
        rivals: set[Found] = set()
        for index, keys in self._places(found):
            for key in keys:
                filed = index.pop(key)
                if len(filed) > 1:
                    index[key] = tuple(it for it in filed if it is not found)
                    rivals.update(index[key])
        return rivals

    def _places(self, found: Found) -> Iterator[tuple[_Index, Collection[str]]]:
        """Every index, and the keys under which this device is filed there."""
        yield self.minded, found.device.hardware | found.device.depends
        yield self.at, places(found.device)
        for candidate in found.candidates:
            yield self.wanted[candidate.resource], candidate.ids

    def connected(self, devices: Iterable[Found], claims: Mapping[SlotKey, Held]) -> set[Found]:
        """These and all that share hardware or IDs with them, directly or through others.

        An ID leads to the hardware that its pod was given, too: other IDs of that are kept back while the ID has no device.
        """
        todo, connected = list(devices), set[Found]()
        while todo:
            found = todo.pop()
            if found in connected:
                continue
            connected.add(found)
            hardware = set(found.device.hardware)
            for candidate in found.candidates:
                index = self.wanted[candidate.resource]
                for device_id in candidate.ids:
                    if len(rivals := index[device_id]) > 1:
                        todo.extend(rivals)
                    if (claim := claims.get((candidate.resource, device_id))) is not None:
                        hardware |= claim.hardware
            for name in hardware:
                todo.extend(it for it in self.minded.get(name, ()) if it is not found and name in it.device.hardware)
        return connected


def _bytes_of(ids: Iterable[str], numa_node: int | None) -> int:
    """What a device's IDs take of a list; they are of few lengths."""
    lengths = Counter(len(device_id.encode()) for device_id in ids)
    return sum(limits.slot_bytes("x" * length, numa_node) * count for length, count in lengths.items())
