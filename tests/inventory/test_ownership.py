"""What an inventory has kept, change by change, is what one decision about everything it knows would be."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.inventory.inventory import Inventory
from agent.inventory.ownership import decide
from agent.model import FORGOTTEN, HEALTHY, Health, Held, State
from backends.base import HostPath, Node, Resource
from tests.fakes import KIND, Sharing, by_unit, device, reconfigure, resource

NAMES = ("a.example/one", "b.example/two")
HARDWARE = ("pci:1", "usb:1", "usb:2", "node:1", "node:2")
PLACES = ("port 1", "port 2")
SICK = Health(State.UNHEALTHY, "sick", "It is sick.", 1.0)
MOVED = Health(State.UNHEALTHY, "moved", "It is in a pod's namespace.", 1.0, while_held=HEALTHY)


def _resource(name: str, *, is_strict: bool, replicas: int) -> Resource[Any]:
    made = resource(name, replicas=replicas)
    return replace(made, spec=replace(made.spec, adopt="strict")) if is_strict else made


_some = st.frozensets(st.sampled_from(HARDWARE), min_size=1, max_size=2)
_places = st.frozensets(st.sampled_from(PLACES), max_size=1)
_ids = st.lists(st.sampled_from(["i0", "i1", "i2"]), min_size=1, max_size=2, unique=True)
_identities = st.sampled_from(["", "serial 1", "serial 2"])
_devices = st.builds(
    lambda key, taken_by, hardware, ids, more: replace(
        device(key, *taken_by, hardware=hardware, ids=ids, exclusive=hardware if more[0] else (), unusable=more[1]),
        depends=more[2],
        identity=more[3],
        place=more[4],
        nodes=(Node(HostPath("/dev/x"), "/dev/x", "rw", shared=True),) if more[5] else (),
    ),
    st.sampled_from(["k0", "k1", "k2", "k3"]),
    st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
    _some,
    _ids,
    st.tuples(
        st.booleans(),
        st.sampled_from(["", "", "", "it has no driver"]),
        st.frozensets(st.sampled_from(HARDWARE), max_size=1),
        _identities,
        _places,
        st.booleans(),
    ),
)
_claims = st.builds(
    Held,
    st.sampled_from((*NAMES, "old.example/gone")),
    st.sampled_from(["i0", "i1", "i2", "i0::0", "i1::1"]),
    st.just(KIND),
    _some | st.just(frozenset[str]()),
    _identities,
    _places,
    trouble=st.sampled_from(["", "", FORGOTTEN]),
)
_foreign = st.builds(
    Held, st.just("c.example/x"), st.sampled_from(["0", "1"]), st.just(KIND), _some, foreign=st.just(True)
)
_configurations = st.permutations(NAMES).flatmap(
    lambda names: st.tuples(
        *(st.builds(_resource, st.just(it), is_strict=st.booleans(), replicas=st.sampled_from([1, 2])) for it in names)
    )
)
_steps = st.lists(
    st.tuples(st.just("look"), _devices)
    | st.tuples(st.just("go"), st.sampled_from(["k0", "k1", "k2", "k3"]))
    | st.tuples(st.just("claim"), st.lists(_claims | _foreign, min_size=1, max_size=3))
    | st.tuples(st.just("give"), st.integers(0, 9))
    | st.tuples(st.just("end"), st.integers(0, 9))
    | st.tuples(
        st.just("health"),
        st.dictionaries(st.sampled_from(HARDWARE), st.sampled_from([SICK, MOVED, HEALTHY]), max_size=2),
    )
    | st.tuples(st.just("reload"), _configurations),
    max_size=14,
)


def _take(it: Inventory, step: tuple[str, Any]) -> None:
    kind, what = step
    claims = list(it.told()[1].values())
    if kind == "look":
        it.update(KIND, by_unit([what]))
    elif kind == "go":
        it.update(KIND, {what: ()})
    elif kind == "claim":
        it.claim(what)
    elif kind == "end" and claims:
        it.unclaim([claims[what % len(claims)]])
    elif kind == "health":
        it.set_health(what)
    elif kind == "reload":
        reconfigure(it, what, {KIND: Sharing(*what)})
    elif slots := [(name, one) for name in it.names() for one in it.slots(name).values() if one.device]:
        name, slot = slots[what % len(slots)]
        it.claim([Held.of(name, slot.id, KIND, slot.device)])


@settings(max_examples=150, deadline=None)
@given(_configurations, _steps)
def test_what_is_kept_is_what_would_be_decided_of_everything_at_once(
    resources: tuple[Resource[Any], ...], steps: list[tuple[str, Any]]
) -> None:
    it = Inventory(resources, {KIND: Sharing(*resources)})
    for step in steps:
        _take(it, step)
        found = list(it._all())
        decision = decide(it.selection, found, it._health, it._held, it._foreign)
        listed = {name: slots for name, slots in decision.lists.items() if slots}
        assert listed == {name: dict(it.slots(name)) for name in it.names() if it.slots(name)}
        assert {name: set(it.placed_in(name)) for name in it.names() if it.placed_in(name)} == {
            name: {one for one in found if one.placed is not None and one.placed.resource == name}
            for name in {place.resource for place in decision.placed.values()}
        }
        for one in found:
            assert decision.placed.get(one) is one.placed
            assert decision.rejected.get(one, ()) == one.lost
            assert decision.barred.get(one) == one.barred
