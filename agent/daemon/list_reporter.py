"""Tells the other parts of lists once the kubelet has them: adoption, CDI, DRA, Kubernetes, the history and the log.

What the log says of a change is a sentence for each device; what is odd about a list, or what it lacks, is said once.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, Final

import anyio
import structlog
from msgspec import Struct
from msgspec.structs import replace

from agent.daemon.dra import Dra
from agent.daemon.nfd_file import FeatureFile
from agent.daemon.node import Node
from agent.daemon.serving import Serving
from agent.hardware.adoption import Adopter
from agent.inventory.lookup import model_of, name_of
from agent.inventory.shortfall import WENT, departure, unmatched
from agent.kubernetes.events import Subject
from agent.kubernetes.runner import KubernetesParts
from agent.model import Health, Slot, Snapshot, State, Transition
from agent.runtime import limits
from agent.runtime.counts import Counts
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems, Troubles
from agent.runtime.workers import BATCH, in_batches, in_slices
from backends.base import Device, Resource

_TELL_AFTER: Final = 0.002  # seconds from a list to all that follows from it: the kubelet is told first

log = structlog.get_logger()


class ListReporter:
    """What follows from a change of the lists."""

    def __init__(
        self,
        node: Node,
        serving: Serving,
        adopter: Adopter,
        list_warnings: ListWarnings,
        features: FeatureFile | None,
        counts: Counts,
        kubernetes: KubernetesParts,
        dra: Dra,
    ) -> None:
        """Prepare; these are told of the node's changes, and `counts` counts them."""
        self._node, self._inventory, self._serving = node, node.inventory, serving
        self._adopter, self._list_warnings = adopter, list_warnings
        self._features, self._counts, self._kubernetes, self._dra = features, counts, kubernetes, dra
        self._unlogged: deque[tuple[Snapshot | None, Snapshot]] = deque()
        self._listed = Doorbell()
        self._in_force: Set[str] = frozenset()
        self._revision = self._names_revision = -1

    async def run(self) -> None:
        """Tell of whatever changes, until cancelled."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._log)
            while True:
                await self._node.news.rung()
                if self._inventory.names_revision != self._names_revision:
                    self._names_revision = self._inventory.names_revision
                    self._follow_names()
                await asyncio.sleep(_TELL_AFTER)  # the streams send first, which takes them two turns of the loop
                self._tell()

    def _follow_names(self) -> None:
        """Have those resources served by device plugin that are to be; they may be others than before."""
        names = self._inventory.names()
        self._serving.follow(self._dra.by_plugin(names))
        for name in self._node.lists.keys() - set(names):
            del self._node.lists[name]
        known, in_force = self._in_force, self._inventory.selection.in_force()
        self._in_force = {it.name for it in in_force}
        for it in in_force:
            if it.template and it.name not in known:
                log.info("resource-named", resource=it.name, backend=it.spec.backend, template=it.template)
                self._adopter.due.set()

    def _tell(self) -> None:
        """Tell what the kubelet has been told by now."""
        if self._inventory.revision != self._revision:
            self._revision = self._inventory.revision
            self._list_warnings.devices_changed()
        changed, self._node.ended = self._node.ended, set()
        is_news = bool(self._node.unreported)
        while self._node.unreported:
            before, snapshot = self._node.unreported.popleft()
            self._adopter.listed(snapshot)
            self._node.cdi.changed([snapshot.resource])
            self._list_warnings.tell_of_length(snapshot)
            self._unlogged.append((before, snapshot))
            changed.add(snapshot.resource)
        if changed:
            self._dra.changed(changed)
        if is_news:
            self._listed.set()
            self._kubernetes.lists_changed()
            if self._features is not None:
                self._features.changed()

    async def _log(self) -> None:
        """Tell the log of each list, one after the other; of thousands of devices that takes several steps of the loop."""
        while True:
            await self._listed.rung()
            while self._unlogged:
                before, snapshot = self._unlogged.popleft()
                slots = before.slots if before else None
                happened = await tell(slots, snapshot, self._counts, self._why_it_left)
                if happened and slots is not None and self._kubernetes.tells_events:
                    first, more = happened.first(LOGGED_AT_MOST), len(happened) - LOGGED_AT_MOST
                    held = dict.fromkeys(await in_slices(self._held(slots, snapshot)))
                    self._kubernetes.changed(snapshot.resource, first, more, held)
                await self._node.history.listed(slots, snapshot)

    def _why_it_left(self, device: Device) -> tuple[str, str]:
        reason, sentence = departure(self._inventory, device)
        return reason, sentence + self._node.last_word(device.hardware) if reason == WENT else sentence

    def _held(self, before: Mapping[str, Slot], after: Snapshot) -> Iterator[tuple[Subject, Transition]]:
        """What changed of a pod's devices, with the pod."""
        resource, pod_claims = after.resource, self._node.pod_claims
        holders = pod_claims.holders
        held = [it for it in after.changed_since(before) if (resource, it) in holders]
        uids = pod_claims.uids(resource) if held else {}
        for device_id in held:
            if changed := of_id(
                resource, device_id, before.get(device_id), after.slots.get(device_id), self._why_it_left
            ):
                for it in holders[resource, device_id]:
                    yield Subject("Pod", it.pod, uids.get((it.container, device_id), ""), it.namespace), changed


