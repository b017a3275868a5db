"""Answers what a person asks of the daemon, from what its parts know; every face asks here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import structlog
from msgspec import Struct
from msgspec.structs import replace

from agent import __version__
from agent.console import views
from agent.console.control import NoSuchDeviceError, RefusedError
from agent.console.device_facts import Knowledge, explain, find
from agent.console.device_views import (
    Drawn,
    described,
    draw,
    histories,
    history_by_key,
    history_of,
    last_fault,
    notes_of,
)
from agent.console.sockets import node_name
from agent.daemon.dra import Dra
from agent.daemon.event_log import Events
from agent.daemon.node import Node
from agent.daemon.reload import ConfigurationSwap, Reloader
from agent.daemon.serving import Serving
from agent.daemon.shutdown import Shutdown
from agent.daemon.state_file import NotYetError
from agent.hardware.adoption import Adopter
from agent.health import Statement
from agent.inventory.lookup import model_of, name_of
from agent.inventory.ownership import HELD_AND_GONE, NOT_SEEN, UNMAPPED
from agent.inventory.shortfall import WENT, Missing, NotOffered, candidates, each_once, unmatched
from agent.model import Slot, SlotKey
from agent.runtime.errors import FairleadError
from agent.runtime.pacing import SYSTEM, Clock
from agent.runtime.problems import Problems
from agent.runtime.workers import in_batches, in_slices
from backends.base import Backend, Clears, Device, Problem

log = structlog.get_logger()


class Parts(Struct, frozen=True):
    """The parts of the daemon that know something, and what can be done."""

    node: Node
    dra: Dra
    backends: Mapping[str, Backend[Any]]
    adopter: Adopter
    serving: Serving
    events: Events
    problems: Problems
    swap: ConfigurationSwap
    reloader: Reloader
    shutdown: Shutdown


class AgentControl:
    """The running daemon, for a person; `Control` says what may be raised."""

    def __init__(
        self,
        parts: Parts,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        """The daemon has started now."""
        self._parts = parts
        self._clock, self._wall_clock = clock.now, clock.wall
        self._node = node_name()
        self._started = clock.wall()
        self._drawn: dict[str, Drawn] = {}
        self._unmatched: tuple[object, Mapping[str, str]] = (None, {})

    # --- what is ---

    async def status(self) -> views.Status:
        """Everything there is to see; with thousands of devices it takes several steps of the loop, and some ms pass."""
        parts = self._parts
        names = parts.node.inventory.names()
        self._drawn = {name: drawn for name, drawn in self._drawn.items() if name in names}
        devices = {name: await self._devices(name) for name in names}
        return views.Status(
            __version__,
            self._started,
            self._wall_clock(),
            self._kubelet(),
            self._configuration(),
            tuple(self._resource(name, devices[name]) for name in names),
            tuple(sorted(await self._unclaimed(), key=lambda it: not it.resource)),
            tuple(self._problems()),
            self._node,
            tuple(self._templates()),
            parts.serving.is_standing_by,
            standby.who if (standby := parts.serving.standbys.ready()) is not None else "",
            tuple(
                views.Witness(it.name, not it.complaint, it.complaint, it.needed)
                for it in parts.swap.discovery.witnesses()
            ),
        )

    def _configuration(self) -> views.Configuration:
        config, reloader = self._parts.swap.config, self._parts.reloader
        file = str(config.source.absolute()) if config.source else ""  # a reader may be in another directory
        return views.Configuration(file, config.read_at, reloader.mistakes, reloader.needs_restart)

    def _kubelet(self) -> views.Kubelet:
        serving = self._parts.serving
        streaming = any(plugin.streaming for plugin in serving.plugins.values())
        present = streaming or (not serving.kubelet.complaint and serving.kubelet.socket.exists())
        return views.Kubelet(str(serving.kubelet.socket), present, serving.waiting_for)

    def _resource(self, name: str, devices: tuple[views.Device, ...]) -> views.Resource:
        serving, configured = self._parts.serving, self._parts.node.inventory.resource(name)
        registrar, plugin = serving.registrars.get(name), serving.plugins.get(name)
        dra = self._parts.dra
        is_offered = dra.is_offered(name)
        return views.Resource(
            name,
            configured.spec.backend if configured else "",
            registered=is_offered or (registrar is not None and registrar.registered and not registrar.rival),
            streaming=(is_offered and dra.is_registered) or (plugin is not None and plugin.streaming),
            complaint="; ".join(self._complaints(name)),
            devices=devices,
        )

    def _complaints(self, name: str) -> Iterator[str]:
        inventory, registrar = self._parts.node.inventory, self._parts.serving.registrars.get(name)
        if registrar is not None and (complaint := registrar.rival or registrar.complaint):
            yield complaint
        if complaint := self._parts.dra.complaint(name):
            yield complaint
        if why := inventory.selection.broken.get(name):
            yield why
        if omitted := inventory.omitted(name):
            yield f"{omitted} IDs are left out: the list would be longer than a kubelet takes"
        if sentence := self._unmatched_selectors().get(name):
            yield sentence

    def _templates(self) -> Iterator[views.Template]:
        configured, unmatched = self._parts.node.inventory.selection, self._unmatched_selectors()
        for name, given in configured.given().items():
            whys = [why for why in (configured.broken.get(name), unmatched.get(name)) if why]
            yield views.Template(name, configured.kind(name) or "", "; ".join(whys), given)

    def _unmatched_selectors(self) -> Mapping[str, str]:
        """Resource → which of its selectors match nothing; looked for again when other devices are there."""
        parts = self._parts
        scanned = {kind: it for kind, it in parts.node.discoverers.items() if it.first_scan.is_set()}
        state = (parts.node.inventory.revision, frozenset(scanned))
        if self._unmatched[0] != state:
            resources = parts.node.inventory.selection.written.values()
            found = unmatched(resources, {kind: it.selectable() for kind, it in scanned.items()})
            self._unmatched = state, {it.subject: it.sentence.removeprefix(f"{it.subject}: ") for _, it in found}
        return self._unmatched[1]

    async def _unclaimed(self) -> list[views.Unclaimed]:
        """What no pod can get."""
        inventory = self._parts.node.inventory
        told = each_once(await in_slices(candidates(inventory)), inventory)
        return await in_slices(self._views_of(told))

    def _views_of(self, told: Iterable[NotOffered]) -> Iterator[views.Unclaimed]:
        missing = {(it.backend, it.device): it for it in self._parts.node.shortfall.missing}
        ids = {name: it.ids for it in self._parts.node.shortfall.former for name in it.hardware}
        for it in told:
            device, kind = it.found.device, it.found.backend
            one = missing.get((kind, device.key)) if it.missing else None  # since when, once it has been looked for
            known = one is not None and one.reason != WENT
            view = self._missing(one, it.why, ids) if one and known else views.Unclaimed(device.key, kind, it.why)
            yield described(view, self._as_known(device))
        gone = (it for it in missing.values() if it.reason == WENT)
        yield from (
            described(self._missing(it, it.message + self._parts.node.last_word(it.hardware), ids), it.seen)
            for it in gone
        )

    def _missing(self, it: Missing, why: str, ids: Mapping[str, tuple[str, ...]]) -> views.Unclaimed:
        had = next((ids[name] for name in it.hardware if name in ids), ())
        return views.Unclaimed(it.device, it.backend, why, it.resource, it.reason, self._wall(it.since), ids=had)

    def _problems(self) -> Iterator[views.Problem]:
        for kind, discoverer in self._parts.node.discoverers.items():
            if not discoverer.first_scan.is_set():
                yield views.Problem(kind, kind, f"the first look at the hardware of {kind} has not ended yet")
            for of_unit in discoverer.problems.values():
                yield from (views.Problem(kind, it.subject, it.sentence) for it in of_unit)
        if lost := self._parts.events.lost():
            yield views.Problem("", "log", f"stderr did not take {lost} lines of the log; they are lost")
        yield from (views.Problem("", it.part, it.sentence) for it in self._parts.problems.lasting())
        keeper = self._parts.node.keeper
        yield from (views.Problem("", "state", why) for why in (keeper.unkept(), keeper.damage()) if why)

    # --- devices ---

    async def _devices(self, name: str) -> tuple[views.Device, ...]:
        """The resource's devices by their state, with who holds them."""
        if (snapshot := self._parts.node.lists.get(name)) is None:
            return ()
        drawn = self._drawn.get(name)
        if drawn is None or drawn.snapshot is not snapshot:
            drawn = self._drawn[name] = await draw(snapshot, self._wall, self._signals_of)
        held: dict[int, list[views.Held]] = {}
        for device_id, claim in await in_slices(self._held(name)):
            if (number := drawn.numbers.get(device_id)) is not None:
                held.setdefault(number, []).append(claim)
        if not held:
            return drawn.devices
        devices, unseen = list(drawn.devices), self._unseen(self._parts.node.inventory.kind(name))
        async for batch in in_batches(held):
            for number in batch:
                view = _as_seen(replace(devices[number], held=tuple(held[number])), unseen)
                behind = None if view.hardware else self._behind(name, view.ids[0])
                devices[number] = view if behind is None else described(view, behind)
        return tuple(devices)

    def _signals_of(self, hardware: str) -> Iterable[Statement]:
        return self._parts.node.health.signals_of(hardware, self._clock())

    def _behind(self, name: str, device_id: str) -> Device | None:
        """The device that a tombstone stands for: as it is, if it is there, else as it was seen last."""
        claim = self._parts.node.inventory.claims(name).get(device_id)
        if claim is None:
            return None
        there = self._parts.node.inventory.on(claim.hardware)
        return self._as_known(there[0].device) if there else self._parts.node.shortfall.gone(claim.hardware)

    def _as_known(self, device: Device) -> Device:
        """The device, with what it was called while it was offered, if it tells less now."""
        if name_of(device.attributes) and model_of(device.attributes):
            return device
        former = (it.device for it in self._parts.node.shortfall.former if not device.hardware.isdisjoint(it.hardware))
        before = next(filter(None, former), device)
        return replace(device, attributes={**before.attributes, **device.attributes})

    def _held(self, name: str) -> Iterator[tuple[str, views.Held]]:
        """The resource's IDs that pods hold, under these or through another resource."""
        inventory = self._parts.node.inventory
        claims = [(device_id, device_id, (name, device_id)) for device_id in inventory.claims(name)]
        others = [(i, f"{claim.resource}/{claim.id}", claim.slot) for i, claim in inventory.held_elsewhere(name)]
        return ((device_id, views.Held(told, self._holders(slot))) for device_id, told, slot in (*claims, *others))

    def _unseen(self, kind: str | None) -> str:
        discoverer = self._parts.node.discoverers.get(kind or "")
        return discoverer.unseen() if discoverer is not None else ""

    def _holders(self, slot: SlotKey) -> tuple[views.Holder, ...]:
        known = self._parts.node.pod_claims
        held = self._parts.node.ledger.of(slot)
        claim = held.claim.name if held is not None and held.claim is not None else ""
        named = (views.Holder(it.namespace, it.pod, it.container, claim=claim) for it in known.holders.get(slot, ()))
        return (*named, *(views.Holder("", "", it, uid, claim) for uid, it in known.unnamed(slot).items()))

    def _wall(self, monotonic: float) -> float:
        return monotonic + self._wall_clock() - self._clock()

    # --- one device ---

    async def explain(self, device: str) -> views.Explanation:
        """All that is known of a device."""
        known = self._knowledge()
        hardware = await find(known, device)
        explained = explain(known, hardware, device) or self._gone(hardware, device)
        seen = _as_seen(explained, self._unseen(explained.backend))
        seen = replace(seen, notes=notes_of(self._parts.node.history, seen), node=self._node)
        seen = replace(seen, fault=last_fault(self._history_of(seen), seen.besides))
        missing = self._parts.node.shortfall.of(seen.backend, seen.key) if not seen.resource else None
        if missing is None:
            return seen
        return replace(seen, reason=missing.reason, message=missing.message, since=self._wall(missing.since))

    def _gone(self, hardware: frozenset[str], name: str) -> views.Explanation:
        """A device that had this hardware, is gone, and that no pod has."""
        shortfall = self._parts.node.shortfall
        went = (it for it in shortfall.missing if it.reason == WENT and not hardware.isdisjoint(it.hardware))
        if (it := next(went, None)) is None:  # an earlier run offered it, and no scan has looked yet
            place = next((it for it in shortfall.former if not hardware.isdisjoint(it.hardware)), None)
            if place is None:
                raise NoSuchDeviceError(f"{name!r} has gone while it was looked for; ask again")
            kind = self._parts.node.inventory.kind(place.resource) or ""
            why = views.Decision(place.resource, False, "offered it, and it has not been seen since the start")
            return views.Explanation(place.key, kind, "", hardware=tuple(sorted(place.hardware)), decisions=(why,))
        message = it.message + self._parts.node.last_word(it.hardware)
        decision = views.Decision(it.resource, False, f"offered it, and {message}")
        return views.Explanation(
            it.device, it.backend, "", hardware=tuple(sorted(it.hardware)), decisions=(decision,),
            reason=it.reason, message=message, since=self._wall(it.since),
        )  # fmt: skip

    def _knowledge(self) -> Knowledge:
        parts, now = self._parts, self._clock()
        return Knowledge(
            parts.node.inventory,
            parts.backends,
            lambda hardware: parts.node.health.signals_of(hardware, now),
            self._problems_of,
            self._wall,
            self._holders,
            parts.adopter.complaints(),
            parts.node.selectable,
            parts.node.shortfall.former,
        )

    def _problems_of(self, kind: str, unit: str) -> Sequence[Problem]:
        return self._parts.node.discoverers[kind].problems.get(unit, ())

    # --- what happened ---

    async def history(self, device: str) -> views.History:
        """How a device was in the last 24 hours, named as to `explain`, or by the key that it had."""
        try:
            return self._history_of(await self.explain(device))
        except NoSuchDeviceError:
            if (gone := history_by_key(self._parts.node.history, device)) is None:
                raise
            return gone

    def _history_of(self, it: views.Explanation) -> views.History:
        former = (place for place in self._parts.node.shortfall.former if not place.hardware.isdisjoint(it.hardware))
        return history_of(self._parts.node.history, it, ((place.resource, place.key) for place in former))

    async def histories(self) -> views.Histories:
        """How all devices were."""
        return await histories(self._parts.node.history)

    async def watch(self, last: int, *, follow: bool) -> AsyncGenerator[views.Event, None]:
        """The newest `last` events kept, then, to follow, every one as it happens."""
        inventory = self._parts.node.inventory
        async for event in self._parts.events.watch(last, follow=follow):
            resources = () if event.name else (event.resource,) if event.resource else inventory.names()
            slots = (inventory.slot(name, it) for it in event.device.split(", ") for name in resources)
            names = (name_of(slot.device.attributes) for slot in slots if slot is not None and slot.device is not None)
            yield replace(event, name=event.name or ", ".join(dict.fromkeys(filter(None, names))))

    # --- what an operator decides ---

    async def drain(self, device: str, reason: str, until: float | None) -> views.Drained:
        """Offer it to no new pod, until then or until it is undrained."""
        hardware = await find(self._knowledge(), device)
        earlier = [
            drain
            for drain in self._parts.node.health.drains_of(hardware)
            if (drain.reason, drain.until) != (reason, until)
        ]
        try:
            await self._parts.node.drain(hardware, reason, until)
        except FairleadError as error:
            raise self._refusal(error) from error
        name = self._name_of(hardware)
        log.info("drained", device=device, called=name, hardware=sorted(hardware), reason=reason)
        replaced = tuple(dict.fromkeys(drain.told() for drain in earlier))
        for sentence in replaced:
            log.warning("drain-replaced", device=device, called=name, reason=sentence)
        ids = {(name, slot.id): slot.id for name, slot in self._slots_on(hardware) if not slot.health.offered}
        held = tuple(self._held_of(hardware, ids))
        said = (it for name in sorted(hardware) for it in self._knowledge().signals_of(name))
        besides = dict.fromkeys(it.reason for it in said if Clears.OPERATOR in it.waits_for and it.source != "operator")
        return views.Drained(
            tuple(ids.values()), tuple(it.id for it in held), self._parts.node.keeper.unkept(), replaced,
            name, tuple(dict.fromkeys(who.name for it in held for who in it.holders)), tuple(besides),
        )  # fmt: skip

    def _held_of(self, hardware: frozenset[str], slots: Container[SlotKey]) -> Iterator[views.Held]:
        """The IDs that pods hold of these slots or of this hardware, which may be gone."""
        inventory = self._parts.node.inventory
        for claim in (claim for name in inventory.names() for claim in inventory.claims(name).values()):
            if claim.slot in slots or not hardware.isdisjoint(claim.hardware):
                yield views.Held(claim.id, self._holders(claim.slot))

    def _name_of(self, hardware: frozenset[str]) -> str:
        """What the driver calls the one device of this hardware."""
        there = (it.device for it in self._parts.node.inventory.on(hardware))
        former = (it.device for it in self._parts.node.shortfall.former if not it.hardware.isdisjoint(hardware))
        return next(filter(None, (name_of(it.attributes) for it in (*there, *former) if it is not None)), "")

    async def undrain(self, device: str) -> views.Undrained:
        """Back into service: ends its drain, its quarantine, and what waits for an operator."""
        hardware = await find(self._knowledge(), device)
        try:
            ended = await self._parts.node.undrain(hardware)
            ended += self._parts.node.believe(hardware)
        except FairleadError as error:
            raise self._refusal(error) from error
        name = self._name_of(hardware)
        log.info("undrained", device=device, called=name, hardware=sorted(hardware), ended=list(ended) or "nothing")
        return views.Undrained(tuple(slot.id for _, slot in self._slots_on(hardware)), ended, name)

    def _refusal(self, error: FairleadError) -> RefusedError:
        waiting = self._parts.serving.waiting_for if isinstance(error, NotYetError) else ""
        return RefusedError(f"{error.sentence}: it is {waiting}" if waiting else error.sentence)

    def _slots_on(self, hardware: Iterable[str]) -> list[tuple[str, Slot]]:
        """The slots that this hardware's health counts for, each with its resource."""
        inventory = self._parts.node.inventory
        return [
            (it.placed.resource, slot)
            for it in inventory.on(hardware, minding=True)
            if it.placed
            for device_id in it.placed.ids
            if (slot := inventory.slot(it.placed.resource, device_id))
        ]

    async def reload(self) -> views.Reloaded:
        """Read the configuration again and apply what changed."""
        return await asyncio.shield(self._parts.reloader.request())

    async def hand_over(self) -> views.HandedOver:
        """Have another process, of what is installed now, serve the node, and end."""
        return await self._parts.shutdown.replace()


_Seen = TypeVar("_Seen", views.Device, views.Explanation)


def _as_seen(view: _Seen, unseen: str) -> _Seen:
    """A view of what a pod holds; while not all hardware was looked at, it is not said to be gone."""
    if not unseen or view.reason not in (HELD_AND_GONE.reason, UNMAPPED.reason):
        return view
    return replace(view, reason=NOT_SEEN, message=f"it has not been seen since the start: {unseen}; a pod holds it")
