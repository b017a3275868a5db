"""Makes ResourceSlices of what the inventory offers, and decides what leads from those of the API server to these. Pure.

A resource is a pool. What a device says of itself is what selectors of our configuration see, under the same names, and what
all drivers are to call alike (`resource.kubernetes.io/…`); of NVIDIA's GPUs also the names of NVIDIA's driver. How it is
becomes a taint. Limits: `k8s.io/api/resource/v1/types.go` (1.36).
"""

from __future__ import annotations

import hashlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agent.dra.names import MOST_IN_TEXT, PCIE_ROOT, STANDARD, Entry, device_name, resource_value, slice_name
from agent.health.book import DRAINED
from agent.inventory.inventory import Inventory
from agent.inventory.ownership import is_meant_for_one, owns_its_place
from agent.inventory.selection import Found
from agent.model import HEALTHY, Health, Held, Slot, State
from backends.base import NUMBER, Attribute, Device

MOST_DEVICES: Final = 64
"""Of a slice in which a device has a taint (`ResourceSliceMaxDevicesWithTaintsOrConsumesCounters`); 128 in others, but taints come."""

TOKENS: Final = "tokens"
"""The capacity of a device that several claims share: how many."""

NVIDIA: Final = "gpu.nvidia.com"
"""NVIDIA's driver, and so the domain of its attributes (dra-driver-nvidia-gpu, cmd/gpu-kubelet-plugin/deviceinfo.go)."""

_MOST_ATTRIBUTES: Final = 32  # of a device, with capacities (`ResourceSliceMaxAttributesAndCapacitiesPerDevice`)
_OTHERS: Final = 7  # of them: `resource`, three of `_standard`, the memory under two names, tokens
_MOST_IN_NAME: Final = 32  # characters (`DeviceMaxIDLength`)
_MOST_IN_LABEL: Final = 63  # characters of a label's value, which a taint's is
_MOST_IN_NUMBER: Final = 18  # digits that an int64 has room for
_OURS_ALREADY: Final = frozenset({"numa_node", "node_numbers"})  # the first as numaNode; the second is internal
_NUMA: Final = f"{STANDARD}/numaNode"
_BUS: Final = f"{STANDARD}/pciBusID"
_NVIDIAS: Final = {
    "type": "type", "uuid": "uuid", "productName": "model", "brand": "brand", "architecture": "architecture",
    "cudaComputeCapability": "compute_capability", "driverVersion": "driver_version",
    "cudaDriverVersion": "cuda_version", "addressingMode": "addressing_mode", "profile": "profile", "parentUUID": "parent",
}  # fmt: skip
"""Attribute of NVIDIA's driver → that of ours which has it."""
_OF_SOME: Final = ("addressingMode", "profile", "parentUUID")  # which its driver leaves out where there is none
_OF_VERSIONS: Final = ("Version", "Capability")  # how names end whose values are versions
_MOST_SETS: Final = 8  # of counters in a slice (`ResourceSliceMaxCounterSets`)
_MOST_SETS_OF_DEVICE: Final = 2  # (`ResourceSliceMaxDeviceCounterConsumptionsPerDevice`)
_COUNTER: Final = "parts"
_HELD: Final = "held"
_MEMORY_UNITS: Final = ("Ki", "Mi", "Gi", "Ti")


class Offer(Struct, frozen=True):
    """A device as its pool offers it."""

    name: str
    device: Device
    health: Health
    tokens: int
    """How many claims may have it at a time, as far as no pod has it by device plugin; 0: one, which may be any."""
    is_held: bool
    """Whether a claim has it, or a token of it."""


def named(found: Iterable[Found]) -> dict[str, Found]:
    """The devices of one resource by their names in its pool, in the order of these: their keys', and of keys that are there twice their first IDs'."""
    every = [(it, it.placed.ids[0]) for it in found if it.placed is not None and it.placed.ids]
    keys = Counter(it.device.key for it, _ in every)
    by_name = {device_name(it.device.key if keys[it.device.key] == 1 else first): it for it, first in every}
    return {name: by_name[name] for name in sorted(by_name)}


