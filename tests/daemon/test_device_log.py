from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.daemon.list_reporter import tell
from agent.daemon.list_reporter import transitions as every_transition
from agent.model import HEALTHY, Health, Slot, Snapshot, State, Transition
from agent.runtime.counts import Counts
from backends.base import Device
from tests.fakes import device

NAME = "a.example/one"
CARD = device("card")
SICK = Health(State.UNHEALTHY, "sick", "It is sick.")


def slots(*ids: str, health: Health = HEALTHY) -> dict[str, Slot]:
    return {i: Slot(i, CARD, health) for i in ids}


async def transitions(before: Mapping[str, Slot], after: Snapshot) -> list[Transition]:
    return (await every_transition(before, after, why)).first(10)


def why(_device: Device) -> tuple[str, str]:
    return "gone", "it is not there any more"


async def test_a_device_with_a_thousand_ids_is_one_transition() -> None:
    ids = [f"card::{n}" for n in range(1000)]
    after = Snapshot(NAME, 2, slots(*ids, health=SICK), frozenset(ids))
    assert await transitions(slots(*ids), after) == [Transition(NAME, "card", "Unhealthy", "sick", "It is sick.", 1000)]


async def test_what_appears_is_healthy_and_what_vanishes_is_gone() -> None:
    appeared = Snapshot(NAME, 2, slots("card"), frozenset({"card"}))
    assert await transitions({}, appeared) == [Transition(NAME, "card", "Healthy", "", "", 1)]
    vanished = Snapshot(NAME, 3, {}, frozenset({"card"}))
    assert await transitions(appeared.slots, vanished) == [
        Transition(NAME, "card", "Gone", "gone", "it is not there any more", 1)
    ]


async def test_a_tombstone_goes_by_its_id() -> None:
    after = Snapshot(NAME, 2, {"card::1": Slot("card::1", None, SICK)}, frozenset({"card::1"}))
    assert (await transitions(slots("card::1"), after))[0].device == "card::1"


async def test_an_id_that_was_written_again_without_a_change_is_none() -> None:
    assert await transitions(slots("card"), Snapshot(NAME, 2, slots("card"), frozenset({"card"}))) == []


async def test_when_all_is_taken_as_changed_only_what_differs_is_told() -> None:
    after = Snapshot(NAME, 2, slots("b") | slots("c", health=SICK))
    assert [(t.state, t.ids) for t in await transitions(slots("a", "b", "c"), after)] == [("Gone", 1), ("Unhealthy", 1)]


@pytest.mark.parametrize(("lost", "level"), [(11, "warning"), (10, "info")])
async def test_of_many_changes_the_losses_are_told_first_and_those_that_have_no_line_are_warned_of(
    lost: int, level: str
) -> None:
    every = [f"d{n:02}" for n in range(30)]
    cards = {name: Slot(name, device(name), HEALTHY) for name in every}
    after = {name: Slot(name, device(name), SICK) for name in every[-lost:]}
    with capture_logs() as lines:
        await tell({name: cards[name] for name in after}, Snapshot(NAME, 2, cards | after), Counts(), why)
    assert [line["device"] for line in lines[:10]] == every[-lost:][:10]
    assert (lines[10]["event"], lines[10]["count"], lines[10]["log_level"]) == ("devices-changed", 20, level)


async def test_what_is_not_well_when_it_is_first_listed_is_warned_of_and_no_change() -> None:
    counts = Counts()
    with capture_logs() as lines:
        await tell(None, Snapshot(NAME, 1, slots("a", "b") | slots("c", health=SICK)), counts, why)
    listed, changed = lines
    assert (listed["event"], listed["count"], listed["healthy"]) == ("resource-listed", 3, 2)
    assert (changed["event"], changed["log_level"], changed["message"]) == ("device-changed", "warning", "It is sick.")
    assert not counts.transitions


async def test_a_device_that_goes_is_named_as_people_call_it_with_why() -> None:
    read = {"model": ("NVIDIA H100 80GB HBM3",), "vendor": ("10de",), "minor": ("3",)}
    gpu = replace(device("GPU-5f3c2a3b"), attributes=read)
    before = {name: Slot(name, gpu, HEALTHY) for name in ("GPU-5f3c2a3b", "GPU-5f3c2a3b::1")}
    with capture_logs() as lines:
        await tell(before, Snapshot(NAME, 2, {}, frozenset(before)), Counts(), why)
    (line,) = lines
    told = {name: line[name] for name in ("device", "called", "state", "reason", "message", "count")}
    assert told == {
        "device": "GPU-5f3c2a3b", "called": "H100 nvidia3", "state": "Gone", "reason": "gone",
        "message": "it is not there any more", "count": 2,
    }  # fmt: skip


async def test_what_was_listed_for_a_pod_alone_goes_with_it() -> None:
    tomb = Slot("card::1", None, SICK)
    gone = Snapshot(NAME, 2, {}, frozenset({"card::1"}))
    (it,) = await transitions({"card::1": tomb}, gone)
    assert (it.state, it.reason, it.message) == ("Gone", "released", "no pod holds it any more")
    await tell({"card::1": tomb}, gone, counts := Counts(), why)
    assert counts.transitions == {(NAME, "released"): 1}  # when it went it was counted as gone
