"""No step of the loop is long, however many devices there are: at the start, a first look, a mass failure, a reload.

What is bounded is the byte-codes of one step, since they are the same on any machine at any load: `BOUND` of them take 15
to 30 ms, and what is done for each of the devices here in one step would take several times as many. The milliseconds with
10,000 devices are figures of bench/ (`loop_step_max`).
"""

from __future__ import annotations

from typing import Final

import pytest

from agent.simulation.model import Phase
from tests import loop_steps
from tests.e2e.crowd import Crowd
from tests.e2e.node import WIDGET, Node, chardev, pod

DEVICES: Final = 2000
BOUND: Final = 1_000_000


@pytest.fixture
def crowd(node: Node) -> Crowd:
    return Crowd(node, DEVICES, counted=True)


def was_never_long(crowd: Crowd) -> None:
    longest = crowd.longest()
    assert 0 < longest.cost < BOUND, longest


async def test_no_step_of_the_loop_is_long_at_a_first_look_nor_at_a_start_with_claims(crowd: Crowd) -> None:
    async with crowd.agent() as agent:
        was_never_long(crowd)
        await crowd.hold()
        await agent.kill()
    was_never_long(crowd)
    async with crowd.agent() as agent:
        await agent.kill()
    was_never_long(crowd)
    crowd.node.lose_state()
    async with crowd.agent() as agent:
        await agent.says("claims-adopted", count=crowd.held)
    was_never_long(crowd)


async def test_no_step_of_the_loop_is_long_when_all_devices_go_come_back_or_are_let_go(crowd: Crowd) -> None:
    async with crowd.agent() as agent:
        await crowd.hold()
        was_never_long(crowd)
        await crowd.go()
        was_never_long(crowd)
        await crowd.come_back()
        was_never_long(crowd)
        await crowd.end(agent)
    was_never_long(crowd)


@pytest.mark.timeout(3600)  # seconds: half a minute on an idle machine; see `Crowd.ask`
async def test_no_step_of_the_loop_is_long_at_a_reload_and_whoever_asks(crowd: Crowd) -> None:
    async with crowd.agent() as agent:
        await crowd.hold()
        was_never_long(crowd)
        await crowd.give_other_ids(agent)
        was_never_long(crowd)
        await crowd.ask()
        was_never_long(crowd)
        await crowd.rename(agent)
    was_never_long(crowd)


async def test_no_step_of_the_loop_is_long_where_a_pod_has_thousands_of_tokens(node: Node) -> None:
    steps, tokens = node.root / "steps", 20_000
    node.mknod("w0")
    watch = f"from tests import loop_steps\nloop_steps.report({str(steps)!r}, counted=True)\n"
    async with node.agent(chardev(count=tokens) + 'pre_start = "check"\n', prelude=watch):
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == tokens)
        before = len(loop_steps.reported(steps))
        assert (await node.admit(pod(count=10_000))).phase == Phase.RUNNING
    longest = max(loop_steps.reported(steps)[before:])
    assert longest.cost < BOUND, longest