class Named:
    """The devices of each resource by their names in its pool, which are made again where these are others."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._known: dict[str, tuple[Collection[Found], dict[str, Found]]] = {}

    def of(self, resource: str) -> Mapping[str, Found]:
        """Those of one resource, as `named` has them."""
        found = self._inventory.placed_in(resource)
        if (known := self._known.get(resource)) is None or known[0] is not found:
            known = self._known[resource] = found, named(found)
        return known[1]


def offers(
    found: Mapping[str, Found],
    slots: Mapping[str, Slot],
    claims: Mapping[str, Held],
    before: Iterable[Offer] = (),
    driver: str = "",
) -> list[Offer]:
    """What a pool offers of these devices of its resource: all but what pods have by the device plugin API or another driver.

    A device that has gone stays while a claim has it, as it was: else nothing could be said of it, and no pod be evicted.

    Args:
        found: the devices that the resource has, as `named` has them.
        slots: its list.
        claims: what pods hold of it, by ID.
        before: what this returned last.
        driver: whose slices it is for; what claims have by an earlier name of it, the scheduler does not know.
    """
    ours = {
        device_id: it.claim
        for device_id, it in claims.items()
        if it.claim is not None and it.claim.driver in ("", driver)
    }
    made = []
    for name, it in found.items():
        assert it.placed is not None
        ids = it.placed.ids
        by_claim = [device_id for device_id in ids if device_id in ours]
        free = [slots[device_id].health for device_id in ids if device_id not in claims and device_id in slots]
        fit = [health for health in free if health.offered]
        if not (free or by_claim):
            continue
        said = (fit or free or [slots[device_id].health for device_id in by_claim if device_id in slots] or [HEALTHY])[
            0
        ]
        tokens = len(by_claim) + len(fit or free) if len(ids) > 1 else 0
        made.append(Offer(name, it.device, said, tokens, bool(by_claim)))
    there, earlier = {it.name for it in made}, {it.name: it for it in before}
    for device_id, claim in sorted(ours.items()):
        old = earlier.get(claim.device)
        if old is not None and old.name not in there and device_id in slots:
            there.add(old.name)
            made.append(replace(old, health=slots[device_id].health, is_held=True))
    return made


# --- eviction ---


class Eviction(Struct, frozen=True):
    """When pods lose a device that is unhealthy, `[dra]` no_execute."""

    after: float
    """Seconds that it must have been unhealthy."""
    most: int
    """Devices at a time of this node."""


def evicting(
    held: Mapping[str, Sequence[Offer]], rules: Eviction, before: Collection[tuple[str, str]], now: float
) -> tuple[frozenset[tuple[str, str]], float | None]:
    """The devices, by resource and name, whose pods are evicted now, and when (monotonic) that may be others by time alone.

    One stays so until it is well, so that the bound is one on pods, too: a device that its pod has left makes no room
    for the next.

    Args:
        held: resources that evict → what they offer.
        rules: how long, how many.
        before: which were so.
        now: monotonic seconds.
    """
    sick = {
        (resource, it.name): it
        for resource, of in held.items()
        for it in of
        if it.health.state is State.UNHEALTHY and it.health.reason not in (DRAINED, _HELD)
    }
    kept = [key for key in before if key in sick]
    waiting = sorted((it.health.since, key) for key, it in sick.items() if it.is_held and key not in before)
    due = [key for since, key in waiting if since + rules.after <= now]
    chosen = frozenset([*kept, *due[: max(0, rules.most - len(kept))]])
    later = [since + rules.after for since, _ in waiting if since + rules.after > now]
    return chosen, min(later, default=None) if len(chosen) < rules.most else None


# --- what excludes each other ---

Counters = Mapping[str, int]
"""Set of counters → how much there is of its one counter."""


def exclusions(offered: Iterable[Offer]) -> tuple[Counters, Mapping[str, Counters]]:
    """What keeps a scheduler from giving a stick to one claim and a node of it to another, as `decide` keeps pods from that.

    A stick takes all of a counter that has as much as there are nodes of it, and each of these takes one: several claims
    may have nodes of one stick. All else that is in two devices of a pool is there for several pods (a path with `limit`).

    Args:
        offered: what the pool offers.

    Returns:
        The sets of the pool, and device → what it takes of them.
    """
    alone = [it for it in offered if not it.tokens and it.device.place and is_meant_for_one(it.device, None)]
    wholes = [it for it in alone if owns_its_place(it.device)]
    parts: defaultdict[str, set[str]] = defaultdict(set)  # place → the devices that are a part of what is there
    for it in alone if wholes else ():
        if not owns_its_place(it.device):
            for place in it.device.place:
                parts[place].add(it.name)
    sets, takes = dict[str, int](), defaultdict[str, dict[str, int]](dict)
    for whole in wholes:
        of_it = set[str]().union(*(parts[place] for place in whole.device.place if place in parts))
        if not of_it or any(len(takes[name]) == _MOST_SETS_OF_DEVICE for name in of_it):
            continue
        sets[whole.name] = takes[whole.name][whole.name] = len(of_it)
        for name in of_it:
            takes[name][whole.name] = 1
    return sets, takes


def _counted(counters: Counters, key: str) -> list[Entry]:
    return [{key: name, "counters": {_COUNTER: {"value": decimal(much)}}} for name, much in sorted(counters.items())]


# --- what a device says ---


class Made(Struct, frozen=True):
    """A device as a slice has it, and what it was made of."""

    offer: Offer
    is_evicted: bool
    names: Sequence[str]
    """Of attributes of ours and of NVIDIA's, which are those of all devices of the pool."""
    takes: Counters
    """What it takes of the pool's counters."""
    entry: Entry


