"""Whatever a backend answers, the daemon goes on, serves the others, and names the backend whose fault it is."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Trouble
from tests.e2e.node import Node, chardev, pod

TROUBLED = "fl.test/troubled0"
ODD_SIGNAL = 'odd [Signal("troubled:a", "ill", Verdict.NOW, "It is ill.", {})]'


@pytest.mark.parametrize(
    ("call", "order", "subject", "reason"),
    [
        ("watches", 'odd Watches(directories=frozenset({"/dev/w"}))', "watches", "impossible directories"),
        ("watches", 'odd Watches(directories=frozenset({HostPath("/dev/\\0")}))', "watches", "impossible directories"),
        ("watches", 'odd Watches(subsystems=["pci"])', "watches", "impossible subsystems"),
        ("watches", "odd Watches(facts=7)", "watches", "impossible facts"),
        ("watches", 'odd Watches(kernel_lines=frozenset({""}))', "watches", "impossible kernel_lines"),
        ("watches", 'odd Watches(links="yes")', "watches", "impossible links"),
        ("watches", 'odd Watches(poll=float("inf"))', "watches", "impossible poll"),
        ("watches", "exit", "watches", "SystemExit"),
        ("affects", "exit", "affects", "SystemExit"),
        ("probe", ODD_SIGNAL.format("after=-1.0"), "a", "impossible after"),
        ("probe", ODD_SIGNAL.format('recover_after="long"'), "a", "impossible recover_after"),
        ("probe", ODD_SIGNAL.format("measure=7"), "a", "impossible measure"),
        ("probe", 'odd [Signal("troubled:a", "ill", "NOW", "It is ill.")]', "a", "impossible verdict"),
        ("probe", 'odd [Signal(7, "ill", Verdict.NOW, "It is ill.")]', "a", "impossible hardware"),
        ("start", "exit", "troubled0", "SystemExit"),
    ],
)
async def test_nonsense_of_one_backend_is_blamed_on_it_and_ends_nothing(
    node: Node, trouble: Trouble, call: str, order: str, subject: str, reason: str
) -> None:
    node.mknod("t0/a", "w1")
    trouble.order(call, order)
    async with node.agent(trouble.resource(), chardev(), environment=trouble.environment) as agent:
        await node.healthy("w1")
        node.mknod("w2", "t0/b")  # an event for each of them
        await node.healthy("w1", "w2")
        assert reason in (await agent.says("discovery-problem", backend="troubled0", subject=subject))["reason"]
        assert (await node.admit(pod())).phase == "Running"
        assert not agent.said("part-failed")


async def test_a_backend_that_exits_in_allocate_refuses_the_pod_and_ends_nothing(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "w1")
    trouble.order("edits", "exit")
    async with node.agent(trouble.resource(), chardev(), environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        assert "the backend troubled0 failed" in (await node.admit(pod(resource=TROUBLED))).message
        await agent.says("backend-failed", backend="troubled0", call="edits")
        assert (await node.admit(pod("other"))).phase == "Running"
