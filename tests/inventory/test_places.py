"""Sticks are pulled, swapped, sent firmware and renamed in any order: no hardware is in two pods, no pod's ID on another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.model import Held, SlotKey
from backends.base import Device
from tests.fakes import KIND, Fake, device, held, inventory, resource

NODES, STICKS = "a.example/node", "b.example/stick"
SOCKETS = ("1", "2", "3")


def test_another_card_in_the_slot_of_one_that_a_pod_holds_waits_for_the_pod() -> None:
    """Their IDs are UUIDs, so that the new one has another."""
    slot = ["pci:0000:3b:00.0"]
    old, new = (device(uuid, STICKS, hardware=slot, identity=uuid, unit=slot[0]) for uuid in ("GPU-1", "GPU-2"))
    it = inventory(resource(STICKS), devices=[old])
    it.claim([held(STICKS, "GPU-1", old)])
    it.update(KIND, {slot[0]: [new]})
    assert {device_id: reason for device_id, (_, reason, _) in shown(it, STICKS).items()} == {
        "GPU-1": "gone",
        "GPU-2": "held",
    }
    it.unclaim([held(STICKS, "GPU-1", old)])
    assert {device_id: reason for device_id, (_, reason, _) in shown(it, STICKS).items()} == {"GPU-2": ""}


def test_what_a_pod_has_is_gone_only_if_it_is_not_there() -> None:
    """It may be another stick's fault that none is of use, or its resource takes it no more: its state, or the configuration."""
    mine, other = (
        replace(device(name, STICKS, hardware=["usb:1"], identity=name, unit="1"), place=frozenset({"1"}))
        for name in "ab"
    )
    it = inventory(resource(STICKS), devices=[mine])
    it.claim([held(STICKS, "a", mine)])
    it.update(KIND, {"1": [replace(other, unusable="its node does not exist")]})
    assert shown(it, STICKS)["a"][1] == "gone"
    it.update(KIND, {"1": [replace(mine, unusable="its node does not exist")]})
    assert shown(it, STICKS)["a"][1:] == ("unusable", "its node does not exist; a pod still holds it")
    it.update(KIND, {"1": [replace(mine, attributes={"taken_by": (), "ids": ("a",)})]})
    assert shown(it, STICKS)["a"][1:] == ("unusable", f"{STICKS} does not take it any more; a pod still holds it")
    it.update(KIND, {"1": []})
    assert shown(it, STICKS)["a"][1] == "gone"


def test_pods_that_were_given_one_number_at_two_places_are_judged_each_by_its_own() -> None:
    """The kernel gave the number of a stick that was pulled to one of the same model elsewhere; then the IDs are others."""
    own = frozenset({"node:c:188:0"})
    first, second, renamed = (
        replace(device(name, NODES, hardware=own, exclusive=own, identity="0403:6001: 1.0"), place=frozenset({place}))
        for name, place in (("one", "usb:1"), ("two", "usb:2"), ("three", "usb:2"))
    )
    it = inventory(resource(NODES), devices=[renamed])
    it.claim([held(NODES, "one", first), held(NODES, "two", second)])
    assert {name: reason for name, (_, reason, _) in shown(it, NODES).items()} == {
        "one": "gone",
        "two": "held",
        "three": "held",
    }


@dataclass(frozen=True)
class Stick:
    """What is plugged in."""

    ids: str
    number: int
    """On its bus; another each time."""
    names: tuple[int, ...]
    """Of its nodes, one for each of its parts."""


some_sticks = st.builds(
    Stick,
    st.sampled_from(["0403:6001:A", "0403:6001:0001", "1a86:7523:"]),
    st.integers(0, 9),
    st.lists(st.integers(0, 3), max_size=2, unique=True).map(tuple),
)


def devices_of(socket: str, stick: Stick) -> Iterator[Device]:
    """The stick as a whole, and each of its nodes."""
    place = frozenset({f"usb:{socket}"})
    own = frozenset({f"node:{100 + stick.number}"})
    whole = device(f"stick {socket}", STICKS, hardware=own | {f"usb:1-{socket}"}, exclusive=own, identity=stick.ids)
    yield replace(
        whole, place=place, attributes={**whole.attributes, "ids": (stick.ids if stick.ids[-1] != ":" else socket,)}
    )
    for part, name in enumerate(stick.names):
        key, own = f"tty{name}", frozenset({f"node:{name}"})
        node = device(key, NODES, hardware=own, exclusive=own, identity=f"{stick.ids} {part}", unit=f"{socket} {key}")
        yield replace(node, place=place)