def entries(
    offered: Sequence[Offer],
    resource: str,
    known: Mapping[str, Attribute] | None,
    driver: str,
    evicted: Collection[str],
    offset: float,
    before: Mapping[str, Made],
    takes: Mapping[str, Counters] = MappingProxyType({}),
) -> dict[str, Made]:
    """The devices of a pool as its slices have them, by name.

    All have the same attributes, or a selector that asks for one that a device lacks would fail for the whole node.

    Args:
        offered: what the pool offers.
        resource: whose pool it is, which every device says, too: no selector sees a pool's name.
        known: the attributes of its backend (`Backend.attributes`).
        driver: our name.
        evicted: the names of devices whose pods are evicted.
        offset: from monotonic to wall clock seconds.
        before: what this returned last: what has not changed is the same object.
        takes: device → what it takes of the pool's counters.
    """
    names = dict.fromkeys(name for it in offered for name, values in it.device.attributes.items() if values)
    theirs = _nvidias(it.device for it in offered)
    twice = {_NVIDIAS[name] for name in theirs}
    by_need = sorted(names.keys() - _OURS_ALREADY, key=lambda name: (name in twice, name))
    ours = {_identifier(name): name for name in by_need[: _MOST_ATTRIBUTES - _OTHERS - len(theirs)]}
    numbers = {name for name, it in (known or {}).items() if it.ranged or it.pattern == NUMBER.pattern}
    written = (*ours, *theirs)
    made: dict[str, Made] = {}
    for it in offered:
        is_evicted = it.name in evicted
        old = before.get(it.name)
        taken = takes.get(it.name, {})
        is_as_it_was = old and (old.is_evicted, old.names, old.takes) == (is_evicted, written, taken)
        if old and is_as_it_was and _is_same(old.offer, it):
            made[it.name] = old
            continue
        entry = _entry(it, resource, ours, theirs, numbers, driver, is_evicted=is_evicted, offset=offset)
        if taken:
            entry["consumesCounters"] = _counted(taken, "counterSet")
        made[it.name] = Made(it, is_evicted, written, taken, entry)
    return made


def _is_same(one: Offer, other: Offer) -> bool:
    is_alike = one.device is other.device and one.health is other.health
    return (is_alike and one.tokens == other.tokens and one.is_held is other.is_held) or one == other


def _entry(
    it: Offer,
    resource: str,
    ours: Mapping[str, str],
    theirs: Sequence[str],
    numbers: Collection[str],
    driver: str,
    *,
    is_evicted: bool,
    offset: float,
) -> Entry:
    domain = "" if driver == NVIDIA else f"{NVIDIA}/"
    attributes: Entry = {"resource": {"string": resource_value(resource)}, **dict(_standard(it.device))}
    attributes.update((f"{domain}{name}", value) for name, value in _as_nvidia(it.device, theirs))
    capacity = dict(_capacity(it, *("", domain)[: 1 + bool(theirs)]))
    for written, name in ours.items():
        attributes.setdefault(written, _value(it.device.attributes.get(name, ()), is_number=name in numbers))
    entry: Entry = {"name": it.name, "attributes": attributes}
    if capacity:
        entry["capacity"] = capacity
    if it.tokens:
        entry["allowMultipleAllocations"] = True
    if (made := _taint(it.health, driver, is_evicted=is_evicted, offset=offset)) is not None:
        entry["taints"] = [made]
    return entry


def _standard(device: Device) -> Iterator[tuple[str, Entry]]:
    """What all drivers call alike. An address that several devices of a resource share (of a part) is theirs, too."""
    owned = sorted(it.removeprefix("pci:") for it in device.hardware if it.startswith("pci:"))
    if address := (*device.attributes.get("address", ()), *owned):
        yield _BUS, {"string": address[0]}
    if device.ancestry and device.ancestry[0].startswith("pci"):
        yield PCIE_ROOT, {"string": device.ancestry[0]}
    if device.numa_node is not None:
        yield _NUMA, {"int": device.numa_node}


