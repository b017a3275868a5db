"""What is done for each of many devices costs the same however many there are: neither claims nor adoption are quadratic."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
from msgspec.structs import replace

from agent.claims.ledger import Ledger
from agent.hardware.adoption import Adopter, Discovery
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.inventory.inventory import Inventory
from agent.model import Held
from backends.base import Device, Resource
from tests.fakes import KIND, Fake, Sharing, by_unit, device, held, inventory, reconfigure, resource
from tests.work import growth

NAME = "a.example/one"
LINEAR = 5.0
"""Of 4.0: dictionaries and heaps grow now and then."""


def in_turn(*calls: Callable[[], object]) -> Callable[[], object]:
    return lambda: [call() for call in calls]


def cards(number: int, **more: Any) -> list[Device]:
    return [device(f"card {n}", NAME, **more) for n in range(number)]


def holding(number: int) -> Inventory:
    """Pods hold half of so many devices."""
    it = Inventory([resource(NAME)], {KIND: Fake(resource(NAME))})
    it.update(KIND, by_unit(cards(number)))
    it.ready(KIND)
    it.claim([held(NAME, card.key, card) for card in cards(number // 2)])
    it.take()
    return it


def all_go(number: int) -> Callable[[], object]:
    it = holding(number)
    return in_turn(partial(it.update, KIND, {card.unit: () for card in cards(number)}), it.take)


def all_come_back(number: int) -> Callable[[], object]:
    it = holding(number)
    it.update(KIND, {card.unit: () for card in cards(number)})
    it.take()
    return in_turn(partial(it.update, KIND, by_unit(cards(number))), it.take)


def ids_change(number: int) -> Callable[[], object]:
    """A reload gives each device other IDs; the held ones stay, and one of the new ones is kept back for each."""
    it = holding(number)
    shared = resource(NAME, replicas=2)
    return in_turn(partial(reconfigure, it, [shared], {KIND: Sharing(shared)}), it.take)


def claims_of_former_ids_end(number: int) -> Callable[[], object]:
    it = holding(number)
    shared = resource(NAME, replicas=2)
    reconfigure(it, [shared], {KIND: Sharing(shared)})
    it.take()
    ended = [held(NAME, card.key, card) for card in cards(number // 2)]
    return in_turn(partial(it.unclaim, ended), it.take)


def state_is_restored(number: int) -> Callable[[], object]:
    """Before the first look all that is held is a tombstone, under former IDs."""
    shared = resource(NAME, replicas=2)
    it = Inventory([shared], {KIND: Sharing(shared)})
    it.claim([held(NAME, card.key, card) for card in cards(number // 2)])
    return in_turn(partial(it.update, KIND, by_unit(cards(number))), partial(it.ready, KIND), it.take)


def tokens_are_claimed(number: int) -> Callable[[], object]:
    """One device with many IDs, one of which is a tombstone."""
    ids = [str(n) for n in range(number)]
    it = Inventory([resource(NAME)], {KIND: Fake(resource(NAME))})
    shared = replace(device("card", NAME, ids=ids))
    it.claim([held(NAME, "former", shared)])
    it.update(KIND, by_unit([shared]))
    it.ready(KIND)
    return in_turn(
        partial(it.claim, [held(NAME, i, shared) for i in ids]),
        partial(it.unclaim, [held(NAME, i, shared) for i in ids]),
    )


def tokens_beside_another_device_are_claimed_one_by_one(number: int) -> Callable[[], object]:
    """The node of a card has tokens, the card itself is one pod's: each claim may take the place from the other."""
    ids, place = [str(n) for n in range(1000)], frozenset({"port 1"})
    node = replace(device("node", NAME, ids=ids), place=place)
    other = replace(device("other", NAME), place=place)
    it = Inventory([resource(NAME)], {KIND: Fake(resource(NAME))})
    it.update(KIND, by_unit([node, other]))
    it.ready(KIND)
    return in_turn(*(partial(it.claim, [held(NAME, i, node)]) for i in ids[:number]))


def resources_retire(number: int) -> Callable[[], object]:
    it = holding(number)
    return in_turn(
        partial(reconfigure, it, [], {}), it.take, partial(reconfigure, it, [resource(NAME)], {KIND: Fake()}), it.take
    )


def hardware_is_asked_for(number: int) -> Callable[[], object]:
    ledger = Ledger()
    ledger.restore([held(NAME, card.key, card) for card in cards(number)], 0.0)
    return lambda: [ledger.holds(f"card {n}") for n in range(number)]


@pytest.mark.parametrize(
    "case",
    [
        all_go,
        all_come_back,
        ids_change,
        claims_of_former_ids_end,
        state_is_restored,
        tokens_are_claimed,
        tokens_beside_another_device_are_claimed_one_by_one,
        resources_retire,
        hardware_is_asked_for,
    ],
)
def test_what_many_claims_cost_grows_with_their_number(case: Callable[[int], Callable[[], object]]) -> None:
    assert growth(case, 100) < LINEAR


class Adopting(Fake):
    def adopt(self, resource: Resource[Any], device: Device) -> bool:
        return False


def adoption(number: int) -> Callable[[], object]:
    """All of them join at once and are adopted, one after the other in a few threads."""
    joined = inventory(resource(NAME), devices=cards(number))

    async def adopt() -> None:
        backend = Adopting(resource(NAME))
        reconciler = Reconciler(HardwareQueue())
        adopter = Adopter(
            {KIND: backend}, joined, reconciler, cast(Discovery, None)
        )  # where nothing is done, nobody looks
        adopter.configure([resource(NAME)])
        running = asyncio.create_task(reconciler.run())
        while reconciler._cases:
            await reconciler._changed.wait()
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])

    return lambda: asyncio.run(adopt())


def test_what_adoption_costs_grows_with_the_number_that_joins() -> None:
    assert growth(adoption, 50) < LINEAR


def test_a_ledger_knows_who_has_hardware_whatever_happens_to_its_claims() -> None:
    ledger = Ledger()
    one, other = Held(NAME, "1", KIND, frozenset({"a", "b"})), Held(NAME, "2", KIND, frozenset({"b"}))
    ledger.allocate([one, other], 0.0)
    ledger.allocate([replace(one, hardware=frozenset({"c"}))], 0.0)
    assert [ledger.holds(h) for h in "abc"] == [False, True, True]
    ledger.listed(set(), 100.0, 100.0, None)
    ledger.checkpoint(set(), (1,))
    assert [ledger.holds(h) for h in "abc"] == [False, False, False]
