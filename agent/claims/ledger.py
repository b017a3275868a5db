"""Keeps the ledger of claims: which pod holds which device, from its Allocate until both witnesses say that it is over.

Who gets a device that no pod holds is decided in `inventory/ownership.py`.

Pure: times are handed in as seconds on one monotonic clock; what to persist, to resend or to release is
returned. A claim ends only when a podresources List leaves it out *and* a checkpoint written after that
List does too (kubelet contract: A5; a List leaves out init containers), the List asked for at least
`MIN_AGE` after the Allocate. A witness that cannot be reached ends nothing, and neither do both of a kubelet that lost
its record (A11.1): what that lacks is `FORGOTTEN`.

What another plugin gave is found, too: the kubelet's checkpoint keeps each answer. Its IDs are that plugin's own and mean nothing
here, but its device nodes, and the names in its environment and among its CDI devices, are the hardware's. They are compared with
the devices that are there. It matters whatever resource the answer names, one of ours or one that we do not serve,
and whether that plugin is gone or lives.

What was given for a ResourceClaim ends with `unprepared` alone, and neither witness is judged: the kubelet tells of its end, or
after a start the API server (`agent.dra.preparation`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Set
from itertools import islice
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.inventory.ownership import is_same
from agent.model import FORGOTTEN, TWO_PODS, Held, SlotKey
from backends.base import Device

MIN_AGE: Final = 30.0
"""Seconds after an Allocate before anything can end its claim: the kubelet records it a little later."""

REWRITE_AFTER: Final = 2.0
"""Seconds to wait for the kubelet to write its checkpoint by itself before our list is sent again."""

Version = tuple[int, ...]
"""Identifies one written checkpoint (inode, time, size)."""

Pods = frozenset[str]
"""UIDs."""

Containers = Mapping[str, tuple[str, ...]]
"""UID of a pod → the names of its containers."""

_NAMED_AT_MOST: Final = 10

_OF_DRIVERS: Final = frozenset(
    f"/dev/{name}"
    for name in (
        "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "kfd", "vfio/vfio", "iommu", "infiniband/rdma_cm",
    )
)  # fmt: skip
"""Nodes of a driver, not of one device."""


def names_of(slots: Iterable[SlotKey]) -> list[str]:
    """For the log: `resource/ID` of the first few, in their order."""
    return [f"{resource}/{device_id}" for resource, device_id in sorted(slots)[:_NAMED_AT_MOST]]


class Traced(Struct, frozen=True):
    """What another plugin's answer tells of a slot that it gave."""

    pods: Pods = frozenset()
    """That have the slot; more than one, where the checkpoint has one that has ended."""
    hardware: frozenset[str] = frozenset()
    """Of this slot."""
    container: frozenset[str] = frozenset()
    """Of all slots that came with the same answer."""


class _Claim(Struct, frozen=True, gc=False):
    held: Held
    since: float  # the last Allocate of it, or when we learnt of it
    allocated: float = -math.inf  # the last Allocate of it in this run
    absent_since: float | None = None  # when the first List without it was answered
    absent_version: Version | None = None  # the checkpoint that lay there then; None: there was none
    pods: Pods = frozenset()  # of one that is traced; empty if an earlier run of ours traced it
    named: Containers = MappingProxyType({})  # who had it by the last record that had it
    may_run: bool = True  # by all that is known: not of one that an intact record lacks, or that is from before a boot


def _is_bare(held: Held) -> bool:
    return not held.hardware or held.foreign or held.traced


def _is_seen_after_boot(held: Held, device: Device) -> bool:
    """Whether it is what a pod was given before the boot, with all that belongs to it: its nodes may come later than itself."""
    return held.rebooted and 0 < len(held.hardware) <= len(device.hardware) and is_same(held, device)


