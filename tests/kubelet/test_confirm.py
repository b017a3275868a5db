"""What is read of the kubelet before each list that it gets."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from agent.claims.ledger import Answer, Ledger, Trace, Traced
from agent.inventory.inventory import Inventory
from agent.kubelet import pod_claims, witnesses
from agent.kubelet.api.v1beta1 import ContainerAllocateResponse, DeviceSpec
from agent.kubelet.pod_claims import PodClaims
from agent.kubelet.witnesses import Checkpoint, CheckpointEntry, CheckpointError, CheckpointReader
from agent.model import Held, SlotKey
from backends.base import Device
from tests.wait import limit, until

TOY = "example.com/toy"
KIND = "stub"


def must_be_waited_for(_: Path) -> Checkpoint | None:
    raise BlockingIOError


class Readings:
    """Stands for the reading of a checkpoint: each waits until it is let go, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.found: Checkpoint | None = None
        self.error: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        monkeypatch.setattr(witnesses, "read_checkpoint", self._read)
        monkeypatch.setattr(witnesses, "read_at_once", must_be_waited_for)

    def hold(self, *ids: str) -> None:
        self.found = Checkpoint((1, 1, 1), (), {TOY: frozenset(ids)})

    def _read(self, _: Path) -> Checkpoint | None:
        self.begun += 1
        found = self.found
        self.go.wait()
        if self.error is not None:
            raise self.error
        return found


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Readings:
    return Readings(monkeypatch)


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[CheckpointReader]:
    reader = CheckpointReader(tmp_path)
    yield reader
    reader.close()


async def test_those_who_ask_during_a_reading_share_the_next(reader: CheckpointReader, readings: Readings) -> None:
    readings.go.clear()
    first = asyncio.create_task(reader.read())
    await until(lambda: readings.begun == 1, "the first reading")
    readings.hold("a")
    later = [asyncio.create_task(reader.read()) for _ in range(5)]
    await asyncio.sleep(0)
    readings.go.set()
    async with limit("the readings"):
        assert await first is None
        assert await asyncio.gather(*later) == [readings.found] * 5
    assert readings.begun == 2


class Lists(Inventory):
    """Of one resource, with the devices that are put there."""

    def __init__(self) -> None:
        super().__init__([], {})
        self.of_slots: dict[SlotKey, Device] = {}

    def names(self) -> list[str]:
        return [TOY]

    def kind(self, name: str) -> str | None:
        return KIND if name == TOY else None

    def device(self, slot: SlotKey) -> Device | None:
        return self.of_slots.get(slot)


class Told:
    """A node that remembers what it was told."""

    def __init__(self) -> None:
        self.began: list[Held] = []
        self.ended: list[str] = []
        self.resent: list[str] = []

    def adopted(self, held: Sequence[Held]) -> None:
        self.began.extend(held)

    def released(self, ended: Sequence[Held]) -> None:
        self.ended.extend(claim.id for claim in ended)

    def resend(self, resource: str) -> None:
        self.resent.append(resource)

    def claims_settled(self) -> None: ...

    def claims_asked(self) -> None: ...


class AllLead:
    """A tracer to which every trace with a node leads to a card."""

    def ours(self, _: Trace) -> tuple[()]:
        return ()

    def traced(self, answers: Mapping[SlotKey, Answer], *_: object) -> dict[SlotKey, Traced]:
        card = frozenset({"card"})
        return {slot: Traced(it.pods, card, card) for slot, it in answers.items() if it.trace.nodes}


class House:
    def __init__(self, root: Path) -> None:
        self.told, self.listed = Told(), set[str]()
        self.witnesses = PodClaims(Ledger(), Lists(), self.told, root / "podresources.sock", root)
        self.witnesses._tracer = AllLead()  # type: ignore[assignment]

    async def confirm(self) -> None:
        async with limit("a list's confirmation"):
            await self.witnesses.confirm(TOY, lambda: self.listed)

    @property
    def ids(self) -> list[str]:
        return sorted(held.id for held in self.told.began)


@pytest.fixture
async def house(tmp_path: Path, readings: Readings) -> AsyncIterator[House]:
    house = House(tmp_path)
    await house.witnesses.ask()
    yield house
    readings.go.set()
    house.witnesses.close()


async def test_what_nobody_knew_to_be_held_is_taken_in_whether_the_list_has_it_or_not(
    house: House, readings: Readings
) -> None:
    readings.hold("a", "b")
    house.listed = {"b"}
    await house.confirm()
    assert house.ids == ["a", "b"]
    await house.confirm()
    assert house.ids == ["a", "b"]