class Plugging(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.it = self.fresh()
        self.sockets: dict[str, Stick] = {}
        self.units: dict[str, tuple[Device, ...]] = {}
        self.claims: dict[SlotKey, Held] = {}

    def fresh(self) -> Inventory:
        resources = [resource(NODES), resource(STICKS)]
        made = Inventory(resources, {KIND: Fake(*resources)})
        made.ready(KIND)
        return made

    def look(self) -> None:
        there = [it for socket, stick in self.sockets.items() for it in devices_of(socket, stick)]
        now: dict[str, tuple[Device, ...]] = {it.unit: (it,) for it in there}
        self.it.update(KIND, {unit: now.get(unit, ()) for unit in self.units.keys() | now.keys()})
        self.units = now

    @rule(socket=st.sampled_from(SOCKETS), stick=some_sticks)
    def plug_in(self, socket: str, stick: Stick) -> None:
        """Into a socket that may have been another's; the kernel gives a free number and the lowest free names."""
        self.sockets.pop(socket, None)
        taken = {name for other in self.sockets.values() for name in other.names}
        numbers = {other.number for other in self.sockets.values()}
        names = [name for name in range(8) if name not in taken][: len(stick.names)]
        number = next(it for it in range(stick.number, 20) if it not in numbers)
        self.sockets[socket] = Stick(stick.ids, number, tuple(names))
        self.look()

    @rule(socket=st.sampled_from(SOCKETS))
    def pull(self, socket: str) -> None:
        self.sockets.pop(socket, None)
        self.look()

    @rule(one=st.sampled_from(SOCKETS), other=st.sampled_from(SOCKETS))
    def swap(self, one: str, other: str) -> None:
        there = {new: self.sockets[old] for new, old in ((one, other), (other, one)) if old in self.sockets}
        self.sockets = {at: it for at, it in self.sockets.items() if at not in (one, other)} | there
        self.look()

    @rule(names=st.permutations(range(8)))
    def boot(self, names: list[int]) -> None:
        """The nodes have other names, and claims are from before."""
        self.sockets = {
            at: Stick(it.ids, it.number, tuple(names[name] for name in it.names)) for at, it in self.sockets.items()
        }
        self.claims = {slot: replace(claim, rebooted=True) for slot, claim in self.claims.items()}
        self.it.claim(self.claims.values())
        self.look()

    @rule()
    def restart(self) -> None:
        """Another process of ours is told all of it, in another order."""
        self.it = self.again()

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        slots = [
            ((name, slot.id), slot.device)
            for name in (NODES, STICKS)
            for slot in self.it.slots(name).values()
            if slot.health.offered and (name, slot.id) not in self.claims
        ]
        if not slots:
            return
        slot, found = data.draw(st.sampled_from(slots))
        assert found is not None
        for claim in self.claims.values():
            assert claim.hardware.isdisjoint(found.hardware)
            if claim.place == found.place:  # then both are nodes of one stick, and the other pod's is still there
                assert (claim.resource, slot[0]) == (NODES, NODES)
                assert claim.identity != found.identity
                assert self.is_there(claim)
        self.claims[slot] = held(*slot, found)
        self.it.claim([self.claims[slot]])

    def is_there(self, claim: Held) -> bool:
        return any(
            (it.hardware, it.identity, it.place) == (claim.hardware, claim.identity, claim.place)
            for of_unit in self.units.values()
            for it in of_unit
        )

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.claims)))
        self.it.unclaim([self.claims.pop(slot)])

    @invariant()
    def a_pods_id_is_healthy_on_what_the_pod_was_given_alone(self) -> None:
        for (name, device_id), claim in self.claims.items():
            slot = self.it.slots(name)[device_id]
            if slot.health.offered:
                assert slot.device is not None
                assert (slot.device.identity, slot.device.place) == (claim.identity, claim.place)
                assert not is_renumbered(claim, slot.device)
            elif (found := self.it.device(claim.slot)) is not None:
                others = (it.hardware for it in self.claims.values() if it is not claim)
                assert (
                    (found.identity, found.place) != (claim.identity, claim.place)
                    or is_renumbered(claim, found)
                    or not found.hardware.isdisjoint(frozenset[str]().union(*others))
                )

    @invariant()
    def what_no_pod_has_is_offered(self) -> None:
        held_places = frozenset[str]().union(*(claim.place for claim in self.claims.values()))
        held_hardware = frozenset[str]().union(*(claim.hardware for claim in self.claims.values()))
        for name in (NODES, STICKS):
            for slot in self.it.slots(name).values():
                if slot.device and (name, slot.id) not in self.claims and held_places.isdisjoint(slot.device.place):
                    assert slot.health.offered or not held_hardware.isdisjoint(slot.device.hardware)

    @invariant()
    def the_order_in_which_all_this_came_does_not_matter(self) -> None:
        fresh = self.again()
        for name in (NODES, STICKS):
            assert shown(self.it, name) == shown(fresh, name)

    def again(self) -> Inventory:
        fresh = self.fresh()
        fresh.claim(reversed(list(self.claims.values())))
        for unit, found in sorted(self.units.items(), reverse=True):
            fresh.update(KIND, {unit: found})
        return fresh


def is_renumbered(claim: Held, found: Device) -> bool:
    """Whether the pod's stick was plugged in again, so that its node is not what the pod was given."""
    return claim.resource == STICKS and not claim.rebooted and claim.hardware != found.hardware


def shown(it: Inventory, name: str) -> dict[str, tuple[str | None, str, str]]:
    return {
        slot.id: (slot.device.unit if slot.device else None, slot.health.reason, slot.health.message)
        for slot in it.slots(name).values()
    }


TestPlugging = Plugging.TestCase
TestPlugging.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
