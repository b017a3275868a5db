"""Notes how the devices of the lists change, and which pods have them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping, Set
from pathlib import Path
from typing import Final

import anyio
from msgspec.structs import replace

from agent.health.book import DRAINED as DRAINED_BY_OPERATOR
from agent.history import timeline
from agent.history.notes import Notes
from agent.history.timeline import DRAINED, GONE, Book, Condition, Key, Period, Record, Run, periods
from agent.inventory.inventory import Inventory
from agent.inventory.ownership import HELD_AND_GONE
from agent.inventory.shortfall import Shortfall
from agent.model import Health, Slot, SlotKey, Snapshot
from agent.runtime.pacing import SYSTEM, Clock, Doorbell
from agent.runtime.workers import in_batches
from backends.base import Device

BEAT: Final = 300.0
"""Seconds after which it is written that the daemon lives: after a crash, so much at most is not known."""

_PAUSE: Final = 5.0  # seconds in which changes gather before they are written, and before the next look at who has what
_SETTLES: Final = 2.0  # seconds from a daemon's begin to its first lists
_BEFORE: Final = 0.1  # seconds; two clocks are read one after the other
_RUNS: Final = 100  # of the daemon; of what was before them nothing is known
_SHARED: Final = 16  # IDs; of a device with more, such as /dev/kvm, holders are not noted
_HOLDERS: Final = 4  # pods that are named
_UNNAMED: Final = "a pod that the kubelet has not named"
_MOST_CHARACTERS: Final = 300  # of a message
_UNLISTED: Final = Condition(GONE, "gone", "it is on no list")
_BADNESS: Final = (timeline.HEALTHY, timeline.DEGRADED, GONE, DRAINED, timeline.UNHEALTHY)


class Recorder:
    """What was noted, by this run and those before it."""

    def __init__(
        self,
        inventory: Inventory,
        list_of: Callable[[str], Snapshot | None],
        pods: Callable[[SlotKey], Iterable[str]],
        shortfall: Shortfall,
        *,
        uids: Callable[[SlotKey], Mapping[str, str]] = lambda _slot: {},
        proc: Path = Path("/proc"),
        clock: Clock = SYSTEM,
    ) -> None:
        """Begin with nothing.

        Args:
            inventory: what the lists are made from.
            list_of: tells a resource's last list.
            pods: tells who has a slot, as `namespace/name`, as far as is known.
            shortfall: what was offered, and is gone.
            uids: tells the UIDs of these pods, as far as they are known.
            proc: the host's /proc.
            clock: the time.
        """
        self._inventory, self._list_of, self._pods, self._shortfall = inventory, list_of, pods, shortfall
        self._clock, self._wall = clock.now, clock.wall
        self._book = Book()
        self._earlier: tuple[Run, ...] = ()
        self._began: float | None = None  # monotonic; None while another agent is the one to note
        self._compared: dict[str, int] = {}  # resource → the generation of the list that was looked at last
        self._held: Set[Key] = frozenset()  # devices that pods had at the last look
        self._forgot = clock.now()
        self._tombs: dict[SlotKey, Key] = {}  # the device that was behind a tombstone
        self._noting = asyncio.Lock()
        self._changed = Doorbell()
        self._is_unsaved = False
        self.notes = Notes(inventory, pods, uids, self._held_at, proc, clock=clock, on_note=self._noted)
        """What happened to hardware beside."""

    def restore(self, record: Record) -> None:
        """Take in what the agent before us noted."""
        self._book.restore(record.changes)
        self.notes.restore(record.notes)
        self._earlier = record.runs
        self._held = frozenset(key for key in self._book.devices() if self._book.now(key).holders)

    # --- what happens ---

    async def listed(self, before: Mapping[str, Slot] | None, after: Snapshot) -> None:
        """Note how a list differs from the one before; of thousands of devices that takes several steps of the loop."""
        async with self._noting:
            if self._began is not None and after.generation > self._compared.get(after.resource, -1):
                await self._compare(before if after.resource in self._compared else None, after)

    def claims_changed(self) -> None:
        """Pods may hold other devices now."""
        self._changed.set()

    def _noted(self) -> None:
        self._is_unsaved = True
        self._changed.set()

    async def run(self, save: Callable[[], Awaitable[None]]) -> None:
        """Note what happens, and have it saved soon, for ever; only the one agent of a node does."""
        await self.begin()
        saved = -math.inf
        try:
            while True:
                async with self._noting:
                    await self._look_at_claims()
                    await self._forget()
                if self._is_unsaved or self._clock() - saved >= BEAT:
                    self._is_unsaved, saved = False, self._clock()
                    await save()
                await anyio.sleep(_PAUSE)
                await self._changed.rung(BEAT)
        finally:
            self.end()

    async def begin(self) -> None:
        """Note from now on what happens; what differs from what the run before noted, has happened now."""
        self._began = self._clock()
        self._compared.clear()
        for name in self._inventory.names():
            if (snapshot := self._list_of(name)) is not None:
                await self.listed(None, snapshot)

    def end(self) -> None:
        """Note no more: another agent may do so."""
        self._earlier, self._began = self._runs(self._wall()), None

    async def _compare(self, before: Mapping[str, Slot] | None, after: Snapshot) -> None:
        resource, now = after.resource, self._wall()
        if before is None and self._began is not None and self._clock() - self._began <= _SETTLES:
            now = self._runs(now)[-1].began - _BEFORE  # what a daemon finds is how it is from its begin on
        self._compared[resource] = after.generation
        earlier = self._known(resource) if before is None else set[Key]()
        ids = after.slots.keys() if before is None else after.changed_since(before)
        fresh: dict[Key, Condition] = {}
        appeared: set[Key] = set()
        async for batch in in_batches(ids):
            for device_id in batch:
                old, new = (before or {}).get(device_id), after.slots.get(device_id)
                if new is None and old is not None and self._places(resource, old.device):
                    continue  # the device is listed, under fewer IDs than it had
                key, condition = self._key(resource, device_id, old, new), _condition(new and new.health)
                if key not in fresh or _badness(condition) > _badness(fresh[key]):
                    fresh[key] = condition
                if old is None and self._has_appeared(key, new, before, earlier):
                    appeared.add(key)
        fresh |= dict.fromkeys(earlier - fresh.keys(), _UNLISTED)
        async for notes in in_batches(fresh.items()):
            for key, condition in notes:
                so = replace(condition, holders=self._book.now(key).holders)
                if self._book.note(key, so, now, appeared=key in appeared):
                    self._is_unsaved = True
                    self._changed.set()

    def _key(self, resource: str, device_id: str, old: Slot | None, new: Slot | None) -> Key:
        """The device behind an ID; of a tombstone the one that went."""
        slot, device = (resource, device_id), (new and new.device) or (old and old.device)
        if device is None and slot not in self._tombs and resource in self._inventory.names():
            claim = self._inventory.claims(resource).get(device_id)
            device = self._shortfall.gone(claim.hardware) if claim else None
        if device is None:
            return self._tombs.get(slot, slot) if new else self._tombs.pop(slot, slot)
        if new is not None and new.device is None:
            self._tombs[slot] = resource, device.key
        return resource, device.key

    def _places(self, resource: str, device: Device | None) -> list[tuple[str, ...]]:
        """The IDs that the resource offers this device under; nothing if it does not."""
        owners = self._inventory.on(device.hardware) if device else ()
        places = (it.placed for it in owners if device and it.device.key == device.key)
        return [it.ids for it in places if it is not None and it.resource == resource]

    def _known(self, resource: str) -> set[Key]:
        """The resource's devices that were listed when a daemon ran last."""
        offered = {
            (it.resource, it.device) for it in self._shortfall.offered if it.resource == resource and not it.went
        }
        noted = (key for key in self._book.devices() if key[0] == resource)
        return {*offered, *(key for key in noted if self._book.now(key).state != GONE)}

    def _has_appeared(
        self, key: Key, new: Slot | None, before: Mapping[str, Slot] | None, earlier: Container[Key]
    ) -> bool:
        """Whether a device was not listed before, as far as a daemon ran."""
        if before is None:
            return bool(self._earlier) and key not in earlier
        places = self._places(key[0], new.device if new else None)
        return not any(device_id in before for ids in places for device_id in ids)

    # --- who has what ---

    async def _look_at_claims(self) -> None:
        now, fresh = self._wall(), dict[Key, set[str]]()
        for resource in self._inventory.names():
            slots = [(it, (resource, it)) for it in self._inventory.claims(resource)]
            slots += [(it, claim.slot) for it, claim in self._inventory.held_elsewhere(resource)]
            async for batch in in_batches(slots):
                for device_id, claimed in batch:
                    slot = self._inventory.slot(resource, device_id)
                    key = self._key(resource, device_id, None, slot)
                    if key in fresh or not self._is_shared(resource, slot):
                        fresh.setdefault(key, set()).update(self._pods(claimed))
        async for keys in in_batches(fresh.keys() | self._held):
            for key in keys:
                so = self._book.now(key)
                holders = _named(fresh[key], so.holders) if key in fresh else ()
                self._is_unsaved |= self._book.note(key, replace(so, holders=holders), now)
        self._held = fresh.keys()

    def _is_shared(self, resource: str, slot: Slot | None) -> bool:
        return any(len(ids) > _SHARED for ids in self._places(resource, slot.device if slot else None))

    # --- what is kept, and told ---

    async def _forget(self) -> None:
        """Drop what is older than what is told."""
        if self._clock() - self._forgot >= BEAT:
            self._forgot, now = self._clock(), self._wall()
            async for keys in in_batches(list(self._book.devices())):
                self._book.forget(keys, now)

    def record(self) -> Record:
        """All that is to be kept for the next run."""
        return Record(tuple(self._book.all()), self._runs(self._wall()), tuple(self.notes.all()))

    def _runs(self, now: float) -> tuple[Run, ...]:
        """When the daemon ran, as the wall clock has it, which says that it is `now`."""
        if self._began is None:
            return self._earlier
        return (*self._earlier, Run(now - (self._clock() - self._began), now))[-_RUNS:]

    def devices(self) -> Collection[Key]:
        """The devices that were not healthy and free all the time."""
        return self._book.devices()

    def _held_at(self, key: Key, then: float) -> tuple[str, ...]:
        """The pods that had a device at this time."""
        return next((it.condition.holders for it in self.of(key) if it.begins <= then < it.ends), ())

    def tombs(self) -> Mapping[SlotKey, Key]:
        """Tombstones, with the devices that were behind them."""
        return self._tombs

    def of(self, key: Key) -> list[Period]:
        """A device's last 24 hours; of one that is listed, or among `devices`."""
        now = self._wall()
        return periods(self._book.of(key), self._runs(now), now)


def _condition(health: Health | None) -> Condition:
    if health is None:
        return _UNLISTED
    state = health.state.value
    if not health.offered:
        state = {DRAINED_BY_OPERATOR: DRAINED, HELD_AND_GONE.reason: GONE}.get(health.reason, state)
    return Condition(state, health.reason, health.message[:_MOST_CHARACTERS].encode(errors="replace").decode())


def _badness(condition: Condition) -> tuple[int, bool]:
    return _BADNESS.index(condition.state), condition is not _UNLISTED


def _named(pods: Collection[str], before: tuple[str, ...]) -> tuple[str, ...]:
    """The pods, not all of very many; who they are is known from before while the kubelet has not said it."""
    if not pods:
        return before or (_UNNAMED,)
    named = sorted(pods)
    more = len(named) - _HOLDERS
    return (*named[:_HOLDERS], f"and {more} more") if more > 0 else tuple(named)
