"""Reads that hang: what hangs is Unhealthy with its reason, and whatever hangs beside it, the others are served."""

from __future__ import annotations

from tests.e2e.conftest import Trouble
from tests.e2e.node import Node, pod

TROUBLED = "fl.test/troubled0"
HOURS = """
from agent.discovery import discoverer
discoverer.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 3600.0
"""
HASTY = """
from agent.discovery import discoverer
discoverer.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 0.5
"""
HANGING = tuple(f"a{n}" for n in range(6))
SETTLED = """
from agent.discovery import runner
runner.SETTLE = 1.0
"""


async def test_others_are_listed_without_a_wait_for_reads_that_hang(node: Node, trouble: Trouble) -> None:
    node.mknod(*(f"t0/{name}" for name in (*HANGING, "x", "y")))
    for name in HANGING:
        trouble.order(f"discover-{name}", "hang")
    # the first scan never ends; its first units hang
    async with node.agent(trouble.resource(), prelude=HOURS + SETTLED, environment=trouble.environment):
        await node.healthy("x", "y", resource=TROUBLED)
        assert (await node.admit(pod(resource=TROUBLED))).phase == "Running"


async def test_what_hangs_is_unhealthy_with_its_reason_and_the_others_are_looked_at(
    node: Node, trouble: Trouble
) -> None:
    node.mknod(*(f"t0/{name}" for name in (*HANGING, "x")))
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy(*HANGING, "x", resource=TROUBLED)
        for name in HANGING:
            trouble.order(f"discover-{name}", "hang")
        node.mknod("t0/y")  # an event that means all of them
        await node.healthy("x", "y", resource=TROUBLED)
        assert node.listed(TROUBLED) == {*HANGING, "x", "y"}
        for name in HANGING:
            said = await agent.says("device-changed", device=name, state="Unhealthy")
            assert said["reason"] == "hangs"
            assert "has hung" in said["message"]
        node.unlink("t0/x")  # whatever hangs, the others go on
        await node.healthy("y", resource=TROUBLED)
        for name in HANGING:
            trouble.forget(f"discover-{name}")
        await trouble.release()  # of all of them: they wait for the same FIFO
        await node.healthy(*HANGING, "y", resource=TROUBLED)
