"""Whatever happens to a node, in whatever order: no list, no state file and no sleeper is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import anyio
from anyio.abc import TaskGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.config import AgentConfig, Config
from agent.daemon.node import Node
from agent.daemon.state_file import StateFile, StateKeeper
from agent.discovery.reading import Changes
from agent.health import HealthBook, KeptHealth
from agent.model import Held
from agent.runtime.pacing import Clock, Doorbell
from agent.runtime.problems import Problems
from backends.base import Clears, Host
from tests.fakes import KIND, Fake, device, held, inventory, resource
from tests.health.said import BOOT, DELAYED, NOW, record, signal

CARDS: Final = "a.example/cards"
NAMES: Final = ("a", "b")
XID: Final = "xid-79"
TURNS: Final = 8
"""Of the event loop; nothing here waits for anything outside of it."""


class Told:
    """Stands for all others that are told of claims: remembers what."""

    def __init__(self) -> None:
        self.all: list[object] = []

    def allocated(self) -> None:
        self.all.append("allocated")

    def over(self, ended: Sequence[Held]) -> None:
        self.all.append([claim.id for claim in ended])

    def changed(self, resources: Iterable[str]) -> None:
        self.all.append(tuple(resources))

    def claims_changed(self) -> None:
        self.all.append("asked")

    @property
    def notes(self) -> Told:
        return self

    def add(self, note: object) -> None:
        self.all.append(note)


class Written:
    """Stands for the state file: remembers what was written."""

    complaint = damage = ""

    def __init__(self) -> None:
        self.is_well = asyncio.Event()
        self.is_well.set()
        self.claims: set[Held] = set()
        self.health = HealthBook(BOOT).kept()

    async def write(
        self, claims: Sequence[Held] | None = None, health: KeptHealth | None = None, **_others: object
    ) -> bool:
        self.claims = self.claims if claims is None else set(claims)
        self.health = health or self.health
        await self.is_well.wait()
        return True


class House:
    """A node with two cards, and what happens to it."""

    def __init__(self, tasks: TaskGroup) -> None:
        self.now, self.deadline, self._sequence = 1000.0, cast(float | None, -1.0), 0
        config = Config(AgentConfig(), Host(), resources=(resource(CARDS),))
        clock = Clock(lambda: self.now, lambda: 1e9 + self.now)
        self.node = node = Node(config, {KIND: Fake()}, Problems(), clock)
        node.inventory.ready(KIND)
        node.health, self.file, self.told = HealthBook(BOOT), Written(), Told()
        node.keeper = StateKeeper(
            cast(StateFile, self.file), node.ledger, node.releaser, node.inventory, node.health, node.shortfall,
            node.history, clock=clock,
        )  # fmt: skip
        tasks.start_soon(node.keeper.run)
        others: Any = self.told
        node.pod_claims = node.resumer = node.cdi = node.history = others

    async def sleep(self, due: float | None, woken: Doorbell, _clock: Callable[[], float]) -> None:
        self.deadline = due
        await woken.rung()

    async def do(self, what: str, name: str) -> None:
        found, node = device(name, CARDS), self.node
        match what:
            case "comes":
                node.scanned(Changes(KIND, {name: (found,)}, {name: ()}))
            case "is bound anew":
                self._sequence += 1
                bound = replace(found, bindings={name: f"driver {self._sequence}"})
                node.scanned(Changes(KIND, {name: (bound,)}, {name: ()}))
            case "goes":
                node.scanned(Changes(KIND, {name: ()}, {name: ()}))
            case "is ill" | "will be ill":
                said = signal(NOW if what == "is ill" else DELAYED, "ill", name, after=30.0, recover_after=10.0)
                node.scanned(Changes(KIND, {}, {name: (said,)}))
            case "is ill for others":
                said = signal(NOW, "ill", name, unless_held=True)
                node.scanned(Changes(KIND, {}, {name: (said,)}))
            case "is well":
                node.scanned(Changes(KIND, {}, {name: ()}))
            case "has an XID":
                self._sequence += 1
                waits = signal(NOW, XID, name, clears_on=[Clears.OUR_RESET, Clears.OPERATOR])
                node.recorded([waits], record(self._sequence))
            case "is reset":
                node.was_reset({name})
            case "is drained":
                await node.drain([name], "the fan", 1e9 + self.now + 60.0)
            case "is undrained":
                await node.undrain([name])
            case "is allocated":
                await node.allocated([held(CARDS, name, found)])
            case "is adopted":
                if fresh := node.ledger.adopt({(CARDS, name): KIND}, {(CARDS, name): found}, self.now):
                    node.adopted(fresh)
                node.claims_settled()
            case "is let go":
                if (claim := node.ledger.of((CARDS, name))) is not None:
                    node.ledger._claims.pop((CARDS, name))
                    node.released([claim])
                node.claims_settled()
            case _:
                self.now += 31.0
                node.resend(CARDS)

    def list_left_behind(self) -> object:
        """The list as it was published last, where it is not as it should be."""
        listed = self.node.lists[CARDS].slots if CARDS in self.node.lists else {}
        return listed if listed != self.node.inventory.slots(CARDS) else None

    def left_behind(self) -> list[object]:
        """What does not know what it should."""
        node, file = self.node, self.file
        pairs: list[tuple[str, object, object]] = [
            ("list", self.list_left_behind(), None),
            ("claims", file.claims, set(node.ledger.held())),
            ("drains and latches", file.health, node.health.kept()),
            ("sleeper", self.deadline, node.health.next_deadline()),
        ]
        return [it for it in pairs if it[1] != it[2]]


WHAT: Final = (
    "comes", "is bound anew", "goes", "is ill", "will be ill", "is ill for others", "is well", "has an XID", "is reset", "is drained", "is undrained",
    "is allocated", "is adopted", "is let go", "time passes",
)  # fmt: skip


async def turns() -> None:
    """Let everything happen that is due."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def play(steps: list[tuple[str, str]]) -> None:
    async with anyio.create_task_group() as tasks:
        house = House(tasks)
        await house.node.keeper.begin()
        tasks.start_soon(house.node.run, house.sleep)
        for name in NAMES:
            await house.do("comes", name)
        for what, name in steps:
            await house.do(what, name)
            if what != "is allocated":  # that hands its lists on once the reply has left
                assert house.list_left_behind() is None
            await turns()
            assert house.left_behind() == []
        tasks.cancel_scope.cancel()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(WHAT), st.sampled_from(NAMES)), min_size=10, max_size=30))
