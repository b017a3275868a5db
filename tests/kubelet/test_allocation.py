"""Kubelet contract: A4, A7."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from agent.discovery.discoverer import LookError
from agent.hardware import jobs
from agent.hardware.jobs import HardwareQueue, Jobs
from agent.inventory.inventory import Inventory
from agent.kubelet.allocation import Allocator
from agent.kubelet.api.v1beta1 import AllocateResponse
from agent.kubelet.wire import Encoded
from agent.model import Health, Held, SlotKey, State
from backends.base import (
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    HostPath,
    Node,
    Resource,
    ResourceSpec,
)
from tests.fakes import reconfigure
from tests.wait import at_once, limit, until

TOY = "example.com/toy"
KIND = "toy"
DEADLINE = 60.0  # seconds, of which none passes but by a test


class Options(msgspec.Struct, frozen=True):
    pass


class Plain(Backend[Options]):
    """Needs no claim; notes what it is asked."""

    options_type: ClassVar = Options

    def __init__(self, host: Host, resources: Sequence[Resource[Options]]) -> None:
        super().__init__(host, resources)
        self.asked: list[tuple[str, list[str]]] = []
        self.fails: Exception | None = None
        self.nonsense: Any = None

    def units(self) -> Iterable[str]:
        return ()

    def discover(self, unit: str) -> Discovery:
        return Discovery()

    def edits(self, resource: Resource[Options], grants: Sequence[Grant]) -> ContainerEdits:
        self.asked.append(("edits", [grant.id for grant in grants]))
        if self.fails:
            raise self.fails
        if self.nonsense is not None:
            edits: ContainerEdits = self.nonsense
            return edits
        nodes = tuple(node for grant in grants for node in grant.device.nodes)
        return ContainerEdits(nodes, env={"IDS": ",".join(grant.id for grant in grants)})


class Claiming(Plain):
    """Makes hardware ready, as a test decides."""

    def __init__(self, host: Host, resources: Sequence[Resource[Options]]) -> None:
        super().__init__(host, resources)
        self.on_claim: Callable[[], None] = lambda: None

    def claim(self, resource: Resource[Options], grants: Sequence[Grant]) -> None:
        self.asked.append(("claim", [grant.id for grant in grants]))
        self.on_claim()


def toy(key: str, identity: str = "", node: str = "/dev/toy") -> Device:
    nodes = (Node(HostPath(node), node, "rw"),)
    return Device(key, key, frozenset({f"toy:{key}"}), identity=identity, nodes=nodes)


async def nothing() -> None:
    """Look, and find all as it was."""


class House:
    """One resource with devices a, b and c, all of them told to the kubelet; what is recorded is noted."""

    def __init__(self, kind: type[Plain], claim_deadline: float = DEADLINE) -> None:
        self.resource = Resource(TOY, ResourceSpec(KIND, Options()))
        self.backend: Any = kind(Host(), [self.resource])
        self.inventory = Inventory([self.resource], {KIND: self.backend})
        self.turns = HardwareQueue()
        self.jobs = Jobs(self.turns, self._look)
        self.looked: list[Set[str]] = []
        self.on_look: Callable[[], Awaitable[object]] = nothing
        self.recorded: list[Held] = []
        self.untold: set[str] = set()
        self.allocator = Allocator(
            self.inventory, {KIND: self.backend}, self.jobs, self._record, claim_deadline=claim_deadline
        )
        for key in "abc":
            self.look(toy(key))
        self.inventory.ready(KIND)
        self.inventory.take()

    def look(self, *devices: Device, unit: str | None = None) -> None:
        """Discovery found these in a unit; none is a unit that is gone."""
        self.inventory.update(KIND, {unit or devices[0].unit: devices})

    async def _look(self, kind: str, units: Set[str]) -> None:
        assert kind == KIND
        self.looked.append(units)
        await self.on_look()

    async def _record(self, given: Sequence[Held]) -> None:
        self.backend.asked.append(("recorded", [held.id for held in given]))
        self.recorded += given
        self.inventory.claim(given)

    async def allocate(self, *ids: str) -> Encoded:
        async with limit():
            return await self.allocator.allocate(TOY, ids, lambda device_id: device_id not in self.untold)

    async def refusal(self, *ids: str) -> str:
        with pytest.raises(AllocationRefused) as caught:
            await self.allocate(*ids)
        sentence = caught.value.sentence
        assert sentence[0].isalnum()
        assert sentence.endswith(".")
        assert not sentence.endswith("..")
        return sentence

    @property
    def listed(self) -> dict[str, bool]:
        """ID → whether it is healthy."""
        return {device_id: slot.health.offered for device_id, slot in self.inventory.slots(TOY).items()}


@pytest.fixture
async def house() -> AsyncIterator[House]:
    house = House(Plain)
    yield house
    house.jobs.close()


@pytest.fixture
async def claiming() -> AsyncIterator[House]:
    house = House(Claiming)
    yield house
    house.jobs.close()


def env(reply: Encoded) -> dict[str, str]:
    (container,) = AllocateResponse().parse(reply).container_responses
    return container.envs


async def test_ids_are_sorted_and_taken_once_each(house: House) -> None:
    assert env(await house.allocate("c", "a", "c", "b", "a")) == {"IDS": "a,b,c"}
    assert [held.id for held in house.recorded] == ["a", "b", "c"]


async def test_the_claim_is_recorded_before_the_backend_acts(claiming: House) -> None:
    await claiming.allocate("b", "a")
    assert claiming.backend.asked == [("recorded", ["a", "b"]), ("claim", ["a", "b"]), ("edits", ["a", "b"])]
    assert claiming.recorded[0] == Held(TOY, "a", KIND, frozenset({"toy:a"}))


async def test_the_record_names_the_card(house: House) -> None:
    house.look(toy("a", "serial 7"))
    await house.allocate("a")
    assert house.recorded[0].identity == "serial 7"


async def test_nothing_is_recorded_or_asked_for_a_refused_id(claiming: House) -> None:
    claiming.untold = {"b"}
    assert "has no device b on this node" in await claiming.refusal("a", "b")
    assert "has no device x on this node" in await claiming.refusal("a", "x")
    sick = Health(State.UNHEALTHY, "port-down", "Its port is down.")
    claiming.inventory.set_health({"toy:c": sick})
    assert "Device c of example.com/toy cannot be used now: Its port is down. Create" in await claiming.refusal("c")
    claiming.inventory.set_health({"toy:c": replace(sick, message="")})
    assert "cannot be used now: port-down." in await claiming.refusal("c")
    assert claiming.backend.asked == []


async def test_a_degraded_device_is_given(house: House) -> None:
    house.inventory.set_health({"toy:a": Health(State.DEGRADED, "slow-link")})
    assert env(await house.allocate("a")) == {"IDS": "a"}


async def test_a_vanished_device_that_a_pod_holds_is_refused_to_others(house: House) -> None:
    await house.allocate("a")
    house.look(unit="a")
    assert "the device is gone; a pod still holds it" in await house.refusal("a")


async def test_a_retired_resource_is_refused(house: House) -> None:
    old = "example.com/old"
    house.inventory.claim([Held(old, "a1", KIND)])
    with pytest.raises(AllocationRefused, match="no longer offered on this node"):
        await house.allocator.allocate(old, ["a1"], lambda _: True)


async def test_the_backends_own_sentence_is_passed_on(claiming: House) -> None:
    def refuse() -> None:
        raise AllocationRefused("The card is locked.")

    claiming.backend.on_claim = refuse
    assert await claiming.refusal("a") == "The card is locked."
    claiming.backend.on_claim = lambda: None
    claiming.backend.fails = AllocationRefused("These two are on different boards.")
    assert await claiming.refusal("a", "b") == "These two are on different boards."


@pytest.mark.parametrize("error", [RuntimeError("oh no"), TimeoutError("timed out"), OSError(5, "I/O error")], ids=repr)
@pytest.mark.parametrize("call", ["claim", "edits"])
async def test_a_backend_that_raises_is_named_to_the_administrator(
    claiming: House, call: str, error: Exception
) -> None:
    def fail() -> None:
        raise error

    if call == "claim":
        claiming.backend.on_claim = fail
    else:
        claiming.backend.fails = error
    assert f"the backend toy failed ({error})" in await claiming.refusal("a")
    assert [held.id for held in claiming.recorded] == ["a"], "what it has done until then is undone when the claim ends"


@pytest.mark.parametrize("answer", [42, "edits", ContainerEdits(env={"A": 1}), ContainerEdits(nodes=("x",))], ids=repr)  # type: ignore[dict-item,arg-type]
async def test_nonsense_for_edits_is_refused(house: House, answer: object) -> None:
    house.backend.nonsense = answer
    assert "the backend toy failed" in await house.refusal("a")


@pytest.mark.usefixtures("seldom_looks")
async def test_a_claim_that_hangs_is_given_up_at_its_deadline_and_does_nothing_late() -> None:
    house, let_go = House(Claiming), threading.Event()
    house.backend.on_claim = let_go.wait
    hangs = await at_once(house.refusal("a"))
    assert "a of example.com/toy could not be made ready: not done within 60 s" in hangs
    assert [held.id for held in house.recorded] == ["a"], "a late claim ends as any other"
    house.backend.on_claim = lambda: None
    assert "an earlier call for the same hardware has not ended within 60 s" in await at_once(house.refusal("a"))
    assert env(await house.allocate("b"))
    assert house.backend.asked.count(("claim", ["a"])) == 1, "one call that hangs costs one thread"
    let_go.set()
    assert env(await house.allocate("a"))
    house.jobs.close()


@pytest.mark.usefixtures("seldom_looks")
async def test_when_every_thread_hangs_it_is_refused_at_once() -> None:
    house, let_go = House(Claiming), threading.Event()
    for key in "defg":
        house.look(toy(key))
    house.backend.on_claim = let_go.wait
    for key in "abcd":
        await at_once(house.refusal(key))
    assert "all 4 threads of toy for pods hang" in await house.refusal("e")
    let_go.set()


async def test_a_claim_waits_for_a_release_of_the_same_hardware(claiming: House) -> None:
    async with claiming.turns.take({"toy:a"}):
        waits = asyncio.ensure_future(claiming.allocate("a", "c"))
        await asyncio.sleep(0)
        assert env(await claiming.allocate("b"))
        assert not waits.done()
        assert {held.id for held in claiming.recorded} == {"a", "b", "c"}, "recorded first: nothing calls it idle"
        assert ("claim", ["a", "c"]) not in claiming.backend.asked
    assert env(await waits) == {"IDS": "a,c"}


async def test_what_needs_no_claim_waits_for_a_release_of_its_hardware_too(house: House) -> None:
    async with house.turns.take({"toy:a"}):
        waits = asyncio.ensure_future(house.allocate("a"))
        await asyncio.sleep(0)
        assert env(await house.allocate("b"))
        assert (waits.done(), house.looked) == (False, [])
    assert env(await waits)
    assert house.looked == [{"a"}], "it may be another device now"


@pytest.mark.usefixtures("seldom_looks")
async def test_a_release_that_hangs_refuses_the_pods_that_want_its_hardware() -> None:
    house = House(Claiming)
    async with house.turns.take({"toy:a"}):
        assert "an earlier call for the same hardware has not ended within 60 s" in await at_once(house.refusal("a"))
    house.jobs.close()


async def test_what_claim_did_to_a_device_is_looked_at_before_it_is_handed_out(claiming: House) -> None:
    async def look() -> None:
        claiming.look(toy("b", node="/dev/made-by-claim"))

    claiming.on_look = look
    (container,) = AllocateResponse().parse(await claiming.allocate("a", "b")).container_responses
    assert [node.host_path for node in container.devices] == ["/dev/toy", "/dev/made-by-claim"]
    assert claiming.looked == [{"a", "b"}]


async def test_nothing_is_looked_at_where_nothing_was_claimed(house: House) -> None:
    await house.allocate("a")
    assert house.looked == []


@pytest.mark.usefixtures("seldom_looks")
async def test_a_device_that_cannot_be_looked_at_after_its_claim_is_refused_in_time() -> None:
    house = House(Claiming)
    house.on_look = asyncio.Event().wait
    hangs = await at_once(house.refusal("a"))
    assert "could not be made ready: looking at it has not ended within 60 s" in hangs
    assert not house.turns.busy
    house.jobs.close()


@pytest.mark.parametrize("failures", [1, 2, 3])
async def test_a_device_that_cannot_be_read_for_a_moment_is_given_all_the_same(
    claiming: House, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(jobs, "_LOOK_AGAIN", (0.0, 0.0))

    async def look() -> None:
        if len(claiming.looked) <= failures:
            raise LookError("a cannot be read: Input/output error")

    claiming.on_look = look
    if failures <= 2:
        assert env(await claiming.allocate("a")) == {"IDS": "a"}
    else:
        assert "could not be made ready: a cannot be read: Input/output error." in await claiming.refusal("a")


async def test_a_caller_that_hangs_up_leaves_the_claim_in_the_ledger(claiming: House) -> None:
    started, let_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(started.set)
        let_go.wait()

    claiming.backend.on_claim = hang
    call = asyncio.ensure_future(claiming.allocate("a"))
    await started.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    let_go.set()
    assert [held.id for held in claiming.recorded] == ["a"]
    assert ("edits", ["a"]) not in claiming.backend.asked


async def during_claim(house: House, *happens: Callable[[], None]) -> asyncio.Task[Encoded]:
    """Start an Allocate of a, let these happen while claim() runs, and let it end."""
    started, let_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def hang() -> None:
        loop.call_soon_threadsafe(started.set)
        let_go.wait()

    house.backend.on_claim = hang
    call = asyncio.ensure_future(house.allocate("a"))
    await started.wait()
    for it in happens:
        it()
        for snapshot in house.inventory.take():
            assert "a" in snapshot.slots, "an ID in flight never leaves the list"
    let_go.set()
    return call


async def test_a_device_that_vanishes_while_it_is_made_ready_stays_listed_and_is_refused(claiming: House) -> None:
    call = await during_claim(claiming, lambda: claiming.look(unit="a"))
    with pytest.raises(AllocationRefused, match="cannot be used now: the device is gone"):
        await call
    assert claiming.listed == {"a": False, "b": True, "c": True}


async def test_a_device_that_is_back_is_given_as_it_is_now(claiming: House) -> None:
    call = await during_claim(
        claiming, lambda: claiming.look(unit="a"), lambda: claiming.look(toy("a", node="/dev/toy-made-by-claim"))
    )
    (container,) = AllocateResponse().parse(await call).container_responses
    assert container.devices[0].host_path == "/dev/toy-made-by-claim"


async def test_another_card_in_its_place_is_refused(claiming: House) -> None:
    claiming.look(toy("a", "serial 1"))
    call = await during_claim(claiming, lambda: claiming.look(unit="a"), lambda: claiming.look(toy("a", "serial 2")))
    with pytest.raises(AllocationRefused, match="it is serial 2 now"):
        await call
    assert claiming.listed["a"] is False


async def test_another_card_that_came_while_it_waited_for_its_turn_is_not_acted_on(claiming: House) -> None:
    claiming.look(toy("a", "serial 1"))
    async with claiming.turns.take({"toy:a"}):
        call = asyncio.ensure_future(claiming.allocate("a"))
        await asyncio.sleep(0)
        claiming.look(toy("a", "serial 2"))
    with pytest.raises(AllocationRefused, match="was exchanged for another device"):
        await call
    assert not any(what == "claim" for what, _ in claiming.backend.asked)


async def test_a_card_that_is_away_when_its_turn_comes_may_be_back_when_it_has_been_made_ready(claiming: House) -> None:
    """A release that was under way may have shown it without a driver."""
    async with claiming.turns.take({"toy:a"}):
        call = asyncio.ensure_future(claiming.allocate("a"))
        await asyncio.sleep(0)
        claiming.look(unit="a")

    async def look() -> None:
        claiming.look(toy("a"))

    claiming.on_look = look
    assert env(await call) == {"IDS": "a"}


@pytest.mark.parametrize("kind", [None, "other"])
async def test_a_resource_that_a_reload_takes_from_its_backend_meanwhile_is_refused_in_a_sentence(
    house: House, kind: str | None
) -> None:
    record = house.allocator._record

    async def reload(given: Sequence[Held]) -> None:
        await record(given)
        resources = [Resource(TOY, ResourceSpec(kind, Options()))] if kind else []
        house.allocator._backends.clear()  # type: ignore[attr-defined]
        reconfigure(house.inventory, resources, {kind: Plain(Host(), resources)} if kind else {})

    house.allocator._record = reload
    assert TOY in await house.refusal("a")


async def test_other_hardware_under_the_same_id_is_refused(claiming: House) -> None:
    other = replace(toy("a"), hardware=frozenset({"toy:other"}))
    call = await during_claim(claiming, lambda: claiming.look(other))
    with pytest.raises(AllocationRefused, match="Create the pod again"):
        await call


async def test_a_device_that_falls_ill_while_it_is_made_ready_is_refused(claiming: House) -> None:
    sick = Health(State.UNHEALTHY, "hot", "It is too hot")
    call = await during_claim(claiming, lambda: claiming.inventory.set_health({"toy:a": sick}))
    with pytest.raises(AllocationRefused, match="It is too hot"):
        await call


# --- for one pod ---


async def asked_twice(house: House, *ids: str) -> str:
    """The refusal of these IDs while `a` is being made ready for another pod, which gets it."""
    acts, goes = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def claim() -> None:
        loop.call_soon_threadsafe(acts.set)
        goes.wait()

    house.backend.on_claim = claim
    first = asyncio.ensure_future(house.allocate("a"))
    try:
        async with limit():
            await acts.wait()
        return await house.refusal(*ids)
    finally:
        goes.set()
        assert env(await first) == {"IDS": "a"}
        house.backend.on_claim = lambda: None


async def test_an_allocate_of_what_is_being_given_to_another_pod_is_refused(claiming: House) -> None:
    sentence = await asked_twice(claiming, "b", "a")
    assert sentence.startswith("Device a of example.com/toy is in use: another pod, which is being given it")
    assert [held.id for held in claiming.recorded] == ["a"]
    assert env(await claiming.allocate("a", "b")) == {"IDS": "a,b"}, "the refused one holds nothing back"


async def test_an_allocate_that_ends_in_any_way_keeps_nothing_from_the_next(claiming: House) -> None:
    claiming.backend.fails = RuntimeError("oh no")
    await claiming.refusal("a")
    claiming.backend.fails = None
    acts, goes = threading.Event(), threading.Event()

    def claim() -> None:
        acts.set()
        goes.wait()

    claiming.backend.on_claim = claim
    cut_off = asyncio.ensure_future(claiming.allocate("a"))  # as by a kubelet that was killed
    await until(acts.is_set, "the claim")
    cut_off.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cut_off
    goes.set()
    claiming.backend.on_claim = lambda: None
    assert env(await claiming.allocate("a")) == {"IDS": "a"}


async def test_what_a_pod_has_for_certain_is_refused_to_the_next_and_only_that_is_asked_about(house: House) -> None:
    asked: list[Sequence[SlotKey]] = []
    holder: tuple[SlotKey, str] | None = ((TOY, "b"), "team/train (main)")

    async def find(slots: Sequence[SlotKey]) -> tuple[SlotKey, str] | None:
        asked.append(slots)
        return holder

    house.allocator = Allocator(house.inventory, {KIND: house.backend}, house.jobs, house._record, holder=find)
    await house.allocate("a", "b")
    assert asked == [], "it is free"
    assert await house.refusal("a", "b", "c") == (
        "Device b of example.com/toy is in use: team/train (main) has it, and the kubelet asks for it a second time. "
        "Create the pod again."
    )
    assert asked == [[(TOY, "a"), (TOY, "b")]]
    assert [held.id for held in house.recorded] == ["a", "b"]
    holder = None
    assert env(await house.allocate("a")) == {"IDS": "a"}
