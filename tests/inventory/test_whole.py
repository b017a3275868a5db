"""Whatever happens to the hardware, to pods and to us, in whatever order: what the kubelet is told is right, and pods
keep what they hold.

One machine drives all of the device side as the supervisor does: a pretended kind of hardware is walked over, health and
claims are kept in a state file, the lists go out as bytes. Only threads, sockets and clocks are left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs
from msgspec.structs import replace

from agent.claims.ledger import Ledger
from agent.daemon.state_file import StateFile, StateKeeper
from agent.discovery.reading import NOTHING, UnitState, changes_of, probe, read
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.hardware.releases import Releaser
from agent.health import HealthBook
from agent.history.recorder import Recorder
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Shortfall
from agent.kubelet.api.v1beta1 import ListAndWatchResponse
from agent.kubelet.plugin import EncodedList
from agent.model import Held, Slot
from agent.runtime.pacing import Clock
from backends.base import (
    Backend,
    Clears,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    Record,
    Resource,
    ResourceSpec,
    Signal,
    Verdict,
)
from tests.fakes import FakeOptions

KIND: Final = "cards"
PLACES: Final = ("01", "02", "03")
PARTS: Final = ("p0", "p1")
FOREVER: Final = 1e6  # seconds: longer than any delay or quarantine
WALL: Final = 1e9


def takes(name: str, *models: str, replicas: int = 1) -> Resource[FakeOptions]:
    select = tuple({"model": (model,)} for model in models)
    return Resource(name, ResourceSpec(KIND, FakeOptions(), select=select, replicas=replicas))


RED, ANY, SHARED = takes("r/red", "red"), takes("r/any"), takes("r/shared", "red", "blue", replicas=2)
CONFIGURATIONS: Final = ((RED, ANY), (ANY, RED), (SHARED, ANY), (RED,), ())


models = st.sampled_from(["red", "red", "blue", "split"])


@dataclass
class Card:
    """What is in one place."""

    model: str
    """`split`: it is offered as its parts."""
    serial: int
    binding: int | None = 0
    """None: it has no driver."""
    fault: Verdict | None = None
    latched: bool = False


class Cards(Backend[FakeOptions]):
    """Shows the cards there are."""

    options_type: ClassVar = FakeOptions

    def __init__(self, resources: Sequence[Resource[Any]], places: dict[str, Card]) -> None:
        super().__init__(Host(), resources)
        self.places = places

    def units(self) -> Iterable[str]:
        return list(self.places)

    def discover(self, unit: str) -> Discovery:
        return Discovery(tuple(self._devices(unit)))

    def _devices(self, place: str) -> Iterator[Device]:
        if (card := self.places.get(place)) is None:
            return
        name = f"pci:{place}"
        whole = Device(
            key=place,
            unit=place,
            hardware=frozenset({name}),
            identity=f"serial {card.serial}",
            bindings={} if card.binding is None else {name: f"driver {card.binding}"},
            attributes={"model": (card.model,)},
        )
        if card.model == "split":
            yield replace(whole, unusable="it is split")
        elif card.binding is None:
            yield replace(whole, unusable="it has no driver")
        else:
            yield whole
        if card.model == "split" and card.binding is not None:
            for part in PARTS:
                key = f"{place}/{part}"
                own = f"part:{key}"
                bindings = {own: whole.bindings[name]}
                yield replace(whole, key=key, hardware=frozenset({own}), bindings=bindings, depends=whole.hardware)

    def probe(self, device: Device) -> Iterable[Signal]:
        card = self.places.get(device.unit)
        if card is not None and card.fault is not None and device.key == device.unit:
            words = f"{device.key} is {card.fault.value}"
            yield Signal(f"pci:{device.key}", "fault", card.fault, words, after=5.0, recover_after=3.0)

    def signals(self, record: Record) -> Iterable[Signal]:
        ends = frozenset({Clears.REBIND, Clears.OPERATOR})
        yield Signal(f"pci:{record.text}", "logged", Verdict.NOW, "the kernel said so", clears_on=ends)

    def edits(self, resource: Resource[FakeOptions], grants: Sequence[Grant]) -> ContainerEdits:
        return ContainerEdits()


class AtOnce(StateFile):
    """Writes without a thread."""

    async def write(self, *, patience: float | None = None, **parts: Any) -> bool:  # type: ignore[override]
        found = {name: tuple(part) if isinstance(part, list) else part for name, part in parts.items()}
        self._content = structs.replace(self._content, **found)
        self._save(self._content)
        return True


def at_once(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run what has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise AssertionError("it waits for something")


class Run:
    """One run of the agent."""

    def __init__(
        self, directory: Path, places: dict[str, Card], configuration: Sequence[Resource[Any]], clock: Any
    ) -> None:
        self.backend = Cards(configuration, places)
        backends = {KIND: self.backend}
        self.inventory = Inventory(configuration, backends)
        self.health, self.ledger, self.clock = HealthBook("boot"), Ledger(), clock
        self.units: dict[str, UnitState] = {}
        releaser = Releaser(Host(), backends, self.ledger, Reconciler(HardwareQueue()))
        shortfall = Shortfall(self.inventory)
        self.keeper = StateKeeper(
            AtOnce(directory),
            self.ledger,
            releaser,
            self.inventory,
            self.health,
            shortfall,
            Recorder(self.inventory, lambda _name: None, lambda _slot: (), shortfall),
            clock=Clock(clock, lambda: clock() + WALL),
        )
        self.lists: dict[str, EncodedList] = {}
        self.streams: dict[str, dict[str, str]] = {}
        at_once(self.keeper.restore())
        self.look(None)
        self.inventory.ready(KIND)
        at_once(self.keeper.begin())
        self.flush()

    def look(self, units: set[str] | None) -> None:
        """As a discoverer does."""
        listed = set(self.backend.units())
        after = {it: read(self.backend, it, self.units.get(it, NOTHING)) for it in units or listed}
        after |= dict.fromkeys(self.units.keys() - listed if units is None else (), NOTHING)
        news = changes_of(KIND, self.units, after)
        self.units = {unit: now for unit, now in (self.units | after).items() if now is not NOTHING}
        self.inventory.update(news.backend, news.units, news.links)
        self.inventory.set_health(self.health.found(news.backend, news.units, self.clock()))
        self.inventory.set_health(self.health.probed(news.backend, news.signals, self.clock()))

    def probe(self) -> None:
        after = {unit: probe(self.backend, it, at_a_glance=False) for unit, it in self.units.items()}
        signals = {unit: it.signals for unit, it in after.items() if it.signals is not self.units[unit].signals}
        self.inventory.set_health(self.health.probed(KIND, signals, self.clock()))
        self.units = after

    def flush(self) -> None:
        """Send the lists that changed, and keep what must be kept."""
        at_once(self.keeper.write_health())
        for snapshot in self.inventory.take():
            encoded = self.lists.setdefault(snapshot.resource, EncodedList())
            encoded.apply(snapshot)
            sent = ListAndWatchResponse().parse(bytes(encoded.message()))
            self.streams[snapshot.resource] = {device.id: device.health for device in sent.devices}
            assert len(self.streams[snapshot.resource]) == len(sent.devices), "no ID is listed twice"
        for name in self.streams.keys() - set(self.inventory.names()):
            del self.streams[name], self.lists[name]

    def slots(self) -> Iterator[tuple[str, Slot]]:
        for name in self.inventory.names():
            for slot in self.inventory.slots(name).values():
                yield name, slot


class Whole(RuleBasedStateMachine):
    """The world, and what is told of it."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.now = 100.0
        self.numbers = iter(range(1, 1_000_000))
        self.places: dict[str, Card] = {}
        self.pods: dict[tuple[str, str], Held] = {}
        self.drained: set[str] = set()
        self.configuration: Sequence[Resource[Any]] = ()

    @initialize(
        configuration=st.sampled_from(CONFIGURATIONS), models=st.lists(models, max_size=len(PLACES)), held=st.booleans()
    )
    def it_begins(self, configuration: Sequence[Resource[Any]], models: Sequence[str], held: bool) -> None:
        self.configuration = configuration
        for place, model in zip(PLACES, models, strict=False):
            self.places[place] = Card(model, serial := next(self.numbers), serial)
        self.start()
        while held and (offered := self.offered()):
            self.give(*offered[0])

    def teardown(self) -> None:
        self.directory.cleanup()

    def start(self) -> None:
        self.run = Run(Path(self.directory.name), self.places, self.configuration, lambda: self.now)

    def told(self, place: str) -> None:
        """The kernel sent an event about it."""
        self.run.look({place} if place in self.places or place in self.run.units else None)
        self.run.flush()

    # --- hardware ---

    @rule(place=st.sampled_from(PLACES), model=models, late=st.booleans())
    def a_card_appears_or_another_takes_its_place(self, place: str, model: str, late: bool) -> None:
        serial = next(self.numbers)
        self.places[place] = Card(model, serial, None if late else serial)
        self.told(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), heard=st.booleans())
    def a_card_vanishes(self, data: st.DataObject, heard: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.places)))
        del self.places[place]
        if heard:
            self.told(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), bound=st.booleans())
    def its_driver_comes_or_goes(self, data: st.DataObject, bound: bool) -> None:
        place = data.draw(st.sampled_from(sorted(self.places)))
        card = self.places[place]
        card.binding, card.latched = (next(self.numbers) if bound else None), False
        self.told(place)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), fault=st.sampled_from([None, Verdict.NOW, Verdict.DELAYED, Verdict.DEGRADED]))
    def it_fails_or_recovers(self, data: st.DataObject, fault: Verdict | None) -> None:
        self.places[data.draw(st.sampled_from(sorted(self.places)))].fault = fault

    @precondition(lambda self: any(card.binding is not None for card in self.places.values()))
    @rule(data=st.data())
    def the_kernel_logs_an_error(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(p for p, card in self.places.items() if card.binding is not None)))
        self.places[place].latched = True
        record = Record("kmsg", "boot", next(self.numbers), self.now, place)
        self.told(place)
        said = list(self.run.backend.signals(record))
        self.run.inventory.set_health(self.run.health.recorded(said, record, self.now))
        self.run.flush()

    # --- people and time ---

    @rule(place=st.sampled_from(PLACES))
    def an_operator_drains(self, place: str) -> None:
        self.drained.add(place)
        self.run.inventory.set_health(self.run.keeper.drain([f"pci:{place}"], "why", None))
        self.run.flush()

    @rule(place=st.sampled_from(PLACES))
    def an_operator_undrains(self, place: str) -> None:
        self.drained.discard(place)
        if place in self.places:
            self.places[place].latched = False
        self.run.inventory.set_health(self.run.keeper.undrain([f"pci:{place}"])[0])
        self.run.flush()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 60.0, 5000.0]), everything=st.booleans())
    def time_passes(self, seconds: float, everything: bool) -> None:
        self.let_pass(seconds)
        if everything:
            self.run.look(None)
        else:
            self.run.probe()
        self.run.flush()
        for slot, card in self.known():
            assert not (slot.health.offered and card.fault is Verdict.NOW), "whether looked at or only probed"

    def known(self) -> Iterator[tuple[Slot, Card]]:
        """The slots whose device is what was seen there last."""
        for _, slot in self.run.slots():
            card = self.places.get(slot.device.unit) if slot.device else None
            if slot.device and card and slot.device.identity == f"serial {card.serial}":
                yield slot, card

    def let_pass(self, seconds: float) -> None:
        end, health = self.now + seconds, self.run.health
        while (due := health.next_deadline()) is not None and due <= end:
            self.now = due
            self.run.inventory.set_health(health.ripen(self.now, self.now + WALL))
        self.now = end
        self.run.inventory.set_health(health.ripen(self.now, self.now + WALL))

    # --- pods ---

    def offered(self) -> list[tuple[str, str]]:
        return sorted(
            (name, device_id)
            for name, listed in self.run.streams.items()
            for device_id, health in listed.items()
            if health == "Healthy" and (name, device_id) not in self.pods
        )

    @precondition(lambda self: self.offered())
    @rule(data=st.data())
    def a_pod_gets_a_device(self, data: st.DataObject) -> None:
        self.give(*data.draw(st.sampled_from(self.offered())))

    def give(self, name: str, device_id: str) -> None:
        slot = self.run.inventory.slot(name, device_id)
        assert slot is not None, "the list is what is there"
        assert slot.device is not None
        given = Held.of(name, device_id, KIND, slot.device)
        for held in self.pods.values():
            if not held.hardware.isdisjoint(given.hardware):
                assert held.resource == name, "no other resource gives what a pod holds"
                assert self.run.inventory.resource(name).spec.replicas > 1, "nor is it given twice"  # type: ignore[union-attr]
        self.pods[name, device_id] = given
        self.run.ledger.allocate([given], self.now)
        self.run.inventory.claim([given])
        at_once(self.run.keeper.write_claims())
        self.run.flush()

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), noticed=st.booleans())
    def a_pod_ends(self, data: st.DataObject, noticed: bool) -> None:
        del self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
        if noticed:
            self.witnesses_are_asked()

    @rule()
    def witnesses_are_asked(self) -> None:
        ledger, version = self.run.ledger, (next(self.numbers),)
        self.let_pass(60.0)
        ledger.listed(self.pods.keys(), self.now, self.now, version)
        ended = ledger.checkpoint(self.pods.keys(), (next(self.numbers),))
        self.run.inventory.unclaim(ended)
        at_once(self.run.keeper.write_claims())
        self.run.flush()

    # --- we ---

    @rule(configuration=st.sampled_from(CONFIGURATIONS))
    def we_are_started_again_with_another_configuration(self, configuration: Sequence[Resource[Any]]) -> None:
        self.configuration = configuration
        self.start()

    @rule()
    def we_are_killed_and_start_again(self) -> None:
        before = {name: set(listed) for name, listed in self.run.streams.items()}
        self.run.look(None)  # what nobody told us of is seen by the next run at once
        self.run.flush()
        before = {name: set(listed) for name, listed in self.run.streams.items()}
        self.start()
        assert {name: set(listed) for name, listed in self.run.streams.items()} == before, "a restart changes no list"

    # --- what holds at all times ---

    @invariant()
    def the_kubelet_was_told_what_is_there(self) -> None:
        there: dict[str, dict[str, str]] = {name: {} for name in self.run.inventory.names()}
        for name, slot in self.run.slots():
            there[name][slot.id] = "Healthy" if slot.health.offered else "Unhealthy"
        assert self.run.streams == there

    @invariant()
    def what_is_listed_was_seen_last(self) -> None:
        for _, slot in self.run.slots():
            assert slot.device is None or slot.device in self.run.units[slot.device.unit].devices

    @invariant()
    def no_id_that_a_pod_holds_is_missing(self) -> None:
        assert self.pods.keys() <= {(name, i) for name, listed in self.run.streams.items() for i in listed}
        assert self.pods.keys() <= {held.slot for held in self.run.ledger.held()}

    @invariant()
    def hardware_is_in_one_resource(self) -> None:
        where: dict[str, str] = {}
        for name, slot in self.run.slots():
            for hardware in slot.device.hardware if slot.device else ():
                assert where.setdefault(hardware, name) == name

    @invariant()
    def what_a_pod_holds_is_its_own_or_said_to_be_bad(self) -> None:
        for held in self.pods.values():
            slot = self.run.inventory.slot(*held.slot)
            assert slot is not None
            mine = slot.device is not None and (slot.device.hardware, slot.device.identity) == (
                held.hardware,
                held.identity,
            )
            assert mine or not slot.health.offered
            for name, other in self.run.slots():
                if other.device is not None and not other.device.hardware.isdisjoint(held.hardware):
                    assert name == held.resource

    @invariant()
    def what_was_written_down_is_what_we_know(self) -> None:
        kept = StateFile(Path(self.directory.name)).read()
        assert set(kept.claims or ()) == set(self.run.ledger.held())
        assert {drain.hardware for drain in (kept.health.drains if kept.health else ())} == {
            f"pci:{place}" for place in self.drained
        }

    @rule()
    def once_all_is_quiet_the_list_is_the_truth(self) -> None:
        self.run.look(None)
        self.let_pass(FOREVER)
        self.run.flush()
        for name, slot in self.run.slots():
            if slot.device is None:
                assert (name, slot.id) in {held.slot for held in self.run.ledger.held()}
                continue
            card = self.places[slot.device.unit]
            well = card.fault in (None, Verdict.DEGRADED) and not card.latched and slot.device.unit not in self.drained
            assert slot.health.offered == well or slot.health.reason == "replaced"
        shown = {slot.device.unit for _, slot in self.run.slots() if slot.device}
        for lost in self.run.inventory.unclaimed():
            assert lost.why
            shown.add(lost.device.unit)
        assert shown == self.places.keys(), "nothing is forgotten"


Whole.TestCase.settings = settings(max_examples=75, stateful_step_count=25, deadline=None, report_multiple_bugs=False)
test_whatever_happens = Whole.TestCase
