"""What a container's start has to pass, asked by a kubelet: PreStartContainer (kubelet contract: A4)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent.simulation.clock import Clock
from agent.simulation.model import Container, Phase, Pod, State
from tests.e2e.conftest import Trouble
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.wait import until

TROUBLED = "fl.test/troubled0"
CHECK, RESET = 'pre_start = "check"', 'pre_start = "reset"'
ENDLESS_LOOKS = """
from agent.discovery.discoverer import Discoverer
Discoverer.__init__.__kwdefaults__["unit_deadline"] = 86400.0
"""  # one that hangs is not said to hang before the start's own deadline


@pytest.fixture
def bare_node(tmp_path: Path) -> Node:
    """Its kubelet tries a start that was refused again after 10 s, which come after the test, however slow that is."""
    return Node(tmp_path, Clock(speed=0.05))


async def test_a_container_does_not_start_again_on_a_device_that_fell_ill_unseen(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(0, CHECK), environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        status = await node.admit(holder)
        main = status.containers["main"]
        assert (status.phase, main.starts) == (Phase.RUNNING, 1)
        trouble.order("ill-a", "")  # nobody tells of it
        for _ in range(2):
            await node.kubelet.restart_container(holder, "main")
            assert (main.state, main.starts, main.reason) == (State.WAITING, 1, "CreateContainerConfigError")
            assert (
                "FailedPrecondition desc = Device a of fl.test/troubled0 is unhealthy: It was told to be ill. The co"
                in (main.message)
            )
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)  # now everybody knows
        trouble.forget("ill-a")
        await node.kubelet.restart_container(holder, "main")
        assert (main.state, main.starts) == (State.RUNNING, 2)
        assert len(agent.said("start-refused")) == 1
        await agent.says("start-allowed")
        assert "prepare" not in trouble.calls()


async def test_a_container_of_a_device_that_is_gone_waits_for_it(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(0, CHECK), environment=trouble.environment):
        await node.healthy("a", resource=TROUBLED)
        main = (await node.admit(holder)).containers["main"]
        node.unlink("t0/a")
        await node.kubelet.restart_container(holder, "main")
        assert "Device a of fl.test/troubled0 is not on this node: it is gone" in main.message
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)
        node.mknod("t0/a")
        await node.healthy("a", resource=TROUBLED)
        await node.kubelet.restart_container(holder, "main")
        assert (main.state, main.starts) == (State.RUNNING, 2)


async def test_hardware_is_reset_before_each_start(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b")
    holder = Pod("pod", (Container("main", {TROUBLED: 1}),), init=(Container("init", {TROUBLED: 1}),))
    async with node.agent(trouble.resource(0, RESET), environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        assert (await node.admit(holder)).phase == Phase.RUNNING
        assert trouble.calls().count("prepare") == 2
        await node.kubelet.restart_container(holder, "main")
        assert trouble.calls().count("prepare") == 3
        (held,) = node.held(holder, resource=TROUBLED)
        lines = {"ids": [held], "hardware": [f"troubled:{held}"]}
        await until(lambda: len(agent.said("hardware-reset", **lines)) == 3, "a line of each reset")


async def test_a_container_starts_though_the_agent_was_restarted_since_its_pod_came(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(0, RESET), environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        main = (await node.admit(holder)).containers["main"]
        await agent.kill()
        await node.shows(lambda k: not k.streams(TROUBLED), TROUBLED)
    async with node.agent(trouble.resource(0, RESET), environment=trouble.environment):
        await node.registered(TROUBLED)
        await node.kubelet.restart_container(holder, "main")
        assert (main.state, main.starts) == (State.RUNNING, 2)


async def test_a_reset_that_hangs_is_answered_in_time_and_delays_no_other(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b", "w1")
    trouble.order("prepare", "hang")
    resources = trouble.resource(0, RESET), chardev()
    async with node.agent(*resources, environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        await node.healthy("w1")
        stuck = pod("stuck", TROUBLED)
        main = (await agent.out_of_time(node.admit(stuck))).containers["main"]
        (held,) = node.held(stuck, resource=TROUBLED)
        assert main.reason == "CreateContainerConfigError"
        assert f"{held} of fl.test/troubled0 could not be reset before the container's start: not done within" in (
            main.message
        )
        threads = agent.threads()
        for _ in range(5):
            await agent.out_of_time(node.kubelet.restart_container(stuck, "main"))
            assert "an earlier call for the same hardware has not ended" in main.message
        assert trouble.calls().count("prepare") == 1
        assert agent.threads() < threads + 5, "each try would cost one"
        trouble.forget("prepare")
        assert (await node.admit(pod("other", TROUBLED))).phase == Phase.RUNNING
        assert (await node.admit(pod("foreign", WIDGET))).phase == Phase.RUNNING
        await trouble.release()
        await node.kubelet.restart_container(stuck, "main")
        assert main.state == State.RUNNING


async def test_a_look_that_hangs_is_answered_in_time(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b")
    async with node.agent(trouble.resource(0, CHECK), prelude=ENDLESS_LOOKS, environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        holder = pod(resource=TROUBLED)
        main = (await node.admit(holder)).containers["main"]
        (held,) = node.held(holder, resource=TROUBLED)
        trouble.order(f"discover-{held}", "hang")
        await agent.out_of_time(node.kubelet.restart_container(holder, "main"))
        assert (
            "could not be looked at before the container's start: looking at it has not ended within 27" in main.message
        )
        trouble.forget(f"discover-{held}")
        await trouble.release()
        await node.kubelet.restart_container(holder, "main")
        assert main.state == State.RUNNING


@pytest.mark.parametrize("pre_start", ["", 'pre_start = "none"'])
async def test_without_it_nobody_is_asked(node: Node, trouble: Trouble, pre_start: str) -> None:
    node.mknod("t0/a")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(0, pre_start), environment=trouble.environment):
        await node.healthy("a", resource=TROUBLED)
        main = (await node.admit(holder)).containers["main"]
        trouble.order("ill-a", "")
        await node.kubelet.restart_container(holder, "main")
        assert main.starts == 2


async def test_many_containers_of_one_pod_start_beside_each_other(node: Node, trouble: Trouble) -> None:
    names = [f"c{n}" for n in range(6)]
    node.mknod(*(f"t0/{name}" for name in names))
    holder = Pod("pod", tuple(Container(name, {TROUBLED: 1}) for name in names))
    async with node.agent(trouble.resource(0, RESET), environment=trouble.environment):
        await node.healthy(*names, resource=TROUBLED)
        assert (await node.admit(holder)).phase == Phase.RUNNING
        await asyncio.gather(*(node.kubelet.restart_container(holder, name) for name in names[:4]))
        assert trouble.calls().count("prepare") == 10
