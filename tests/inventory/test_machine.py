"""Whatever happens to an inventory, in whatever order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.inventory.ownership import decide
from agent.model import HEALTHY, Health, Held, Slot, State
from backends.base import Device, Resource
from tests.fakes import KIND, Sharing, device, held, reconfigure, resource

A, B = "a.example/one", "b.example/two"
SICK = Health(State.UNHEALTHY, "sick", "It is sick.")
WEAK = Health(State.DEGRADED, "weak", "It is weak.")


MOVED = Health(State.UNHEALTHY, "moved", "It is in a pod's namespace.", while_held=HEALTHY)
MOVED_AND_WEAK = replace(MOVED, while_held=WEAK)

NAMES = (A, B, "c.example/three")
RETIRED = "old.example/four"
HARDWARE = ("h0", "h1", "h2", "h3")
IDS = ("i0", "i1", "i2", "i3")
OTHER_IDS = ("i0::0", "i1::1")

some_devices = st.builds(
    lambda key, taken_by, hardware, exclusive, depends, ids, identity, numa: device(
        key,
        *taken_by,
        hardware=hardware,
        exclusive=hardware & exclusive,
        depends=depends,
        ids=ids,
        identity=identity,
        numa_node=numa,
    ),
    st.sampled_from(["k0", "k1", "k2"]),
    st.lists(st.sampled_from(NAMES), max_size=3, unique=True),
    st.frozensets(st.sampled_from(HARDWARE), min_size=1, max_size=2),
    st.sampled_from([frozenset[str](), frozenset(HARDWARE[:2])]),
    st.frozensets(st.sampled_from(HARDWARE), max_size=1),
    st.lists(st.sampled_from(IDS), min_size=1, max_size=2, unique=True),
    st.sampled_from(["", "serial 1", "serial 2"]),
    st.sampled_from([None, 0, 1]),
)
some_units = st.dictionaries(
    st.sampled_from(["u0", "u1", "u2"]), st.lists(some_devices, max_size=2, unique_by=lambda d: d.key), max_size=2
).map(lambda units: {unit: tuple(replace(d, unit=unit) for d in devices) for unit, devices in units.items()})
some_held = st.builds(
    Held,
    st.sampled_from((*NAMES, RETIRED)),
    st.sampled_from((*IDS, *OTHER_IDS)),
    st.just(KIND),
    st.frozensets(st.sampled_from(HARDWARE), max_size=2),
    st.sampled_from(["", "serial 1", "serial 2"]),
)


some_resources = st.lists(
    st.builds(resource, st.sampled_from(NAMES), st.just(KIND), st.sampled_from([1, 2])), unique_by=lambda r: r.name
)


def has_some_of(claim: Held, found: Device) -> bool:
    """Whether the pod has any of this hardware, as far as one can tell."""
    unknown_or_same = {"", claim.identity, found.identity} <= {"", claim.identity or found.identity}
    return bool(claim.hardware & found.hardware) and unknown_or_same


class AnyOrder(RuleBasedStateMachine):
    """Feeds an inventory, and checks it against what was fed."""

    def __init__(self) -> None:
        super().__init__()
        self.resources = [resource(name) for name in NAMES]
        self.it = Inventory(self.resources, {KIND: Sharing(*self.resources)})
        self.it.ready(KIND)
        self.units: dict[str, tuple[Device, ...]] = {}
        self.claims: dict[tuple[str, str], Held] = {}
        self.health: dict[str, Health] = {}
        self.lists: dict[str, dict[str, Slot]] = {}

    @rule(units=some_units)
    def look(self, units: Mapping[str, tuple[Device, ...]]) -> None:
        self.units |= units
        self.it.update(KIND, units)

    @rule(resources=some_resources, units=some_units)
    def reload(self, resources: list[Resource[Any]], units: Mapping[str, tuple[Device, ...]]) -> None:
        """Perhaps the new instance of the backend finds something else."""
        self.resources = resources
        self.units |= units
        reconfigure(self.it, resources, {KIND: Sharing(*resources)}, {KIND: units})
        self.it.ready(KIND)
        assert set(self.it.names()) >= {r.name for r in resources}

    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        self.reload(data.draw(st.permutations(self.resources)), {})

    @rule(
        changes=st.dictionaries(
            st.sampled_from(HARDWARE), st.sampled_from([HEALTHY, WEAK, SICK, MOVED, MOVED_AND_WEAK])
        )
    )
    def fall_ill(self, changes: Mapping[str, Health]) -> None:
        self.health |= changes
        self.it.set_health(changes)

    @precondition(lambda self: any(slot.device for _, slot in self.slots()))
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        slots = [(name, slot) for name, slot in self.slots() if slot.device]
        if slots:
            name, slot = data.draw(st.sampled_from(slots))
            given = held(name, slot.id, slot.device)
            self.remember([given])
            if slot.health.reason != "replaced":  # else the kubelet does not ask for it
                assert held(name, slot.id, self.it.slots(name)[slot.id].device) == given, "what is given stays there"

    @rule(claims=st.lists(some_held, min_size=1, max_size=3))
    def remember(self, claims: Sequence[Held]) -> None:
        self.claims |= {claim.slot: claim for claim in claims}
        self.it.claim(claims)

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        ended = data.draw(st.lists(st.sampled_from(list(self.claims.values())), min_size=1, unique=True))
        for claim in ended:
            del self.claims[claim.slot]
        self.it.unclaim(ended)

    @rule()
    def take(self) -> None:
        for snapshot in self.it.take():
            before = self.lists.get(snapshot.resource, {})
            changed = before.keys() | snapshot.slots.keys() if snapshot.changed is None else snapshot.changed
            after = {i: slot for i, slot in before.items() if i not in changed}
            after |= {i: snapshot.slots[i] for i in changed if i in snapshot.slots}
            assert after == snapshot.slots, "applying what changed gives the new list"
            self.lists[snapshot.resource] = dict(snapshot.slots)
        configured = {r.name for r in self.resources}
        assert {name for name, slots in self.lists.items() if not slots} >= configured - {n for n, _ in self.slots()}
        listed = {name: slots for name, slots in self.lists.items() if slots}
        assert listed == {name: dict(self.it.slots(name)) for name in self.it.names() if self.it.slots(name)}

    def slots(self) -> list[tuple[str, Slot]]:
        return [(name, slot) for name in self.it.names() for slot in self.it.slots(name).values()]

    @invariant()
    def every_claimed_id_is_listed(self) -> None:
        assert self.claims.keys() <= {(name, slot.id) for name, slot in self.slots()}

    @invariant()
    def without_a_device_there_is_a_claim_and_the_slot_is_unhealthy(self) -> None:
        for name, slot in self.slots():
            if slot.device is None:
                claim = self.claims[name, slot.id]
                configured = any(name == r.name for r in self.resources)
                taken = {id(found) for resource in self.it.names() for found in self.devices(resource)}
                every = (found for found in self.it.devices("fake") if id(found) not in taken)
                left = {h for found in every if has_some_of(claim, found) for h in found.hardware}
                lost = "unmapped" if not claim.hardware else "unusable" if claim.hardware <= left else "gone"
                assert slot.health.reason == (lost if configured else "retired")
                there = {h for found in self.devices(name) if has_some_of(claim, found) for h in found.hardware}
                assert not claim.hardware or not claim.hardware <= there

    @invariant()
    def a_retired_resource_is_all_unhealthy_and_listed_while_it_is_held(self) -> None:
        configured = {r.name for r in self.resources}
        assert {slot.health.offered for name, slot in self.slots() if name not in configured} <= {False}
        assert {name for name, _ in self.claims} <= set(self.it.names())

    @invariant()
    def hardware_is_in_one_resource_at_most(self) -> None:
        where: dict[str, set[str]] = {}
        for name, slot in self.slots():
            for hardware in slot.device.hardware if slot.device else ():
                where.setdefault(hardware, set()).add(name)
        assert all(len(names) == 1 for names in where.values())

    @invariant()
    def what_a_pod_holds_is_offered_by_no_other_resource(self) -> None:
        holders: dict[str, set[str]] = {}
        for claim in self.claims.values():
            for hardware in claim.hardware:
                holders.setdefault(hardware, set()).add(claim.resource)
        for name, slot in self.slots():
            for hardware in slot.device.hardware if slot.device else ():
                assert name in holders.get(hardware, {name})

    @invariant()
    def health_is_the_devices_unless_it_is_not_what_the_pod_was_given(self) -> None:
        for name, slot in self.slots():
            if slot.device is None:
                continue
            if (name, slot.id) not in self.own_ids():
                self.health_is_that_of_what_the_pod_holds(self.claims[name, slot.id], slot)
                continue
            claim = self.claims.get((name, slot.id), Held(name, slot.id, KIND))
            identities = {claim.identity, slot.device.identity}
            another_card = len(identities) == 2 and "" not in identities
            if another_card or (claim.hardware and claim.hardware.isdisjoint(slot.device.hardware)):
                assert slot.health.reason == "replaced"
            elif (name, slot.id) in self.kept_back():
                assert slot.health.reason == "held"
            else:
                assert slot.health.reason != "held"
                assert slot.health.state is self.worst([slot.device])

    def health_is_that_of_what_the_pod_holds(self, claim: Held, slot: Slot) -> None:
        """Of a slot under an ID that no device has."""
        homes = [found for found in self.devices(claim.resource) if has_some_of(claim, found)]
        assert slot.device in homes
        if any(self.is_crowded(claim.resource, found) for found in homes):
            assert slot.health.reason == "held"
        else:
            assert slot.health.reason != "held"
            assert slot.health.state is self.worst(homes)

    def worst(self, devices: Sequence[Device]) -> State:
        taken = {h for claim in self.claims.values() for h in claim.hardware}
        known = {h: self.health.get(h, HEALTHY) for found in devices for h in found.hardware | found.depends}
        said = {(health.to_holder if h in taken else health).state for h, health in known.items()}
        return next(s for s in (State.UNHEALTHY, State.DEGRADED, State.HEALTHY) if s in said)

    def devices(self, name: str) -> list[Device]:
        """Those that a resource offers."""
        return list({id(slot.device): slot.device for slot in self.it.slots(name).values() if slot.device}.values())

    def own_ids(self) -> set[tuple[str, str]]:
        return {(name, i) for name in self.it.names() for found in self.devices(name) for i in self.ids(name, found)}

    def kept_back(self) -> set[tuple[str, str]]:
        """The IDs that are not to be had as long as pods have the hardware under other IDs: the last free ones, or all."""
        back: set[tuple[str, str]] = set()
        for name in self.it.names():
            for found in self.devices(name):
                ids, free, former = self.shares(name, found)
                back.update((name, i) for i in (ids if len(former) > len(free) else free[len(free) - len(former) :]))
        return back

    def shares(self, name: str, found: Device) -> tuple[Sequence[str], list[str], list[Held]]:
        """A device's IDs, the free ones of them, and the claims that have some of it under other IDs."""
        ids = self.ids(name, found)
        others = [claim for claim in self.claims.values() if claim.slot not in {(name, i) for i in ids}]
        former = [
            claim
            for claim in others
            if claim.hardware & found.exclusive
            or (has_some_of(claim, found) and (claim.resource != name or self.is_astray(claim)))
        ]
        return ids, [i for i in ids if (name, i) not in self.claims], former

    def is_crowded(self, name: str, found: Device) -> bool:
        _, free, former = self.shares(name, found)
        return len(former) > len(free)

    def is_astray(self, claim: Held) -> bool:
        """Whether what the pod was given is not behind its ID any more."""
        slot = self.it.slots(claim.resource)[claim.id]
        return claim.slot not in self.own_ids() or slot.health.reason == "replaced"

    def ids(self, name: str, found: Device) -> Sequence[str]:
        (configured,) = [r for r in self.resources if r.name == name]
        return Sharing().ids(configured, found)

    @invariant()
    def no_more_pods_than_it_has_ids_can_get_a_device(self) -> None:
        """Counting those that have some of it under an ID that it does not have; any pod may end before we know of it."""
        for name in self.it.names():
            for found in self.devices(name):
                ids, _, former = self.shares(name, found)
                others = {claim.id if claim.resource == name else f"{claim.resource}/{claim.id}" for claim in former}
                slots = self.it.slots(name)
                given = {i for i in ids if slots[i].health.offered}
                given |= {
                    i
                    for i in others & slots.keys()
                    if slots[i].health.offered and i not in self.ids_of_others(name, found)
                }
                assert not others or len(given) <= len(ids)
                if given:  # whoever it is whose ID the next pod gets
                    held = others | {
                        i for i in ids if (name, i) in self.claims and slots[i].health.reason != "replaced"
                    }
                    assert len(held | given) <= len(ids)

    def ids_of_others(self, name: str, found: Device) -> set[str]:
        return {i for other in self.devices(name) if other is not found for i in self.ids(name, other)}

    @invariant()
    def every_device_is_placed_whole_or_left_out_with_a_reason(self) -> None:
        left_out = [lost.device for lost in self.it.unclaimed()]
        assert all(lost.why for lost in self.it.unclaimed())
        listed = [(name, slot) for name, slot in self.slots() if slot.device]
        for found in (found for devices in self.units.values() for found in devices):
            places = {(name, slot.id) for name, slot in listed if slot.device == found} & self.own_ids()
            names = {name for name, _ in places}
            assert len(names) == (found not in left_out)
            assert places == {(name, i) for name in names for i in self.ids(name, found)}

    @invariant()
    def what_was_kept_is_what_would_be_decided_of_everything_at_once(self) -> None:
        it = self.it
        found = [one for units in it._units.values() for of_unit in units.values() for one in of_unit]
        decision = decide(it.selection, found, it._health, it._held, it._foreign)
        listed = {name: slots for name, slots in decision.lists.items() if slots}
        assert listed == {name: dict(it.slots(name)) for name in it.names() if it.slots(name)}
        assert [(decision.placed.get(one), decision.rejected.get(one, ())) for one in found] == [
            (one.placed, one.lost) for one in found
        ]
        assert [decision.barred.get(one) for one in found] == [one.barred for one in found]

    @invariant()
    def the_order_in_which_all_this_came_does_not_matter(self) -> None:
        fresh = Inventory(self.resources, {KIND: Sharing(*self.resources)})
        fresh.set_health(self.health)
        fresh.claim(reversed(list(self.claims.values())))
        for unit, devices in sorted(self.units.items(), reverse=True):
            fresh.update(KIND, {unit: devices})
        ours = {name: self.it.slots(name) for name in self.it.names() if self.it.slots(name)}
        assert ours == {name: fresh.slots(name) for name in fresh.names() if fresh.slots(name)}
        assert [lost.device for lost in self.it.unclaimed()] == [lost.device for lost in fresh.unclaimed()]


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=15, deadline=None, report_multiple_bugs=False
)
test_whatever_happens_in_whatever_order = AnyOrder.TestCase