class Witnessed(Struct, frozen=True):
    """Which pods have what, as the kubelet knows it, and which of them run."""

    record: Mapping[SlotKey, Containers]
    """The slots of the checkpoint, with the pods and containers that have them."""
    shown: Mapping[SlotKey, Pods] = MappingProxyType({})
    """The slots of a List that was asked for after it, with the names of their pods."""
    running: Pods | None = None
    """UIDs of the pods that had processes after the record was read; None: that cannot be seen."""
    served: Mapping[tuple[str, str, str], Collection[str]] = MappingProxyType({})
    """UID, container and resource → the IDs that the checkpoint has for it."""
    is_lost: bool = False
    """The kubelet has begun with an empty record. Of what it lacks, it knows nothing."""
    is_sure: bool = True
    """The kubelet has begun with this record, or was asked for a List. Else what lacks the devices of a pod that runs may be a
    record that is older than the pod, and was written last."""


class HeldThen(Collection[Held]):
    """What was held at one moment: the first so many of a list that only grows, so that it costs nothing to take."""

    __slots__ = ("_count", "_those")

    def __init__(self, those: list[Held]) -> None:
        self._those, self._count = those, len(those)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Held]:
        return islice(self._those, self._count)

    def __contains__(self, held: object) -> bool:
        return held in tuple(self)

    def begun_since(self, before: Collection[Held]) -> list[Held] | None:
        """What began after an earlier moment; None if anything ended or changed since, and all must be compared."""
        if isinstance(before, HeldThen) and before._those is self._those:
            return self._those[before._count : self._count]
        return None