def _as_nvidia(device: Device, names: Iterable[str]) -> Iterator[tuple[str, Entry]]:
    """These of what NVIDIA's driver says of its GPUs and MIG devices, so that selectors made for it find them."""
    told = {name: ",".join(values) for name, values in device.attributes.items()}
    if _is_nvidias(device):
        told["type"] = "mig" if "gi" in told else "gpu"
    else:
        told = {}  # another vendor's in the same pool
    for name in names:
        value = told.get(_NVIDIAS[name], "")
        yield name, {"version": _version(value)} if name.endswith(_OF_VERSIONS) else {"string": _text(value)}


def _nvidias(devices: Iterable[Device]) -> list[str]:
    """What NVIDIA's driver would say of the devices of a pool: always the same, and what only some have if one has it."""
    theirs = [it for it in devices if _is_nvidias(it)]
    had = {name for it in theirs for name, values in it.attributes.items() if any(values)}
    return [name for name, of in _NVIDIAS.items() if theirs and (of in had or name not in _OF_SOME)]


def _is_nvidias(device: Device) -> bool:
    return device.attributes.get("vendor") == ("10de",) and any(device.attributes.get("uuid", ()))


def _version(value: str) -> str:
    """A version as NVIDIA's driver writes it, of three numbers: `580.159.4` for `580.159.04`; one that is not known is 0.0.0."""
    numbers = re.match(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?(?:\.([0-9]{1,9}))?", value)
    return ".".join(str(int(it or 0)) for it in (numbers.groups() if numbers else ("", "", "")))


def _capacity(it: Offer, *domains: str) -> Iterator[tuple[str, Entry]]:
    """Its memory, which backends tell in MiB, and how many claims may share it."""
    if (memory := it.device.attributes.get("memory", ())) and memory[0].isdigit():
        for domain in domains:
            yield f"{domain}memory", {"value": _binary(int(memory[0]))}
    if it.tokens:
        policy = {"default": "1", "validRange": {"min": "1", "step": "1"}}
        yield TOKENS, {"value": decimal(it.tokens), "requestPolicy": policy}


def _binary(mebibytes: int) -> str:
    """A quantity as the API server writes it: with the largest unit that it has a whole number of."""
    number, unit = mebibytes, 1
    while number and number % 1024 == 0 and unit < len(_MEMORY_UNITS) - 1:
        number, unit = number // 1024, unit + 1
    return f"{number}{_MEMORY_UNITS[unit]}" if number else "0"


def decimal(number: int) -> str:
    """The same of a number: `1k` for 1,000."""
    for unit in ("", "k", "M"):
        if not number or number % 1000:
            return f"{number}{unit}"
        number //= 1000
    return f"{number}G"


def _identifier(name: str) -> str:
    """An attribute's name as a C identifier (`DeviceMaxIDLength`, and `validateCIdentifier` of pkg/apis/resource/validation)."""
    made = re.sub("[^A-Za-z0-9_]", "_", name)[:_MOST_IN_NAME]
    return f"_{made[: _MOST_IN_NAME - 1]}" if made[:1].isdigit() else made


def _value(values: Sequence[str], *, is_number: bool) -> Entry:
    """The value of an attribute, typed as its backend writes it; of several numbers the first."""
    if is_number:
        number = values[0] if values else ""
        return {"int": int(number) if number.isdecimal() and len(number) <= _MOST_IN_NUMBER else -1}
    return {"string": _text(",".join(values))}


def _text(text: str) -> str:
    return text.encode()[:MOST_IN_TEXT].decode(errors="ignore")


def _taint(health: Health, driver: str, *, is_evicted: bool, offset: float) -> Entry | None:
    """What keeps claims from a device: that it is unhealthy, drained, or had by a pod through another plugin."""
    if health.state is State.HEALTHY:
        return None
    effect = "NoExecute" if is_evicted else "NoSchedule"
    if health.state is State.DEGRADED:
        effect = "None"  # it tells people, and keeps no claim away
    key, value = taint(health)
    made = {"key": f"{driver}/{key}", "value": value, "effect": effect}
    if health.since:
        made["timeAdded"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(health.since + offset))
    return made


def taint(health: Health) -> tuple[str, str]:
    """The key, without the driver's name, and the value of the taint that a device which is not well has."""
    if health.state is State.DEGRADED:
        key = "degraded"
    else:
        key = health.reason if health.reason in (DRAINED, _HELD) else "unhealthy"
    return key, re.sub("[^A-Za-z0-9_.-]", "-", health.reason)[:_MOST_IN_LABEL].strip("_.-")


# --- slices ---


class Wanted(Struct, frozen=True):
    """A slice that should be there."""

    name: str
    pool: str
    spec: Mapping[str, Sequence[Entry]]
    """Its devices, or sets of counters: never both in one slice."""
    content: bytes
    """The digest of these."""


class Seen(Struct, frozen=True):
    """A slice of ours that the API server has."""

    name: str
    pool: str
    uid: str
    version: str
    """Its resourceVersion."""
    generation: int
    count: int
    content: bytes
    """As `Wanted.content`, or of what the API server made of that."""


def wanted(node: str, driver: str, pool: str, devices: Sequence[Entry], counters: Counters) -> list[Wanted]:
    """The slices of a pool: one at least, since one that is empty can be filled in one step."""
    parts: list[dict[str, Sequence[Entry]]] = [{"devices": part} for part in _cut(devices, MOST_DEVICES)]
    parts += [{"sharedCounters": part} for part in _cut(_counted(counters, "name"), _MOST_SETS)]
    return [
        Wanted(slice_name(node, driver, pool, number), pool, part, digest_of(**part))
        for number, part in enumerate(parts or [{"devices": devices}])
    ]


def _cut(every: Sequence[Entry], most: int) -> Iterator[Sequence[Entry]]:
    return (every[at : at + most] for at in range(0, len(every), most))


class Write(Struct, frozen=True):
    """What is to be done about one slice."""

    name: str
    pool: str
    version: str
    """Of the slice that is replaced or deleted; empty: there is none, it is made."""
    slice: Wanted | None
    """None: it is deleted."""
    generation: int = 0
    count: int = 0


def plan(
    pools: Mapping[str, Sequence[Wanted]], seen: Mapping[str, Seen], latest: Mapping[str, int], *, keep_others: bool
) -> list[Write]:
    """What leads from the slices that the API server has to those that should be there, pool by pool.

    A scheduler uses only slices of a pool's highest generation, and these only if all of them are there. So a pool that
    changes gets all its slices written with one new generation, one right after the other, and what is too much is deleted
    last. One that only lacks some gets those, with the generation that the others have.

    Args:
        pools: pool → its slices; a pool that is empty of slices is none.
        seen: what the API server has of ours on this node.
        latest: pool → the highest generation that was ever seen of it.
        keep_others: whether pools are left alone that `pools` lacks. Their devices may not be known yet.
    """
    writes: list[Write] = []
    by_pool: dict[str, list[Seen]] = {}
    for it in seen.values():
        by_pool.setdefault(it.pool, []).append(it)
    for pool, slices in pools.items():
        there = {it.name: it for it in by_pool.pop(pool, ())}
        highest = max((it.generation for it in there.values()), default=0)
        names = {it.name for it in slices}
        is_as_it_was = there.keys() <= names and all(
            (old := there.get(it.name)) is None or (old.content == it.content and old.count == len(slices))
            for it in slices
        )
        generation = highest if is_as_it_was and highest else max(highest, latest.get(pool, 0)) + 1
        for one in slices:
            old = there.get(one.name)
            if old is None or (old.content, old.generation, old.count) != (one.content, generation, len(slices)):
                writes.append(Write(one.name, pool, old.version if old else "", one, generation, len(slices)))
        writes += [Write(name, pool, it.version, None) for name, it in there.items() if name not in names]
    if not keep_others:
        writes += [Write(it.name, it.pool, it.version, None) for others in by_pool.values() for it in others]
    return writes


def digest_of(devices: Any = (), sharedCounters: Any = ()) -> bytes:  # noqa: N803  # as the API server writes it
    """A digest of what a slice has, the same for what the API server would take for the same."""
    encoded = msgspec.json.encode((devices, sharedCounters), order="deterministic")
    return hashlib.blake2b(encoded, digest_size=16).digest()


def body(write: Write, node: str, driver: str, owner: Mapping[str, Any]) -> Entry:
    """The ResourceSlice to send.

    Args:
        write: which, and with what.
        node: the Node's name.
        driver: our name.
        owner: the Node, which it goes with.
    """
    assert write.slice is not None
    metadata: Entry = {"name": write.name, "ownerReferences": [owner]}
    if write.version:
        metadata["resourceVersion"] = write.version
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": write.slice.pool, "generation": write.generation, "resourceSliceCount": write.count},
            **write.slice.spec,
        },
    }