# --- what is odd about lists ---


_PAUSE: Final = 1.0
"""Seconds between two looks at what is missing: a device whose driver is rebound is missing for a moment."""
_SELDOM: Final = 3600.0  # seconds after which what went long ago may be forgotten, though nothing happens


class ListWarnings:
    """Remembers what it has logged."""

    def __init__(self, node: Node, kubernetes: KubernetesParts) -> None:
        """Prepare; `kubernetes` is told what is not offered, too."""
        self._node, self._kubernetes = node, kubernetes
        own, kind = Problems(), node.inventory.selection.kind  # every face has what is wrong with a resource beside it
        self._broken = Troubles(
            lambda it: own.trouble(
                "", f"{it} is broken", "resource-broken", level="error", resource=it, backend=kind(it)
            )
        )
        self._cut = Troubles(
            lambda it: own.trouble(
                "", f"the list of {it} is cut", "list-too-long", "list-fits-again",
                level="error", resource=it, count=0, limit=limits.MESSAGE_LIMIT,
            )
        )  # fmt: skip
        self._changed = Doorbell()

    async def run(self) -> None:
        """Tell what is missing, and what is not any more, as it changes."""
        await anyio.sleep(_PAUSE)
        while True:
            looked = {kind for kind, it in self._node.discoverers.items() if not it.unseen()}
            told, ended = await self._node.shortfall.look(looked)
            await self._node.keeper.write_offered()
            for it in told[:LOGGED_AT_MOST]:
                log.warning(
                    "device-not-offered", resource=it.resource, backend=it.backend, device=it.device,
                    called=name_of(it.seen.attributes), reason=it.message,
                )  # fmt: skip
            more = Counter(it.resource for it in told[LOGGED_AT_MOST:])
            for resource, count in more.items():
                log.warning("devices-not-offered", resource=resource, count=count)
            for it in ended[:LOGGED_AT_MOST]:
                name = name_of(it.seen.attributes)
                log.info(
                    "device-offered-again", resource=it.resource, backend=it.backend, device=it.device, called=name
                )
            self._kubernetes.missing(told[:LOGGED_AT_MOST], more, ended[:LOGGED_AT_MOST])
            await self._changed.rung(_SELDOM, gather=_PAUSE)

    def devices_changed(self) -> None:
        """Say which resources' backends failed on a device, and how; what is missing may be another."""
        self._changed.set()
        self._broken.tell(self._node.inventory.selection.broken)

    def tell_of_selectors(self, resources: Iterable[Resource[Any]]) -> None:
        """Say which of them match nothing; hardware may come later, a misspelt word does not go away."""
        self._changed.set()  # the backends have looked: what an earlier run had offered may be found to be gone
        scanned = {kind: it.selectable() for kind, it in self._node.discoverers.items() if it.first_scan.is_set()}
        for kind, problem in unmatched(resources, scanned):
            log.warning("selector-matches-nothing", resource=problem.subject, backend=kind, reason=problem.sentence)

    def tell_of_length(self, snapshot: Snapshot) -> None:
        """Report the IDs that are left out of a list; again when they are more or fewer."""
        if omitted := snapshot.omitted:
            self._cut[snapshot.resource].report_once(f"{omitted} IDs are left out", count=omitted)
        else:
            self._cut.heal(snapshot.resource)


# --- what changed between two lists, for the log ---


_WELL: Final = ("Healthy", "Degraded")
"""States in which pods may have it; any other is a loss, which is a warning."""

_OFF_LIST: Final = "Gone"
"""In place of a state: the ID has left the list, because its device is gone, another resource's, or free of its pod."""

LOGGED_AT_MOST: Final = 10
"""Transitions of one snapshot, or devices of one look, that get a line each."""


Why = Callable[[Device], tuple[str, str]]
"""Why a device is on a list no more, in a word and a sentence."""

_RELEASED: Final = ("released", "no pod holds it any more")
"""Of what was listed only because a pod held it."""