class Ledger:
    """All claims; the only one who knows them."""

    def __init__(self) -> None:
        self._claims = dict[SlotKey, _Claim]()
        self._held: list[
            Held
        ] = []  # of all claims, in their order; empty, and another list, once one has ended or changed
        self._holders = Counter[str]()  # how many claims have a piece of hardware
        self._with_hardware = defaultdict[str, set[str]](set)  # resource → the IDs whose claims are not bare
        self._youngest = -math.inf  # when the last of them began

    def held(self) -> list[Held]:
        """Every claim, in the order in which they began."""
        return [claim.held for claim in self._claims.values()]

    def held_now(self) -> HeldThen:
        """The same, for each Allocate to write: it must not cost more the more is held."""
        if len(self._held) != len(self._claims):
            self._held = self.held()
        return HeldThen(self._held)

    def holds(self, hardware: str) -> bool:
        """Whether any claim has this hardware."""
        return self._holders[hardware] > 0

    def of(self, slot: SlotKey) -> Held | None:
        """What is held of this slot, as far as is known; None if it is not claimed."""
        claim = self._claims.get(slot)
        return claim.held if claim else None

    def has(self, slot: SlotKey) -> bool:
        """Whether this slot is claimed."""
        return slot in self._claims

    def is_bare(self, slot: SlotKey, *, unknown: bool = True) -> bool:
        """Whether the slot is claimed and its ID does not tell its hardware; `unknown` where it is not claimed."""
        claim = self._claims.get(slot)
        return unknown if claim is None else _is_bare(claim.held)

    def bare_among(self, resource: str, ids: Set[str]) -> Set[str]:
        """Those of a resource's IDs of which `is_bare` is true. It is asked before each list, of all that pods hold."""
        return ids - self._with_hardware[resource]

    def allocate(self, given: Iterable[Held], now: float) -> bool:
        """Record what an Allocate is about to give; True if the ledger changed in what must be kept.

        An ID that is claimed already (the same container's restart, an app container after its init
        container: A4) keeps its place and its minimum age starts again.
        """
        changed = False
        for held in given:
            before = self._claims.get(held.slot)
            changed |= before is None or before.held != held
            self._put(_Claim(held, now, now))
        return changed

    def restore(self, kept: Iterable[Held], now: float, *, rebooted: bool | None = False) -> list[Held]:
        """Take in what an earlier run of ours had recorded, or an agent before us; it knew better. Returns it as it is now.

        Args:
            kept: the claims.
            now: monotonic seconds.
            rebooted: whether the machine has booted since; None where that is unknown.
        """
        restored = list(kept)
        if rebooted:
            restored = [replace(it, pods=Pods(), trouble="", rebooted=True) for it in restored]
        elif rebooted is None:
            restored = [replace(it, rebooted=True) for it in restored]
        for held in restored:
            self._put(_Claim(held, now, may_run=not rebooted))
        return restored

    def adopt(
        self,
        seen: Mapping[SlotKey, str],
        devices: Mapping[SlotKey, Device],
        now: float,
        traced: Mapping[SlotKey, Traced] = MappingProxyType({}),
    ) -> list[Held]:
        """Take in what a witness says is held and we did not know; returns what is new.

        Our state was lost, or the machine has booted since: pods were given nodes then that may have other numbers now. They have
        those that are seen first.

        Args:
            seen: the slots and the backend that serves each one's resource.
            devices: the devices behind them now, as far as they are there. Fills in claims without hardware too.
            now: monotonic seconds.
            traced: of slots without a device, what they lead to. Another plugin may give the same ID to a later pod, for
                other hardware, before the first one is seen to end. Of a pod's hardware that is not to be seen at
                the moment, its claims keep what they had.
        """
        news: list[Held] = []
        for slot, backend in seen.items():
            claim, trace = self._claims.get(slot), traced.get(slot, Traced())
            if claim is not None and claim.pods and trace.pods and claim.pods != trace.pods:
                claim = None  # the ID is another pod's by now
            if (
                claim is not None
                and (found := devices.get(slot)) is not None
                and _is_seen_after_boot(claim.held, found)
            ):
                renewed = replace(claim.held, hardware=found.hardware, place=found.place, rebooted=False)
                self._put(replace(claim, held=renewed))
                news.append(renewed)
                continue
            is_known = claim is not None and bool(claim.held.hardware) and not claim.held.foreign
            if claim is not None and is_known and not (claim.held.traced and trace.hardware):
                continue
            kept = claim.held.hardware - trace.container if claim and is_known else frozenset[str]()
            device = None if is_known else devices.get(slot)
            held = Held(
                *slot,
                backend=claim.held.backend if claim and not claim.held.foreign else backend,
                hardware=device.hardware if device else trace.hardware | kept,
                identity=device.identity if device else "",
                place=device.place if device else frozenset(),
                traced=device is None and bool(trace.hardware),
                pods=claim.held.pods if claim else Pods(),
                trouble=claim.held.trouble if claim else "",
            )
            if claim is None or held != claim.held or (held.traced and claim.pods != trace.pods):
                self._put(_Claim(held, claim.since if claim else now, pods=trace.pods if held.traced else Pods()))
                if claim is None or held != claim.held:
                    news.append(held)
        return news

    def adopt_foreign(self, seen: Iterable[Held], now: float) -> list[Held]:
        """Take in what pods have of our hardware under resources that are not ours; returns what is new.

        Of hardware that is not to be seen at the moment, they keep what they had.
        """
        news: list[Held] = []
        for held in seen:
            claim = self._claims.get(held.slot)
            if claim is not None and (not claim.held.foreign or held.hardware <= claim.held.hardware):
                continue
            news.append(held if claim is None else replace(claim.held, hardware=held.hardware | claim.held.hardware))
            self._put(_Claim(news[-1], claim.since if claim else now))
        return news

    def known(self, seen: Witnessed, slots: Iterable[SlotKey] | None = None) -> list[Held]:
        """Take in which pods have what, as the kubelet knows it now; returns the claims that are others with it.

        The kubelet forgets a pod's devices when the pod has ended, so that nothing of it runs.

        Args:
            seen: what the kubelet knows, and which pods run.
            slots: the claims to look at; None: all.
        """
        changed = []
        record, shown, is_blind = seen.record, seen.shown, seen.running is None
        for slot in list(self._claims) if slots is None else slots:
            if (claim := self._claims.get(slot)) is None or claim.held.claim is not None:
                continue
            held, recorded = claim.held, record.get(slot)
            if (  # one pod has it, as before: so it is of almost all claims, whatever is asked
                recorded is not None
                and recorded == claim.named
                and len(recorded) == 1
                and (recorded.keys() == held.pods or (is_blind and not held.pods))
                and claim.may_run
                and not held.trouble
                and len(shown.get(slot, ())) <= 1
            ):
                continue
            now = self._judged(claim, seen)
            if now.held != held:
                changed.append(now.held)
                self._put(now)
            elif now != claim:
                self._claims[slot] = now
        return changed

    def _judged(self, claim: _Claim, seen: Witnessed) -> _Claim:
        """A claim with its pods and its trouble by what is seen."""
        held, slot = claim.held, claim.held.slot
        recorded, shown = seen.record.get(slot), seen.shown.get(slot, Pods())
        named = claim.named if recorded is None else recorded
        uids, had = Pods(recorded or ()), held.pods | named.keys()
        if recorded is None and seen.is_sure:
            had = Pods(uid for uid in had if not self._has_others(claim, uid, seen.served))
        running = Pods() if seen.running is None else (held.pods & had | uids) & seen.running
        is_recorded = recorded is not None or slot in seen.shown
        if max(len(running | uids), len(shown)) > 1:
            trouble = TWO_PODS
        elif is_recorded:
            trouble = ""
        elif running:
            trouble = FORGOTTEN if seen.is_sure or seen.is_lost else held.trouble
        elif (seen.running is not None or not had) and (held.pods or named):  # they have ended, or have others by now
            trouble = ""
        else:
            trouble = FORGOTTEN if held.trouble == FORGOTTEN or (seen.is_lost and claim.may_run) else ""
        last = uids if seen.running is not None and seen.is_sure else Pods()
        pods = running or last or held.pods & had  # who had it, once nothing of them runs
        if (pods, trouble) != (held.pods, held.trouble):
            absent = None if trouble == FORGOTTEN else claim.absent_since
            claim = replace(claim, held=replace(held, pods=pods, trouble=trouble), absent_since=absent)
        return replace(claim, may_run=claim.may_run if seen.is_lost else is_recorded, named=named)

    def _has_others(self, claim: _Claim, uid: str, served: Mapping[tuple[str, str, str], Collection[str]]) -> bool:
        """Whether each container of this pod that had the claim's slot was given other IDs of the resource after it.

        A kubelet that has lost what a container had asks for others only if the container does not run: it has no others.
        """
        names = claim.named.get(uid, ())
        others = [served.get((uid, name, claim.held.resource), ()) for name in names]
        return bool(names) and all(
            ids and all(self._was_allocated_after(claim, (claim.held.resource, device_id)) for device_id in ids)
            for ids in others
        )

    def _was_allocated_after(self, claim: _Claim, slot: SlotKey) -> bool:
        other = self._claims.get(slot)
        return other is not None and other.allocated > claim.since

    def believe(self, hardware: Set[str]) -> list[Held]:
        """An operator says that no pod has this hardware that the kubelet has forgotten; returns the claims that this changes.

        It counts for what cannot be seen: pods that run are seen at the next look.
        """
        forgotten = [slot for slot in self.forgotten() if hardware & self._claims[slot].held.hardware]
        for slot in forgotten:
            claim = self._claims[slot]
            self._put(replace(claim, held=replace(claim.held, trouble="")))
        return [self._claims[slot].held for slot in forgotten]

    def forgotten(self) -> list[SlotKey]:
        """The claims that the kubelet has forgotten."""
        return [slot for slot, claim in self._claims.items() if claim.held.trouble == FORGOTTEN]

    def misses(self, record: Container[SlotKey]) -> bool:
        """Whether `record` lacks a claim of pods that are known."""
        allocated = ((slot, it) for slot, it in self._claims.items() if it.held.claim is None)
        return any((it.held.pods or it.named) and slot not in record for slot, it in allocated)

    def listed(self, present: Set[SlotKey], asked: float, answered: float, checkpoint: Version | None) -> None:
        """What a podresources List said.

        Args:
            present: every slot that it shows.
            asked: when it was asked for; a claim younger than `MIN_AGE` then is not judged.
            answered: when the answer was there.
            checkpoint: the checkpoint that lay there *after* the answer; only another one is a second witness.
        """
        for slot, claim in self._claims.items():
            if claim.held.claim is not None:
                continue
            if slot in present:
                if claim.absent_since is not None:
                    self._claims[slot] = replace(claim, absent_since=None, absent_version=None)
            elif claim.absent_since is None and asked - claim.since >= MIN_AGE and claim.held.trouble != FORGOTTEN:
                self._claims[slot] = replace(claim, absent_since=answered, absent_version=checkpoint)

    def doubted(self) -> list[SlotKey]:
        """The claims that the last List left out."""
        return [slot for slot, claim in self._claims.items() if claim.absent_since is not None]

    def checkpoint(self, present: Set[SlotKey], version: Version, slots: Iterable[SlotKey] | None = None) -> list[Held]:
        """What the kubelet's checkpoint says; returns the claims that have ended with it, of these slots or of all."""
        ended: list[Held] = []
        for slot in self.doubted() if slots is None else slots:
            claim = self._claims.get(slot)
            if claim is None or claim.absent_since is None or version == claim.absent_version:
                continue
            if slot in present or claim.held.trouble == FORGOTTEN:  # an init container's, say: ask the List again
                self._claims[slot] = replace(claim, absent_since=None, absent_version=None)
            else:
                self._end(claim.held)
                ended.append(claim.held)
        return ended

    def prepared(self, uid: str) -> list[Held]:
        """What was given for the ResourceClaim of this UID."""
        return [it.held for it in self._claims.values() if it.held.claim is not None and it.held.claim.uid == uid]

    def unprepared(self, uid: str) -> list[Held]:
        """End what was given for the ResourceClaim of this UID; returns it."""
        ended = self.prepared(uid)
        for held in ended:
            self._end(held)
        return ended

    def _put(self, claim: _Claim) -> None:
        before = self._claims.get(claim.held.slot)
        self._claims[claim.held.slot] = claim
        self._youngest = max(self._youngest, claim.since)
        if before is None:
            self._held.append(claim.held)
        elif before.held != claim.held:
            self._held = []
            self._holders.subtract(before.held.hardware)
        if before is None or before.held != claim.held:
            self._holders.update(claim.held.hardware)
            known = self._with_hardware[claim.held.resource]
            (known.discard if _is_bare(claim.held) else known.add)(claim.held.id)

    def _end(self, held: Held) -> None:
        del self._claims[held.slot]
        self._with_hardware[held.resource].discard(held.id)
        self._held = []
        self._holders.subtract(held.hardware)

    def ending(self) -> bool:
        """Whether any claim waits for its second witness, or for the end of one of its two pods."""
        return any(it.absent_since is not None or it.held.trouble == TWO_PODS for it in self._claims.values())

    def runs_forgotten(self) -> bool:
        """Whether any pod runs that the kubelet has forgotten."""
        return any(self._claims[slot].held.pods for slot in self.forgotten())

    def awaiting_checkpoint(self, now: float) -> set[str]:
        """Resources whose list should be sent again, so that the kubelet writes a checkpoint (A3)."""
        return {
            claim.held.resource
            for claim in self._claims.values()
            if claim.held.trouble == TWO_PODS
            or (claim.absent_since is not None and now - claim.absent_since >= REWRITE_AFTER)
        }

    def next_judgement(self, now: float) -> float | None:
        """When the youngest unjudged claim comes of age, in seconds from now; None if none is waiting to."""
        left = MIN_AGE - (now - self._youngest)  # no claim ends before that
        return left if left > 0 else None


