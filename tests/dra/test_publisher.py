"""The ResourceSlices of a node: they are as the inventory is, whatever happens to them, to us and to the API server."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from agent.dra.publisher import Rate
from agent.dra.slices import MOST_DEVICES
from agent.health.book import DRAINED
from agent.kubernetes.api import ApiError
from agent.model import HEALTHY, Health, State
from backends.base import Device
from tests.dra.stage import DRIVER, NODE, Stage, by_claim, claimed
from tests.fakes import KIND, device, held, reconfigure, resource
from tests.wait import pass_time, settled, until

GPU, STICK = "example.com/gpu", "example.com/stick"
SICK = Health(State.UNHEALTHY, "xid-79", "It has fallen off the bus.")
SO_SO = Health(State.DEGRADED, "slow", "Its link is slow.")
POOL = f"{NODE}/{GPU}"


def cards(count: int) -> list[Device]:
    return [device(f"0000:{number:02x}:00.0", GPU) for number in range(count)]


async def test_a_node_offers_its_devices_as_soon_as_they_are_known_and_as_they_are() -> None:
    stage = Stage(claimed(GPU), resource(STICK))
    async with stage.running():
        assert stage.objects.slices == {}
        stage.find(device("0000:3b:00.0", GPU), device("stick", STICK))
        await settled()
        assert stage.shown(GPU) == {"0000-3b-00-0": ""}
        assert stage.shown(STICK) == {}
        (made,) = stage.objects.slices.values()
        assert made["spec"]["nodeName"] == NODE
        assert made["spec"]["driver"] == DRIVER
        assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-of-the-node"
        stage.say("0000:3b:00.0", SICK)
        await settled()
        assert stage.shown(GPU) == {"0000-3b-00-0": f"{DRIVER}/unhealthy=xid-79:NoSchedule"}
        stage.say("0000:3b:00.0", Health(State.UNHEALTHY, DRAINED, "An operator drained it."))
        await settled()
        assert stage.shown(GPU) == {"0000-3b-00-0": f"{DRIVER}/drained=drained:NoSchedule"}
        stage.say("0000:3b:00.0", SO_SO)
        await settled()
        assert stage.shown(GPU) == {"0000-3b-00-0": f"{DRIVER}/degraded=slow:None"}
        stage.say("0000:3b:00.0", HEALTHY)
        await settled()
        assert stage.shown(GPU) == {"0000-3b-00-0": ""}


async def test_a_kubelet_that_starts_deletes_all_slices_and_they_are_there_again() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(3))
    async with stage.running():
        generation = (
            stage.objects.pool(POOL) and next(iter(stage.objects.slices.values()))["spec"]["pool"]["generation"]
        )
        for _ in range(20):
            stage.objects.wipe()
            await until(lambda: len(stage.shown(GPU)) == 3)
        await settled()
        assert next(iter(stage.objects.slices.values()))["spec"]["pool"]["generation"] > generation


async def test_a_pool_of_several_slices_is_never_left_incomplete_and_goes_on_from_the_api_servers_generation() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(2 * MOST_DEVICES + 1))
    async with stage.running():
        assert [len(it["spec"]["devices"]) for it in stage.objects.slices.values()] == [64, 64, 1]
        assert len(stage.shown(GPU)) == 129
    one = next(iter(stage.objects.slices))
    stage.objects.remove(f"resourceslices/{one}")
    for path, it in list(stage.objects.kept.items()):
        it["spec"]["pool"]["generation"] = 41
        stage.objects.put(path, it)
    again = Stage(claimed(GPU))
    again.objects, again.api.objects = stage.objects, stage.objects
    again.find(*cards(2 * MOST_DEVICES + 1))
    stage.objects.writes.clear()
    async with again.running():
        assert len(again.shown(GPU)) == 129
        assert stage.objects.writes == [("POST", f"resourceslices/{one}")], "what was there and right was left alone"
        again.say("0000:01:00.0", SICK)
        await settled()
        assert {it["spec"]["pool"]["generation"] for it in stage.objects.slices.values()} == {42}
        assert len(again.shown(GPU)) == 129


async def test_a_pool_that_shrinks_loses_its_last_slice_and_is_complete() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(65))
    async with stage.running():
        stage.inventory.update("fake", {"0000:40:00.0": ()})
        stage.publisher.changed([GPU])
        await settled()
        assert len(stage.shown(GPU)) == 64
        assert len(stage.objects.slices) == 1


async def test_what_somebody_else_writes_into_our_slices_is_put_right() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(2))
    async with stage.running():
        (name,) = stage.objects.slices
        it = stage.objects.slices[name]
        stage.objects.put(f"resourceslices/{name}", {**it, "spec": {**it["spec"], "devices": []}})
        await until(lambda: len(stage.shown(GPU)) == 2)
        stage.objects.put(
            "resourceslices/older",
            {
                **it,
                "metadata": {"name": "older"},
                "spec": {**it["spec"], "pool": {"name": "left", "generation": 1, "resourceSliceCount": 1}},
            },
        )
        await until(lambda: list(stage.objects.slices) == [name])


async def test_a_write_that_comes_too_late_is_made_again_with_what_is_there() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    async with stage.running():
        (name,) = stage.objects.slices
        conflicts = [409, 409]
        stage.objects.refuses = lambda method, _path: conflicts.pop() if method == "PUT" and conflicts else None
        stage.say("0000:00:00.0", SICK)
        await settled()
        pass_time(30)
        await settled()
        assert stage.shown(GPU)["0000-00-00-0"]
        stage.objects.refuses = lambda _method, _path: None
        del stage.objects.kept[f"resourceslices/{name}"]  # and nobody tells
        stage.say("0000:00:00.0", HEALTHY)
        await settled()
        pass_time(30)
        await settled()
        assert stage.shown(GPU) == {"0000-00-00-0": ""}


@pytest.mark.parametrize("deleted", [GPU, STICK, "neither, and the list is refused"])
async def test_slices_that_a_kubelet_deletes_while_they_are_listed_after_a_conflict_are_there_again(
    monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    stage = Stage(claimed(GPU), claimed(STICK))
    stage.find(*cards(1), device("stick", STICK))
    call, conflicts = stage.api.call, [409]

    async def answered_late(method: str, path: str, *args: Any) -> bytes:
        answer = await call(method, path, *args)
        if "fieldSelector" in path and not conflicts:
            monkeypatch.undo()
            if deleted not in (GPU, STICK):
                raise ApiError("too many requests", 429)
            for name, it in stage.objects.slices.items():
                if it["spec"]["pool"]["name"] == f"{NODE}/{deleted}":
                    stage.objects.remove(f"resourceslices/{name}")
            for _ in range(5):  # the watch, which has a connection of its own, tells of it first
                await asyncio.sleep(0)
        return answer

    monkeypatch.setattr(stage.api, "call", answered_late)
    async with stage.running():
        stage.objects.refuses = lambda method, _path: conflicts.pop() if method == "PUT" and conflicts else None
        stage.say("0000:00:00.0", SICK)
        await settled()
        pass_time(30)
        await settled()
        assert stage.shown(GPU) == {"0000-00-00-0": f"{DRIVER}/unhealthy=xid-79:NoSchedule"}
        assert stage.shown(STICK) == {"stick": ""}
        assert stage.problems.lasting() == []


async def test_a_write_that_conflicts_again_and_again_has_the_slices_listed_before_each_further_try() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    async with stage.running():
        conflicts = [409] * 3
        stage.objects.refuses = lambda method, _path: conflicts.pop() if method == "PUT" and conflicts else None
        (name,) = stage.objects.slices
        stage.say("0000:00:00.0", SICK)
        await settled()
        stage.objects.kept.pop(f"resourceslices/{name}")  # and nobody tells
        assert conflicts == [409]
        pass_time(30)
        await settled()
        assert stage.shown(GPU)["0000-00-00-0"]


async def test_a_watch_that_is_too_old_begins_again_with_a_list() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    async with stage.running():
        stage.objects.kept.clear()
        stage.objects.put("deviceclasses/other", {"metadata": {"name": "other"}, "spec": {}})
        stage.objects.forget()
        await until(lambda: stage.shown(GPU))
        assert stage.problems.lasting() == []


async def test_an_api_server_that_calls_every_version_too_old_is_asked_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    asked, watch = 0, stage.api.watch

    async def too_old(*args: Any) -> None:
        nonlocal asked
        asked += 1
        if asked < 50:
            raise ApiError("too old resource version", 410)
        await watch(*args)

    monkeypatch.setattr(stage.api, "watch", too_old)
    async with stage.running():
        assert asked == 2, "at once, where it was only that version"
        for _ in range(10):
            pass_time(20)
            await settled()
        assert asked == 12
        assert "too old" in stage.problems.lasting()[0].sentence
        for _ in range(40):
            pass_time(20)
            await settled()
        assert stage.problems.lasting() == []


async def test_a_storm_of_a_thousand_changes_makes_few_writes_and_the_last_one_is_right() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(8))
    async with stage.running():
        stage.objects.writes.clear()
        for number in range(1000):
            stage.say("0000:03:00.0", HEALTHY if number % 2 else SICK)
            pass_time(0.02)
            if number % 7 == 0:
                await settled()
        stage.say("0000:03:00.0", SO_SO)
        pass_time(5)
        await settled()
        assert stage.shown(GPU)["0000-03-00-0"] == f"{DRIVER}/degraded=slow:None"
        assert 3 < len(stage.objects.writes) <= 20
        pass_time(60)  # it is quiet again
        stage.say("0000:03:00.0", HEALTHY)
        await settled()
        assert stage.shown(GPU)["0000-03-00-0"] == ""


async def test_many_slices_that_change_at_once_hold_up_no_later_change_for_more_than_5_s() -> None:
    names = [f"example.com/r{number}" for number in range(10)]
    stage = Stage(*map(claimed, names))
    stage.find(*(device(name, name) for name in names))
    async with stage.running():
        for name in names:
            stage.say(name, SICK)
        await settled()
        assert all(it.endswith("NoSchedule") for name in names for it in stage.shown(name).values())
        for name in names:
            stage.say(name, HEALTHY)
        stage.objects.wipe()
        await settled()
        pass_time(5)
        await settled()
        assert {it for name in names for it in stage.shown(name).values()} == {""}
        assert all(map(stage.shown, names))


def test_while_changes_go_on_there_is_an_update_every_5_s() -> None:
    now = [0.0]
    rate, sent = Rate(lambda: now[0]), list[float]()
    while now[0] < 60:
        now[0] += rate.wait()
        sent.append(now[0])
        rate.spent()
    assert sent[:6] == [0.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    assert [after - before for before, after in pairwise(sent[-9:])] == [5.0] * 8


async def test_what_a_mistake_of_ours_has_left_half_done_is_done_when_it_runs_again() -> None:
    fails = [True]

    async def record(_offered: frozenset[str]) -> bool:
        if fails.pop():
            raise LookupError
        return True

    stage = Stage(claimed(GPU), record=record)
    stage.find(*cards(1))
    with pytest.RaisesGroup(LookupError):
        async with stage.running():
            await settled()
    fails[:] = [False, False]
    async with stage.running():
        assert len(stage.shown(GPU)) == 1
    assert fails == [False], "before it writes, it has had it kept of what"


async def test_a_resource_that_is_removed_after_a_mistake_of_ours_holds_up_no_other() -> None:
    kept, removed = claimed(GPU), claimed(STICK)
    stage = Stage(kept, removed)
    stage.find(*cards(1), device("stick", STICK))
    fake = stage.backends.pop(KIND)
    with pytest.RaisesGroup(KeyError):
        async with stage.running():
            await settled()
    stage.backends[KIND] = fake
    reconfigure(stage.inventory, [kept], stage.backends)
    async with stage.running():
        assert stage.shown(GPU) == {"0000-00-00-0": ""}


async def test_the_record_of_what_the_api_server_has_is_tried_again_until_there_is_room_for_it() -> None:
    tried = list[frozenset[str]]()

    async def record(offered: frozenset[str]) -> bool:
        tried.append(offered)
        return len(tried) > 4

    stage = Stage(claimed(GPU), claimed(STICK), record=record, recorded=["example.com/gone"])
    stage.find(*cards(1), device("stick", STICK))
    async with stage.running():
        assert stage.shown(GPU)
        assert tried == [{GPU, STICK, "example.com/gone"}, {GPU, STICK}]
        for _ in range(3):
            pass_time(30)
            await settled()
        assert tried[2:] == [
            {GPU, STICK, "example.com/gone"},
            {GPU, STICK},
            {GPU, STICK, "example.com/gone"},
            {GPU, STICK},
        ]


async def test_while_the_api_server_is_away_one_problem_is_told_and_afterwards_all_is_right() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    async with stage.running():
        stage.api.is_away = True
        stage.say("0000:00:00.0", SICK)
        await settled()
        stage.api.is_away = False
        pass_time(30)
        await settled()
        assert stage.shown(GPU)["0000-00-00-0"].endswith("NoSchedule")


@pytest.mark.parametrize("status", [HTTPStatus.FORBIDDEN, HTTPStatus.UNPROCESSABLE_ENTITY])
async def test_a_pool_that_is_refused_is_a_problem_and_holds_up_no_other(status: int) -> None:
    stage = Stage(claimed(GPU), claimed(STICK))
    stage.find(*cards(1), device("stick", STICK))
    first = True

    def refuse(method: str, _path: str) -> int | None:
        nonlocal first
        is_first, first = first and method == "POST", first and method != "POST"
        return status if is_first else None

    stage.objects.refuses = refuse
    async with stage.running():
        assert [it.part for it in stage.problems.lasting()] == ["dra"]
        assert stage.shown(STICK) == {"stick": ""}
        assert stage.counts.slice_writes == {"failed": 1, "written": 1}
        pass_time(30)
        await settled()
        assert stage.shown(GPU)
        assert stage.problems.lasting() == []


async def test_slices_stay_while_the_devices_behind_them_are_not_known_yet() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    async with stage.running():
        pass
    again = Stage(claimed(GPU))
    again.objects, again.api.objects = stage.objects, stage.objects
    async with again.running():
        assert stage.shown(GPU), "a restart takes nothing away before it knows better"
        again.find()
        await settled()
        assert stage.shown(GPU) == {}


async def test_an_api_server_without_taints_does_not_show_what_is_not_healthy() -> None:
    stage = Stage(claimed(GPU))
    stage.objects.knows_taints = False
    stage.find(*cards(2))
    async with stage.running():
        stage.say("0000:01:00.0", SICK)
        await settled()
        assert stage.shown(GPU) == {"0000-00-00-0": ""}
        assert "DRADeviceTaints" in stage.problems.lasting()[0].sentence
        stage.say("0000:01:00.0", HEALTHY)
        await settled()
        assert len(stage.shown(GPU)) == 2


async def test_pods_lose_an_unhealthy_device_only_where_that_is_configured_late_and_few_at_a_time() -> None:
    stage = Stage(claimed(GPU), claimed(STICK), no_execute=(GPU,), after=300.0)
    stage.find(*cards(3), device("stick", STICK))
    async with stage.running():
        names = [f"0000:0{number}:00.0" for number in range(3)]
        stage.inventory.claim([by_claim(held(GPU, it, device(it, GPU))) for it in names[:2]])
        stage.inventory.claim([by_claim(held(STICK, "stick", device("stick", STICK)))])
        for name in (*names, "stick"):
            stage.say(name, SICK)
        await settled()
        assert {it.rpartition(":")[2] for it in (stage.shown(GPU) | stage.shown(STICK)).values()} == {"NoSchedule"}
        pass_time(301)
        await settled()
        effects = [it.rpartition(":")[2] for it in stage.shown(GPU).values()]
        assert effects == ["NoExecute", "NoSchedule", "NoSchedule"]
        assert stage.shown(STICK)["stick"].endswith("NoSchedule")
        stage.inventory.unclaim([by_claim(held(GPU, names[0], device(names[0], GPU)))])
        stage.publisher.changed([GPU])
        await settled()
        assert [it.rpartition(":")[2] for it in stage.shown(GPU).values()] == effects, "no second pod has to go for it"
        stage.say(names[0], HEALTHY)
        await settled()
        assert [it.rpartition(":")[2] for it in stage.shown(GPU).values()] == ["", "NoExecute", "NoSchedule"]


async def test_withdrawing_deletes_what_is_ours_and_nothing_else() -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    async with stage.running():
        (it,) = stage.objects.slices.values()
    stage.objects.put(
        "resourceslices/theirs",
        {**it, "metadata": {"name": "theirs"}, "spec": {**it["spec"], "driver": "gpu.nvidia.com"}},
    )
    await stage.publisher.withdraw(stage.api)
    assert list(stage.objects.slices) == ["theirs"]
    assert not stage.publisher.has(GPU)


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_what_happens_to_a_slice_before_we_have_the_answer_to_our_write_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    stage = Stage(claimed(GPU))
    stage.find(*cards(1))
    call = stage.api.call

    async def answered_late(method: str, *args: Any) -> bytes:
        answer = await call(method, *args)
        if method == "PUT":
            (name,) = stage.objects.slices
            if is_deleted:
                stage.objects.wipe()
            else:
                it = stage.objects.slices[name]
                stage.objects.put(f"resourceslices/{name}", {**it, "spec": {**it["spec"], "devices": []}})
            monkeypatch.undo()
            for _ in range(5):
                await asyncio.sleep(0)
        return answer

    monkeypatch.setattr(stage.api, "call", answered_late)
    async with stage.running():
        stage.say("0000:00:00.0", SICK)
        await until(lambda: len(stage.objects.writes) == 3 and stage.shown(GPU))
        assert stage.shown(GPU)["0000-00-00-0"].endswith("NoSchedule")


async def test_a_pool_in_which_devices_exclude_each_other_has_counters_in_a_slice_of_their_own() -> None:
    stage = Stage(claimed(STICK))
    place = frozenset({"usb:0000:00:14.0-usbv2-2"})
    whole = replace(device("usb:1-2", STICK, hardware=["usb:1-2", "node:c:189:4"]), place=place)
    part = replace(device("/dev/ttyUSB0", STICK, hardware=["node:c:188:0"]), place=place)
    stage.find(whole, part)
    async with stage.running():
        devices, counters = (it["spec"] for it in stage.objects.slices.values())
        assert [it["consumesCounters"] for it in devices["devices"]] == [
            [{"counterSet": "usb--c1-2", "counters": {"parts": {"value": "1"}}}]
        ] * 2
        assert counters["sharedCounters"] == [{"name": "usb--c1-2", "counters": {"parts": {"value": "1"}}}]
        assert devices["pool"] == counters["pool"]
        writes = len(stage.objects.writes)
        stage.find(whole, part)
        await settled()
        assert len(stage.objects.writes) == writes
        stage.inventory.update(KIND, {part.unit: ()})
        stage.find()
        await settled()
        (devices,) = (it["spec"] for it in stage.objects.slices.values())
        assert "consumesCounters" not in devices["devices"][0]