async def tell(before: Mapping[str, Slot] | None, snapshot: Snapshot, counts: Counts, why: Why) -> Transitions:
    """One line for each device whose state changed, or is not well from the first list on, with its reason.

    The changes are counted, and handed back.
    """
    happened = await transitions(before or {}, snapshot, why)
    if before is None:
        healthy = sum(slot.health.offered for slot in snapshot.slots.values())
        log.info("resource-listed", resource=snapshot.resource, count=len(snapshot.slots), healthy=healthy)
        happened = happened.without(State.HEALTHY)
    else:
        for cause, number in happened.causes().items():
            counts.transitions[snapshot.resource, cause] += number
    for it in happened.first(LOGGED_AT_MOST):
        (log.info if it.state in _WELL else log.warning)(
            "device-changed", resource=it.resource, device=it.device, called=it.name, state=it.state, reason=it.reason,
            message=it.message, count=it.ids,
        )  # fmt: skip
    if len(happened) > LOGGED_AT_MOST:
        (log.warning if happened.losses() > LOGGED_AT_MOST else log.info)(
            "devices-changed", resource=snapshot.resource, count=len(happened) - LOGGED_AT_MOST
        )
    return happened


_Said = tuple[str, str, str]
_Key = tuple[str, str, str, str]


class Transitions(Struct, frozen=True):
    """The transitions between two snapshots, one for each device and outcome; there may be 10,000."""

    resource: str
    counts: Counter[_Key]
    """Device, state, reason, message → how many IDs."""
    devices: Mapping[str, Device]
    """By their keys; a tombstone has none."""

    def __len__(self) -> int:
        return len(self.counts)

    def first(self, most: int) -> list[Transition]:
        """So many of them, losses before others, in their order."""
        first = heapq.nsmallest(most, self.counts, key=lambda it: (it[1] in _WELL, it))
        return [Transition(self.resource, *key, self.counts[key], _name(self.devices.get(key[0]))) for key in first]

    def losses(self) -> int:
        """How many devices pods can have no more."""
        return sum(state not in _WELL for _, state, _, _ in self.counts)

    def without(self, state: State) -> Transitions:
        """Those to other states."""
        counts = Counter({key: number for key, number in self.counts.items() if key[1] != state.value})
        return replace(self, counts=counts)

    def causes(self) -> Counter[str]:
        """How many there are of each reason, or state where there is none."""
        said = ((state, reason) for _, state, reason, _ in self.counts)
        # what a pod held was counted as gone when it went
        return Counter("gone" if it == _OFF_LIST and why != _RELEASED[0] else why or it.lower() for it, why in said)


async def transitions(before: Mapping[str, Slot], after: Snapshot, why: Why) -> Transitions:
    """What happened; of many IDs, in several steps of the loop.

    Args:
        before: the slots of the snapshot before `after`.
        after: the new snapshot.
        why: tells why devices left.
    """
    counts: Counter[_Key] = Counter()
    devices: dict[str, Device] = {}
    left: dict[str, _Said] = {}  # by the device, since it may have had many IDs
    said: dict[int, _Said] = {}  # by the health, which is one object for what is alike
    async for ids in in_batches(after.changed_since(before), 10 * BATCH):
        for device_id in ids:
            old, new = before.get(device_id), after.slots.get(device_id)
            was, now = old and old.health, new and new.health
            if was is now:
                continue
            for health in (was, now):
                if health is not None and id(health) not in said:
                    said[id(health)] = _said_of(health)
            key = _key(new or old, device_id)
            if now is not None:
                what = said[id(now)]
            elif (gone := left.get(key)) is not None:
                what = gone
            else:
                what = left[key] = _left(old, why)
            if was is None or said[id(was)] != what:
                counts[key, *what] += 1
                if (slot := new or old) and slot.device:
                    devices[key] = slot.device
    return Transitions(after.resource, counts, devices)


def of_id(resource: str, device_id: str, old: Slot | None, new: Slot | None, why: Why) -> Transition | None:
    """What happened to one ID, if anything."""
    was, now = (it.health if it else None for it in (old, new))
    if was is now or (was is not None and now is not None and was.says_same(now)):
        return None
    slot = new or old
    what = _said_of(now) if now else _left(old, why)
    return Transition(resource, _key(slot, device_id), *what, ids=1, name=_name(slot and slot.device))


def _said_of(health: Health) -> _Said:
    return health.state.value, health.reason, health.message


def _left(slot: Slot | None, why: Why) -> _Said:
    return (_OFF_LIST, *(why(slot.device) if slot and slot.device else _RELEASED))


def _key(slot: Slot | None, device_id: str) -> str:
    return slot.device.key if slot and slot.device else device_id


def _name(device: Device | None) -> str:
    """What people call it."""
    return " ".join(filter(None, (model_of(device.attributes), name_of(device.attributes)))) if device else ""
