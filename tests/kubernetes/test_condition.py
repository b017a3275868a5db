from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from agent.health.book import DRAINED
from agent.inventory.ownership import HELD_AND_GONE
from agent.inventory.shortfall import Missing
from agent.kubernetes.own_node import HEARTBEAT, TYPE, Condition, ConditionKeeper, Resources, condition
from agent.model import HEALTHY, Health, Slot, State
from agent.runtime.problems import Problems
from agent.runtime.workers import Workers
from tests.fakes import device
from tests.kubernetes.fakes import FakeApi
from tests.wait import pass_time, settled

GPU = "nvidia.com/gpu"
SICK = Health(State.UNHEALTHY, "xid-79", "it has fallen off the bus")
WELL = Condition("True", "DevicesHealthy", "every device can be given to pods")


def slots(**health: Health) -> Resources:
    return {GPU: {name: Slot(name, device(name), it) for name, it in health.items()}}


@pytest.mark.parametrize(
    "health",
    [HEALTHY, Health(State.DEGRADED, "nvlink", "a link is down"), Health(State.UNHEALTHY, DRAINED, "an operator")],
)
def test_a_node_is_well_whose_devices_can_be_given_or_were_drained(health: Health) -> None:
    assert condition(slots(a=HEALTHY, b=health), []) == WELL


def test_what_fails_and_what_is_not_offered_is_named_with_its_reason() -> None:
    told = condition(slots(a=SICK, b=HEALTHY), [Missing(GPU, "gpu", "unusable", "no driver", device("c"))])
    assert told == Condition(
        "False", "DevicesUnhealthy", f"1 unhealthy, 1 not offered: a of {GPU} (xid-79), c of {GPU} (unusable)"
    )


def test_a_device_counts_once_however_many_share_it_and_also_when_it_is_gone() -> None:
    shared = device("a")
    found = {f"a::{n}": Slot(f"a::{n}", shared, SICK) for n in range(4)}
    told = condition({GPU: {**found, "b": Slot("b", None, HELD_AND_GONE)}}, [])
    assert told.message.startswith("2 unhealthy, 0 not offered")


def test_a_message_about_10_000_devices_is_short() -> None:
    told = condition(slots(**{f"gpu{n}" * 20: SICK for n in range(10_000)}), [])
    assert len(told.message) < 1100
    assert told.message.startswith("10000 unhealthy")


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers("kubernetes", limit=2)
    yield workers
    workers.close()


async def test_the_condition_is_written_when_it_changes_and_every_five_minutes(workers: Workers) -> None:
    now, api, problems = slots(a=HEALTHY), FakeApi(), Problems()
    loop = asyncio.get_running_loop()
    unwritten = problems.trouble("kubernetes", "the condition", "kubernetes-condition-unwritten")
    keeper = ConditionKeeper(
        "worker-1", lambda: now, list, unwritten, clock=lambda: loop.time(), wall=lambda: 1_800_000_000.0 + loop.time()
    )

    def written() -> list[tuple[str, str, str]]:
        told = [it["status"]["conditions"][0] for it in api.of("PATCH")]
        assert {it["type"] for it in told} <= {TYPE}
        return [(it["status"], it["lastTransitionTime"], it["lastHeartbeatTime"]) for it in told]

    task = asyncio.create_task(keeper.run(api, workers))
    await settled()
    assert [it[0] for it in written()] == ["True"]
    keeper.changed()
    await settled()
    pass_time(5)
    await settled()
    assert len(written()) == 1  # it says the same
    pass_time(HEARTBEAT)
    await settled()
    first, second = written()
    assert first[1] == second[1]
    assert first[2] < second[2]
    now = slots(a=SICK)
    keeper.changed()
    await settled()
    pass_time(5)
    await settled()
    assert written()[2][0] == "False"
    assert written()[2][1] == written()[2][2]
    assert len(api.of("GET")) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_condition_that_is_refused_is_a_problem_until_it_is_written(workers: Workers) -> None:
    api, problems = FakeApi(), Problems()
    unwritten = problems.trouble("kubernetes", "the condition is not written", "kubernetes-condition-unwritten")
    keeper = ConditionKeeper("worker-1", lambda: slots(a=HEALTHY), list, unwritten)
    api.refuses = lambda method, path: 403 if method == "PATCH" else None
    task = asyncio.create_task(keeper.run(api, workers))
    await settled()
    assert [it.sentence for it in problems.lasting()] == ["the condition is not written: refused with 403"]
    api.refuses = lambda method, path: None
    pass_time(10)
    await settled()
    assert problems.lasting() == []
    assert len(api.of("PATCH")) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