def test_whatever_happens_no_list_state_or_sleeper_is_left_behind(steps: list[tuple[str, str]]) -> None:
    asyncio.run(play(steps))


async def test_an_allocate_of_a_healthy_device_publishes_nothing_and_wakes_nothing() -> None:
    async with anyio.create_task_group() as tasks:
        house = House(tasks)
        await house.node.keeper.begin()
        tasks.start_soon(house.node.run, house.sleep)
        await house.do("comes", "a")
        await house.do("is ill for others", "b")
        await turns()
        house.node.news.clear()
        await house.do("is allocated", "a")
        await turns()
        assert not house.node.news.is_set()
        assert house.left_behind() == []
        tasks.cancel_scope.cancel()


async def test_what_an_allocate_changed_is_listed_though_the_kubelet_does_not_wait_for_the_reply() -> None:
    async with anyio.create_task_group() as tasks:
        house = House(tasks)
        await house.node.keeper.begin()
        house.file.is_well.clear()
        asking = asyncio.create_task(house.node.allocated([held(CARDS, "gone", device("gone", CARDS))]))
        await turns()
        asking.cancel()
        await turns()
        assert "gone" in house.node.lists[CARDS].slots
        assert house.told.all == ["allocated"]
        tasks.cancel_scope.cancel()


async def test_a_claim_has_the_kubelet_asked_and_its_end_ends_all_that_is_being_done_for_its_pod() -> None:
    async with anyio.create_task_group() as tasks:
        house = House(tasks)
        claim = held(CARDS, "a", device("a", CARDS))
        await house.node.allocated([claim])
        assert house.told.all == ["allocated"]
        house.node.released([claim])
        house.node.claims_asked()
        assert house.told.all[1:] == [["a"], (CARDS,), "asked"]
        assert house.node.ended == {CARDS}
        tasks.cancel_scope.cancel()


async def test_the_kubelet_writes_its_record_by_anothers_list_where_a_resource_is_served_by_dra() -> None:
    """What pods hold of it from before can end only with a newer record."""
    by_dra, other = resource(CARDS), resource("a.example/other")
    by_dra = replace(by_dra, spec=replace(by_dra.spec, serve="dra"))
    async with anyio.create_task_group() as tasks:
        house = House(tasks)
        house.node.inventory = inventory(by_dra, other)
        house.node.inventory.take(house.now)
        house.node.lists.clear()
        house.node.resend(CARDS)
        assert list(house.node.lists) == [other.name]
        tasks.cancel_scope.cancel()
