"""A backend that raises, hangs or returns nonsense: its resources are reported, the others are not concerned."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Mapping

import pytest

from tests.e2e.conftest import Trouble
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess

TROUBLED = "fl.test/troubled0"

# --- it is reported, and served ---

HASTY = """
from agent import supervisor
from agent.devices import discovery
supervisor.SETTLE = 0.2
discovery.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 0.1
discovery._RETRY_FIRST = 0.05
"""


@pytest.mark.parametrize(
    ("call", "order", "report"),
    [
        ("start", "raise", "backend troubled0 cannot list its units: it could not be started: "),
        ("units", "raise", "backend troubled0 cannot list its units: units was told to fail"),
        ("units", "nonsense", "backend troubled0 cannot list its units: it returned 7 where a unit's name is due"),
        ("discover-a", "raise", "a cannot be read: discover-a was told to fail"),
        ("discover-a", "nonsense", "a cannot be read: discover() returned list where a Discovery is due"),
    ],
)
async def test_a_backend_that_fails_is_reported_once_and_its_resource_served(
    node: Node, trouble: Trouble, call: str, order: str, report: str
) -> None:
    node.mknod("t0/a", "w1")
    trouble.order(call, order)
    resources = trouble.resource(), chardev()
    async with node.agent(*resources, prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("w1")
        await node.shows(lambda k: k.resources[TROUBLED].capacity == 0, TROUBLED)
        said = await agent.says("discovery-problem", backend="troubled0")
        assert report in said["problem"]
        if call != "start":
            await trouble.asked("units" if call == "units" else "discover", times=3)  # it is tried again
            assert len(agent.said("discovery-problem")) == 1
            trouble.forget(call)
            await node.healthy("a", resource=TROUBLED)
            await agent.says("discovery-problem-solved", backend="troubled0")


@pytest.mark.parametrize(("call", "report"), [("units", "listing its units"), ("discover-a", "reading a")])
async def test_a_backend_that_hangs_is_reported_and_its_other_units_go_on(
    node: Node, trouble: Trouble, call: str, report: str
) -> None:
    node.mknod("t0/a", "t0/b", "w1")
    trouble.order(call, "hang")
    resources = trouble.resource(), chardev()
    async with node.agent(*resources, prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("w1")
        said = await agent.says("discovery-problem", backend="troubled0")
        assert said["problem"].startswith(f"{report} has hung for ")
        if call == "discover-a":
            await node.healthy("b", resource=TROUBLED)
        else:
            await node.shows(lambda k: k.resources[TROUBLED].capacity == 0, TROUBLED)
        trouble.forget(call)
        await trouble.release()
        await node.healthy("a", "b", resource=TROUBLED)
        await agent.says("discovery-problem-solved")


async def test_devices_that_are_held_stay_listed_while_their_backend_hangs_after_a_restart(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a", "t0/b")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        await node.admit(holder)
        (held,) = node.held(holder, resource=TROUBLED)
        await agent.kill()
    since = len(node.lists)
    trouble.order("units", "hang")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment):
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {held}, TROUBLED)
        assert node.lists_without(held, since, TROUBLED) == []


@pytest.mark.parametrize(
    ("call", "order", "sentence"),
    [
        (
            "claim",
            "raise",
            "a of fl.test/troubled0 could not be prepared: the backend troubled0 failed (claim was told",
        ),
        (
            "edits",
            "raise",
            "a of fl.test/troubled0 could not be prepared: the backend troubled0 failed (edits was told",
        ),
        ("edits", "nonsense", "a of fl.test/troubled0 could not be prepared: the backend troubled0 failed"),
    ],
)
async def test_a_backend_that_fails_in_allocate_refuses_the_pod_with_a_sentence(
    node: Node, trouble: Trouble, call: str, order: str, sentence: str
) -> None:
    node.mknod("t0/a")
    trouble.order(call, order)
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        refused = await node.admit(pod("one", TROUBLED))
        assert refused.phase == "Failed"
        assert sentence in refused.message
        await agent.says("backend-failed", call=call)
        trouble.forget(call)
        assert (await node.admit(pod("two", TROUBLED))).phase == "Running"


SHORT = """
from agent.kubelet.allocation import Allocator
Allocator.__init__.__defaults__ = (0.1,)
"""


async def test_a_claim_that_hangs_refuses_the_pod_and_delays_no_other(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "w1")
    trouble.order("claim", "hang")
    resources = trouble.resource(), chardev()
    async with node.agent(*resources, prelude=SHORT, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        await node.healthy("w1")
        refused = await node.admit(pod("one", TROUBLED))
        assert "a of fl.test/troubled0 could not be made ready: not done within 0.1 s" in refused.message
        await agent.says("claim-hangs")
        assert (await node.admit(pod("two", WIDGET))).phase == "Running"


async def test_a_backend_that_cannot_be_imported_is_a_mistake_in_the_config(node: Node, trouble: Trouble) -> None:
    (trouble.site / "fairlead_troubled.py").write_text("import a_module_that_nobody_has")
    async with AgentProcess(node.config(trouble.resource()), environment=trouble.environment) as agent:
        assert await agent.ended() == 2
        (line,) = agent.log
        assert "cannot be imported: ModuleNotFoundError" in line["text"]


# --- the others' latency is unchanged ---

EVENTS = 24
APART = 0.06  # seconds between two events: lists are at least 0.05 s apart
RATIO, SLACK = 3.0, 0.003  # of the medians, and seconds: a machine that is busy with other things


async def latencies(node: Node) -> list[float]:
    """Seconds from before each mknod and unlink until its list has arrived."""
    found = []
    for n in range(EVENTS):
        await asyncio.sleep(APART)
        began = time.perf_counter()
        since = len(node.lists)
        node.mknod("w9") if n % 2 == 0 else node.unlink("w9")
        await node.shows(lambda k: ("w9" in k.resources[WIDGET].healthy) is (n % 2 == 0))  # noqa: B023
        found.append(next(c.at for c in node.lists[since:] if c.resource == WIDGET) - began)
    return found


async def median(node: Node, *resources: str, environment: Mapping[str, str] = os.environ) -> float:
    async with node.agent(*resources, chardev(), environment=environment):
        await node.healthy("w1")
        return statistics.median(await latencies(node))


async def test_broken_backends_do_not_delay_the_others(
    node: Node, trouble: Trouble, capsys: pytest.CaptureFixture[str]
) -> None:
    node.mknod("w1", *(f"t{n}/{name}" for n in range(4) for name in "ab"))
    alone = await median(node)
    for number, (call, order) in enumerate(
        [("units", "hang"), ("discover-a", "hang"), ("units", "raise"), ("discover", "nonsense")]
    ):
        trouble.order(call, order, number)
    trouble.order("affects", "raise", 3)
    broken = await median(node, *map(trouble.resource, range(4)), environment=trouble.environment)
    with capsys.disabled():
        print(f"\nevent to list, p50: alone {alone * 1000:.2f} ms, beside broken backends {broken * 1000:.2f} ms")
    assert broken <= alone * RATIO + SLACK