async def test_the_hardware_of_what_a_list_has_is_traced_once_the_checkpoint_tells_of_it(
    house: House, readings: Readings
) -> None:
    readings.hold("a")  # adopted without hardware: its answer is not written yet
    await house.confirm()
    answer = ContainerAllocateResponse(devices=[DeviceSpec("/dev/x", "/dev/w1", "rw")])
    entry = CheckpointEntry("pod", "main", TOY, ("a",), msgspec.json.encode(bytes(answer)))
    readings.found = Checkpoint((1, 1, 2), (entry,), {TOY: frozenset({"a"})})
    house.listed = {"a"}
    await house.confirm()
    assert [held.hardware for held in house.told.began] == [frozenset(), frozenset({"card"})]


async def test_a_damaged_checkpoint_is_told_and_holds_no_list_up(house: House, readings: Readings) -> None:
    readings.error = CheckpointError("it is damaged")
    await house.confirm()
    assert house.witnesses._silent["checkpoint"].reason == "it is damaged"
    readings.error = None
    readings.hold("a")
    await house.confirm()
    assert house.ids == ["a"]


async def test_a_reading_that_hangs_holds_up_one_list_and_no_other(
    house: House, readings: Readings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_claims, "_LIST_WAITS", 0)
    readings.go.clear()
    await house.confirm()
    await until(lambda: readings.begun == 2, "the reading that hangs")
    begun = readings.begun
    await house.confirm()
    assert readings.begun == begun
    assert house.witnesses._silent["checkpoint"].reason == "reading it hangs"
    monkeypatch.setattr(pod_claims, "_LIST_WAITS", 3600.0)
    readings.hold("a")
    readings.go.set()
    await until(lambda: not house.witnesses._checkpoint.under_way, "the end of what hung")
    await house.confirm()
    assert house.ids == ["a"]


async def test_a_checkpoint_is_read_again_only_when_the_kubelet_has_written_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = count_readings(monkeypatch)
    write(tmp_path, pod="a", age=10)
    house = House(tmp_path)
    await house.witnesses.ask()
    for _ in range(2):
        await house.confirm()
    assert (len(readings), house.ids) == (1, ["a"])
    write(tmp_path, pod="b", age=5)
    await house.confirm()
    house.witnesses.close()
    assert (len(readings), house.ids) == (2, ["a", "b"])


async def test_a_checkpoint_that_was_just_written_is_read_again_as_another_may_have_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = count_readings(monkeypatch)
    write(tmp_path, pod="a", age=-10)  # by a clock that was set back, too
    house = House(tmp_path)
    await house.witnesses.ask()
    for _ in range(2):
        await house.confirm()
    house.witnesses.close()
    assert len(readings) == 3


async def test_a_reading_that_fails_makes_no_young_checkpoint_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, pod="a", age=0)
    now = (tmp_path / witnesses.FILE_NAME).stat().st_mtime
    reader = CheckpointReader(tmp_path, wall=lambda: now)
    assert await reader.read() is not None
    now += 60

    def fails(_: Path) -> Checkpoint:
        raise CheckpointError("damaged")

    monkeypatch.setattr(witnesses, "read_at_once", fails)
    with pytest.raises(CheckpointError):
        await reader.read()
    reader.close()
    assert not reader.is_unchanged()


def count_readings(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What was read from now on, at once or in a thread: not each file system can be read at once."""
    readings: list[bytes] = []
    original = witnesses.parse_checkpoint

    def counted(data: bytes, version: witnesses.Version) -> Checkpoint:
        readings.append(data)
        return original(data, version)

    monkeypatch.setattr(witnesses, "parse_checkpoint", counted)
    return readings


def write(directory: Path, pod: str, age: float) -> None:
    """Write a checkpoint as the kubelet does, so many seconds ago: beside the old one, and then in its place."""
    entry = {"PodUID": pod, "ContainerName": "main", "ResourceName": TOY, "DeviceIDs": {"-1": [pod]}, "AllocResp": None}
    fresh = directory / "fresh"
    fresh.write_bytes(msgspec.json.encode({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 1}))
    written = fresh.stat().st_mtime - age
    os.utime(fresh, (written, written))
    fresh.rename(directory / witnesses.FILE_NAME)


async def test_first_lists_of_many_resources_cost_one_question(tmp_path: Path, readings: Readings) -> None:
    house = House(tmp_path)
    asked = 0
    original: Callable[..., object] = house.witnesses._ask

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await original()  # type: ignore[misc]

    house.witnesses._ask = ask  # type: ignore[method-assign]
    await asyncio.gather(*(house.confirm() for _ in range(5)))
    house.witnesses.close()
    assert asked == 1