# --- what another plugin gave ---


class Trace(Struct, frozen=True):
    """What a container got with its devices."""

    nodes: frozenset[str] = frozenset()
    """The host's paths of device nodes and mounts."""
    names: frozenset[str] = frozenset()
    """Values of environment variables, and names of CDI devices."""


class Answer(Struct, frozen=True):
    """What pods got that have a slot, and for which slots."""

    pods: Pods
    """More than one, where the checkpoint has one that has ended."""
    trace: Trace
    slots: frozenset[SlotKey]
    entries: int
    """Of the checkpoint that it is made of; of several it is unknown which slots are for what."""


class Tracer:
    """Finds the hardware of traces among the devices of an inventory."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._revision = -1
        self._leads: Mapping[str, Mapping[str, frozenset[str]]] = {}

    def traced(
        self,
        answers: Mapping[SlotKey, Answer],
        backends: Mapping[SlotKey, str],
        own: Callable[[SlotKey], Device | None],
    ) -> dict[SlotKey, Traced]:
        """What each slot's answers lead to.

        Args:
            answers: by resource and ID; all slots of a container have the same.
            backends: which backend has the resource of each.
            own: the device that has a slot's ID now: what one ID of a container has so is not another's.
        """
        found: dict[tuple[int, str], tuple[Mapping[SlotKey, frozenset[str]], frozenset[str]]] = {}
        traced = {}
        for slot, answer in answers.items():
            if (key := (id(answer), backends[slot])) not in found:
                known = {it: device for it in answer.slots if (device := own(it)) is not None}
                theirs = _union(device.hardware for device in known.values())
                led_to = (device - theirs for device in _followed(answer.trace, self._leads_of(backends[slot])))
                devices = frozenset(filter(None, led_to))
                found[key] = _shares(answer, answer.slots - known.keys(), devices), _union(devices)
            shares, container = found[key]
            traced[slot] = Traced(answer.pods, shares[slot], container)
        return traced

    def hardware(self, trace: Trace, backend: str) -> frozenset[str]:
        """All hardware of a backend that a trace leads to."""
        return _union(_followed(trace, self._leads_of(backend)))

    def ours(self, trace: Trace) -> Iterator[tuple[str, frozenset[str]]]:
        """The hardware that a trace of any plugin leads to, with the backend that sees it; mounts alone lead nowhere."""
        for backend in self._inventory.selection.kinds():
            if devices := _followed(trace, self._leads_of(backend, mounts=False)):
                yield backend, _union(devices)

    def _leads_of(self, backend: str, *, mounts: bool = True) -> Mapping[str, frozenset[str]]:
        if self._revision != self._inventory.revision:
            self._revision, self._leads = self._inventory.revision, {}
        key = f"{backend}{mounts}"
        if (leads := self._leads.get(key)) is None:
            leads = leads_to(self._inventory.devices(backend), mounts=mounts)
            self._leads = {**self._leads, key: leads}
        return leads


def _followed(trace: Trace, leads: Mapping[str, frozenset[str]]) -> frozenset[frozenset[str]]:
    return frozenset(leads[it] for it in trace.nodes | trace.names if it in leads)


def _union(devices: Iterable[frozenset[str]]) -> frozenset[str]:
    """The hardware of all of them."""
    return frozenset[str]().union(*devices)


def _shares(
    answer: Answer, slots: Collection[SlotKey], devices: Collection[frozenset[str]]
) -> Mapping[SlotKey, frozenset[str]]:
    """What each slot of a container has of the devices that it was given for these.

    Of as many devices as slots, each has one: which, does not matter, since they end together. Otherwise each has all.
    """
    if answer.entries == 1 and len(slots) == len(devices):
        return dict(zip(sorted(slots), sorted(devices, key=sorted), strict=True))
    return dict.fromkeys(slots, _union(devices))


def leads_to(devices: Iterable[Device], *, mounts: bool = True) -> Mapping[str, frozenset[str]]:
    """Path or name → the hardware of the one device that has it; what several have tells nothing."""
    owners: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
    for device in devices:
        for clue in _clues(device, mounts=mounts):
            owners[clue].add(device.hardware)
    return {clue: next(iter(found)) for clue, found in owners.items() if len(found) == 1 and clue not in _OF_DRIVERS}


def _clues(device: Device, *, mounts: bool) -> Iterator[str]:
    for node in device.nodes:
        if not node.shared:
            yield node.path.text
    for mount in device.mounts if mounts else ():
        yield mount.path.text
    if device.identity:
        yield device.identity
    for hardware in device.hardware:
        kind, _, address = hardware.partition(":")
        if kind in ("pci", "mdev"):
            yield address
