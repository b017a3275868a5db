"""Kubelet contract: A4."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence, Set
from typing import Any

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.claims.ledger import Ledger
from agent.discovery.discoverer import LookError
from agent.hardware.jobs import ROOMS, HardwareQueue, Jobs
from agent.health import HealthBook
from agent.inventory.inventory import Inventory
from agent.kubelet.allocation import PRE_START_DEADLINE, Starter
from agent.model import Health, Held
from backends.base import (
    AllocationRefused,
    Clears,
    Device,
    Grant,
    Host,
    PreStart,
    Resource,
    ResourceSpec,
    Signal,
    Verdict,
)
from tests.health.said import latch
from tests.kubelet.test_allocation import KIND, TOY, Options, Plain, nothing, toy
from tests.wait import at_once, limit, settled, until

OTHER = "example.com/other"
XID = Signal("toy:a", "xid-48", Verdict.NOW, "XID 48: its memory is bad.", clears_on=frozenset({Clears.OUR_RESET}))
HOT = Signal("toy:a", "hot", Verdict.NOW, "It is too hot.")


class Resetting(Plain):
    """Resets hardware, as a test decides."""

    def __init__(self, host: Host, resources: Sequence[Resource[Options]]) -> None:
        super().__init__(host, resources)
        self.on_prepare: Callable[[], Any] = lambda: ()

    def prepare(self, resource: Resource[Options], grants: Sequence[Grant]) -> Iterable[str]:
        self.asked.append(("prepare", [grant.id for grant in grants]))
        answer: Iterable[str] = self.on_prepare() or frozenset().union(*(g.device.hardware for g in grants))
        return answer


class House:
    """Devices a, b and c of one resource, all held by pods; another resource has d."""

    def __init__(self, pre_start: PreStart) -> None:
        taken = ({"of": (TOY,)},)
        self.resource = Resource(TOY, ResourceSpec(KIND, Options(), select=taken, pre_start=pre_start))
        other = Resource(OTHER, ResourceSpec(KIND, Options(), exclude=taken))
        self.backend: Any = Resetting(Host(), [self.resource, other])
        self.inventory = Inventory([self.resource, other], {KIND: self.backend})
        self.ledger, self.book, self.turns = Ledger(), HealthBook(), HardwareQueue()
        self.jobs = Jobs(self.turns, self._look)
        self.on_look: Callable[[], Awaitable[object]] = nothing
        self.resets: list[Set[str]] = []
        self.starter = Starter(self.inventory, self.ledger, {KIND: self.backend}, self.jobs, self)
        for key in "abc":
            self.look(self.device(key))
        self.look(toy("d"))
        self.hold(*"abc")

    @staticmethod
    def device(key: str, **changes: Any) -> Device:
        return replace(toy(key), attributes={"of": (TOY,)}, **changes)

    def look(self, *devices: Device, unit: str | None = None) -> None:
        """Discovery found these in a unit; none is a unit that is gone."""
        self.inventory.update(KIND, {unit or devices[0].unit: devices})

    def hold(self, *ids: str, resource: str = TOY, hardware: Set[str] = frozenset()) -> None:
        held = [Held(resource, key, KIND, frozenset(hardware or {f"toy:{key}"})) for key in ids]
        self.ledger.allocate(held, 0.0)
        self.inventory.claim(held)

    def probe(self, *signals: Signal) -> None:
        self.inventory.set_health(self.book.probed(KIND, {"a": signals}, 0.0))

    def record(self, *signals: Signal) -> None:
        self.inventory.set_health(latch(self.book, 0.0, *signals))

    async def _look(self, kind: str, units: Set[str]) -> None:
        assert kind == KIND
        self.backend.asked.append(("look", sorted(units)))
        await self.on_look()

    def health_for_pod(self, hardware: str, *, reset: bool) -> Health:
        return self.book.for_pod(hardware, 0.0, Clears.OUR_RESET if reset else None)

    def was_reset(self, hardware: Set[str]) -> None:
        self.resets.append(hardware)
        self.inventory.set_health(self.book.cleared(Clears.OUR_RESET, hardware, 0.0))

    async def start(self, *ids: str, name: str = TOY) -> None:
        async with limit():
            await self.starter.start(name, ids)

    async def refusal(self, *ids: str) -> str:
        with pytest.raises(AllocationRefused) as caught:
            await self.start(*ids)
        sentence = caught.value.sentence
        assert sentence[0].isalnum()
        assert sentence.endswith(".")
        assert ".." not in sentence
        return sentence

    @property
    def asked(self) -> list[tuple[str, list[str]]]:
        found: list[tuple[str, list[str]]] = self.backend.asked
        return found


@pytest.fixture
async def checking() -> AsyncIterator[House]:
    house = House("check")
    yield house
    house.jobs.close()


@pytest.fixture
async def resetting() -> AsyncIterator[House]:
    house = House("reset")
    yield house
    house.jobs.close()


@pytest.fixture(params=["check", "reset"])
async def house(request: pytest.FixtureRequest) -> AsyncIterator[House]:
    house = House(request.param)
    yield house
    house.jobs.close()


def after_looks(house: House, number: int, happens: Callable[[], None]) -> None:
    """Have the look of that number find something."""

    async def look() -> None:
        if [call for call, _ in house.asked].count("look") == number:
            happens()

    house.on_look = look


# --- both ---


async def test_only_resources_that_want_it_are_asked_before_a_start(house: House) -> None:
    assert house.starter.of(TOY) == house.starter.start
    assert house.starter.of(OTHER) is None
    assert house.starter.of("example.com/retired") is None


async def test_what_is_well_may_start_as_often_as_it_likes(house: House) -> None:
    with capture_logs() as logs:
        for _ in range(3):
            await house.start("b", "a", "a")
    assert house.asked[0] == ("look", ["a", "b"])
    assert [line["event"] for line in logs if line["event"] != "hardware-reset"] == []


async def test_an_id_that_nobody_knows_is_refused(house: House) -> None:
    assert "Device x of example.com/toy is not on this node: it is gone. The container st" in await house.refusal("x")
    assert house.asked == []


async def test_a_device_that_is_gone_is_refused(house: House) -> None:
    after_looks(house, 1, lambda: house.look(unit="a"))
    assert "Device a of example.com/toy is not on this node: it is gone" in await house.refusal("a", "b")
    assert house.resets == []


async def test_a_pod_whose_device_is_there_and_cannot_be_used_reads_why(house: House) -> None:
    held = Held(TOY, "a", KIND, frozenset({"toy:a"}))
    house.ledger.allocate([held], 0.0)
    house.inventory.claim([held])
    after_looks(house, 1, lambda: house.look(house.device("a", unusable="it is bound to vfio-pci, not to toy")))
    refusal = await house.refusal("a")
    assert "cannot be used now: it is bound to vfio-pci, not to toy; a pod still holds it. The container st" in refusal


async def test_another_card_in_its_place_is_refused_and_never_reset(house: House) -> None:
    house.look(house.device("a", identity="serial 1"))
    held = Held(TOY, "a", KIND, frozenset({"toy:a"}), "serial 1")
    house.ledger.allocate([held], 0.0)
    house.inventory.claim([held])
    house.record(XID)
    after_looks(house, 1, lambda: house.look(house.device("a", identity="serial 2")))
    assert "not what the pod was given: it is serial 2 now" in await house.refusal("a")
    assert house.resets == []


async def test_what_fell_ill_this_moment_is_refused(house: House) -> None:
    after_looks(house, 1, lambda: house.probe(HOT))
    assert "Device a of example.com/toy is unhealthy: It is too hot. The container starts once it is healthy again" in (
        await house.refusal("a")
    )
    assert house.resets == []


async def test_what_is_well_again_this_moment_may_start(house: House) -> None:
    house.probe(HOT)
    after_looks(house, 1, house.probe)
    await house.start("a")


async def test_what_it_depends_on_counts(house: House) -> None:
    house.look(house.device("b", depends=frozenset({"toy:a"})))
    house.record(XID)
    assert "its memory is bad" in await house.refusal("b")
    assert house.resets == [], "a reset of this one would not help the other"


async def test_what_is_degraded_may_start(house: House) -> None:
    house.probe(replace(HOT, verdict=Verdict.DEGRADED))
    await house.start("a")


# --- devices of several others ---


@pytest.fixture
def pool(checking: House) -> House:
    """The device p is put together of x, y and z; it can do with any of them."""
    parts = tuple(frozenset({f"toy:{key}"}) for key in "xyz")
    hardware = frozenset[str]().union(*parts)
    for key in "xyz":
        checking.look(checking.device(key))
    checking.look(checking.device("p", hardware=hardware, parts=parts))
    checking.hold("p", hardware=hardware)
    return checking


async def test_what_a_device_is_put_together_of_is_looked_at_too(pool: House) -> None:
    await pool.start("p")
    assert pool.asked[0] == ("look", ["p"])
    assert sorted(pool.asked[1:]) == [("look", ["x"]), ("look", ["y"]), ("look", ["z"])]


async def test_a_device_all_of_whose_parts_fell_ill_this_moment_is_refused(pool: House) -> None:
    async def look() -> None:
        (unit,) = pool.asked[-1][1]
        pool.inventory.set_health(pool.book.probed(KIND, {unit: [replace(HOT, hardware=f"toy:{unit}")]}, 0.0))

    pool.on_look = look
    assert "Device p of example.com/toy is unhealthy: It is too hot" in await pool.refusal("p")


@pytest.mark.parametrize(("hang", "starts"), [("x", True), ("xy", True), ("xyz", False)])
async def test_parts_that_cannot_be_looked_at_count_as_ill(pool: House, hang: str, starts: bool) -> None:
    async def look() -> None:
        (unit,) = pool.asked[-1][1]
        if unit in hang:
            raise LookError(f"reading {unit} has hung for more than 5 s")

    pool.on_look = look
    if starts:
        await pool.start("p")
    else:
        assert "Device p of example.com/toy is unhealthy: reading x has hung for more than 5 s" in await pool.refusal(
            "p"
        )


async def test_a_part_that_is_well_does_for_one_that_is_ill_and_one_that_hangs(pool: House) -> None:
    for key in "xy":
        pool.inventory.set_health(pool.book.probed(KIND, {key: [replace(HOT, hardware=f"toy:{key}")]}, 0.0))

    async def look() -> None:
        if pool.asked[-1] == ("look", ["z"]):
            raise LookError("reading z has hung for more than 5 s")

    await pool.start("p")
    pool.on_look = look
    assert "is unhealthy: It is too hot" in await pool.refusal("p")


async def test_a_device_of_parts_that_cannot_itself_be_looked_at_is_refused(pool: House) -> None:
    async def look() -> None:
        raise LookError("listing its units has hung for more than 5 s")

    pool.on_look = look
    assert "could not be looked at before the container's start: listing its units has hung" in await at_once(
        pool.refusal("p")
    )


async def test_a_resource_that_retires_lets_its_containers_start(house: House) -> None:
    house.hold("old", resource="example.com/retired")
    await house.start("old", name="example.com/retired")
    assert house.asked == []


@pytest.mark.usefixtures("seldom_looks")
async def test_a_look_that_hangs_is_answered_in_time(house: House) -> None:
    house.on_look = asyncio.Event().wait
    hangs = await at_once(house.refusal("a"))
    assert f"before the container's start: looking at it has not ended within {PRE_START_DEADLINE:g} s" in hangs


async def test_why_a_container_does_not_start_is_logged_once_and_that_it_does(house: House) -> None:
    house.probe(HOT)
    with capture_logs() as logs:
        for _ in range(3):
            await house.refusal("a")
        house.probe(replace(HOT, message="It is hotter."))
        await house.refusal("a")
        house.probe()
        await house.start("a")
        await house.start("a")
    said = [line["event"] for line in logs if line["event"] != "hardware-reset"]
    assert said == ["start-refused", "start-refused", "start-allowed"]
    assert house.starter._said == {}


async def test_what_can_do_without_its_sick_part_may_start_until_no_part_is_well(checking: House) -> None:
    parts = (frozenset({"toy:a"}), frozenset({"toy:b"}))
    checking.look(checking.device("b", hardware=frozenset({"toy:a", "toy:b"}), parts=parts))
    checking.probe(HOT)
    await checking.start("b")
    checking.probe(HOT, replace(HOT, hardware="toy:b"))
    assert "Device b of example.com/toy is unhealthy: It is too hot" in await checking.refusal("b")


# --- reset ---


async def started(resetting: House, gate: threading.Event) -> list[asyncio.Future[None]]:
    """Eight containers that start, once as many resets as there is room for wait for the gate."""
    keys = "abcefghi"
    for key in keys:
        resetting.look(resetting.device(key))
    resetting.hold(*keys)
    resetting.backend.on_prepare = lambda: gate.wait() and ()
    starts: list[asyncio.Future[None]] = [asyncio.ensure_future(resetting.start(key)) for key in keys]
    await until(lambda: [call for call, _ in resetting.asked].count("prepare") == ROOMS)
    return starts


async def test_more_containers_that_start_at_once_than_there_are_threads_wait_for_each_other(resetting: House) -> None:
    gate = threading.Event()
    starts = await started(resetting, gate)
    await resetting.jobs.workers(KIND).start(lambda: None)  # a claim finds a thread all the same
    gate.set()
    await asyncio.gather(*starts)
    assert len(resetting.resets) == len(starts)


async def test_resets_that_hang_beyond_their_deadline_leave_a_thread_for_claims(resetting: House) -> None:
    gate = threading.Event()
    starts = await started(resetting, gate)
    for start in starts[:ROOMS]:
        start.cancel()  # as the deadline does
    await asyncio.wait(starts[:ROOMS])
    await settled()
    await resetting.jobs.workers(KIND).start(lambda: None)
    assert [call for call, _ in resetting.asked].count("prepare") == ROOMS
    gate.set()
    await asyncio.gather(*starts[ROOMS:])


async def test_a_check_resets_nothing(checking: House) -> None:
    checking.record(XID)
    assert "XID 48" in await checking.refusal("a")
    assert [call for call, _ in checking.asked] == ["look"]


async def test_it_looks_resets_and_looks_again(resetting: House) -> None:
    await resetting.start("b", "a")
    assert resetting.asked == [("look", ["a", "b"]), ("prepare", ["a", "b"]), ("look", ["a", "b"])]
    assert resetting.resets == [{"toy:a", "toy:b"}]


async def test_a_reset_heals_what_waits_for_it(resetting: House) -> None:
    resetting.record(XID)
    await resetting.start("a")
    assert resetting.resets == [{"toy:a"}]


async def test_what_a_reset_would_not_heal_is_refused_without_one(resetting: House) -> None:
    resetting.record(XID)
    resetting.probe(HOT)
    assert "It is too hot" in await resetting.refusal("a")
    assert resetting.resets == []


async def test_hardware_that_is_ill_after_its_reset_is_refused(resetting: House) -> None:
    after_looks(resetting, 2, lambda: resetting.probe(HOT))
    assert "It is too hot" in await resetting.refusal("a")
    assert resetting.resets == [{"toy:a"}]


async def test_hardware_that_another_slot_holds_is_not_reset(resetting: House) -> None:
    resetting.ledger.allocate([Held(OTHER, "z", KIND, frozenset({"toy:a", "toy:z"}))], 0.0)
    assert "a, b of example.com/toy cannot be reset: it would disturb z of example.com/other" in (
        await resetting.refusal("b", "a")
    )
    await resetting.start("b")
    assert resetting.resets == [{"toy:b"}]


async def test_hardware_of_which_a_part_is_held_is_not_reset(resetting: House) -> None:
    resetting.look(replace(toy("d"), depends=frozenset({"toy:a"})))
    await resetting.start("a")  # nobody has d
    resetting.hold("d", resource=OTHER)
    assert "it would disturb d of example.com/other" in await resetting.refusal("a")


async def test_a_claim_that_begins_while_the_reset_waits_prevents_it(resetting: House) -> None:
    async with resetting.turns.take({"toy:a"}):
        waits = asyncio.ensure_future(resetting.start("a"))
        await asyncio.sleep(0)
        assert resetting.asked == [("look", ["a"])]
        resetting.ledger.allocate([Held(OTHER, "z", KIND, frozenset({"toy:a"}))], 0.0)
    with pytest.raises(AllocationRefused, match="it would disturb z"):
        await waits


@pytest.mark.usefixtures("seldom_looks")
async def test_a_reset_that_hangs_costs_one_thread_and_is_answered_in_time(resetting: House) -> None:
    let_go = threading.Event()
    resetting.backend.on_prepare = lambda: let_go.wait() and ()
    hangs = await at_once(resetting.refusal("a"))
    assert (
        "a of example.com/toy could not be reset before the container's start: "
        f"not done within {PRE_START_DEADLINE:g} s. The start"
    ) in hangs
    for _ in range(6):  # the kubelet's tries
        assert "an earlier call for the same hardware has not ended" in await at_once(resetting.refusal("a"))
    assert [call for call, _ in resetting.asked].count("prepare") == 1
    resetting.backend.on_prepare = lambda: ()
    await resetting.start("b")
    let_go.set()
    await resetting.start("a")
    assert resetting.resets[-1] == {"toy:a"}


async def test_the_backends_own_sentence_is_passed_on(resetting: House) -> None:
    def refuse() -> None:
        raise AllocationRefused("The card is locked.")

    resetting.backend.on_prepare = refuse
    assert await resetting.refusal("a") == "The card is locked."


@pytest.mark.parametrize("answer", ["toy:a", [7], 42], ids=repr)
async def test_nonsense_for_what_was_reset_is_the_backends_failure(resetting: House, answer: object) -> None:
    resetting.backend.on_prepare = lambda: answer
    sentence = await resetting.refusal("a")
    assert "a of example.com/toy could not be reset before the container's start: the backend toy failed" in sentence
    assert resetting.resets == []


async def test_a_backend_that_yields_what_it_resets_has_reset_it(resetting: House) -> None:
    resetting.backend.on_prepare = lambda: (name for name in ["toy:a"])
    await resetting.start("a")
    assert resetting.resets == [{"toy:a"}]


async def test_a_backend_that_raises_is_named_to_the_administrator(resetting: House) -> None:
    def fail() -> None:
        raise OSError(5, "I/O error")

    resetting.backend.on_prepare = fail
    assert "the backend toy failed ([Errno 5] I/O error). This node's adm" in await resetting.refusal("a")


async def test_a_caller_that_hangs_up_leaves_the_turn_to_the_reset(resetting: House) -> None:
    let_go = threading.Event()
    resetting.backend.on_prepare = lambda: let_go.wait() and ()
    call = asyncio.ensure_future(resetting.start("a"))
    await until(lambda: ("prepare", ["a"]) in resetting.asked)
    call.cancel()
    await asyncio.wait([call])
    assert resetting.turns.is_taken({"toy:a"})
    let_go.set()
    async with limit(), resetting.turns.take({"toy:a"}):
        assert resetting.resets == []


async def test_no_container_starts_with_a_device_that_two_pods_hold(checking: House) -> None:
    """Which of the two is to start, the kubelet does not say."""
    twice = [(TOY, "a")]

    async def two_pods(slots: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        return [slot for slot in slots if slot in twice]

    backends = {KIND: checking.backend}
    checking.starter = Starter(checking.inventory, checking.ledger, backends, checking.jobs, checking, two_pods)
    assert "Device a of example.com/toy is held by two pods" in await checking.refusal("a", "b")
    await checking.start("b")
    twice.clear()
    await checking.start("a")
