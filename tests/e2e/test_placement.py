"""What a kubelet gives when it asks us which devices it should: the whole way, with accelerators of published machines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from agent.simulation.pods import Container, Pod
from tests.e2e.node import Node, pod
from tests.e2e.process import AgentProcess

GPU = "fl.test/gpu"
ALL = [f"g{number:02}" for number in range(8)]

Running = Callable[..., AbstractAsyncContextManager[AgentProcess]]


@pytest.fixture
def running(node: Node, tmp_path: Path) -> Running:
    """An agent with the accelerators of a machine."""
    site = tmp_path / "site" / "fairlead_linked-1.0.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: fairlead-linked\nVersion: 1.0\n")
    (site / "entry_points.txt").write_text("[fairlead.backends]\nlinked = tests.e2e.linked:Linked\n")
    (node.dev / "dead").mkdir()

    @asynccontextmanager
    async def run(machine: str, **common: object) -> AsyncIterator[AgentProcess]:
        keys = {"name": GPU, "backend": "linked", "machine": machine, "dead": "/dev/dead"} | common
        table = "[[resource]]\n" + "".join(f"{key} = {value!r}\n" for key, value in keys.items())
        async with node.agent(table, environment={"PYTHONPATH": str(site.parent)}) as agent:
            yield agent

    return run


async def given(node: Node, name: str, count: int) -> list[str]:
    """What a new pod gets."""
    wanted = pod(name, GPU, count)
    assert (await node.admit(wanted)).phase == "Running"
    return sorted(node.held(wanted, resource=GPU))


async def test_pods_get_linked_gpus_and_leave_the_other_quad_whole(node: Node, running: Running) -> None:
    async with running("dgx1"):
        await node.healthy(*ALL, resource=GPU)
        assert await given(node, "pair", 2) == ["g02", "g03"]
        assert await given(node, "quad", 4) == ["g04", "g05", "g06", "g07"]
        assert await given(node, "rest", 2) == ["g00", "g01"]


async def test_a_pod_gets_gpus_of_one_socket_and_what_is_broken_already(node: Node, running: Running) -> None:
    async with running("hgx_h100"):
        await node.healthy(*ALL, resource=GPU)
        one = await given(node, "one", 1)
        assert one == ["g00"]
        assert await given(node, "another", 1) == ["g01"], "on the socket that is broken already"
        assert await given(node, "quad", 4) == ALL[4:]


async def test_one_dead_gpu_does_not_fail_the_choice_for_all(node: Node, running: Running) -> None:
    async with running("dgx1"):
        (node.dev / "dead" / "g03").touch()
        await node.healthy(*(set(ALL) - {"g03"}), resource=GPU)
        assert await given(node, "quad", 4) == ["g04", "g05", "g06", "g07"]


async def test_what_an_init_container_had_is_part_of_the_choice(node: Node, running: Running) -> None:
    async with running("dgx1"):
        await node.healthy(*ALL, resource=GPU)
        await given(node, "pair", 2)
        wanted = Pod("p", (Container("main", {GPU: 2}),), (Container("prepare", {GPU: 1}),))
        assert (await node.admit(wanted)).phase == "Running"
        assert node.held(wanted, "prepare", resource=GPU) == {"g00"}
        assert node.held(wanted, resource=GPU) == {"g00", "g04"}, "two links lead from g00 to g04"


@pytest.mark.parametrize(("placement", "expected"), [("spread", 4), ("pack", 1)])
async def test_replicas_are_spread_or_packed(node: Node, running: Running, placement: str, expected: int) -> None:
    async with running("l40s", replicas=4, placement=placement):
        await node.healthy(*(f"{key}::{n}" for key in ALL for n in range(4)), resource=GPU)
        used = {(await given(node, f"pod{n}", 1))[0].split("::")[0] for n in range(4)}
        assert len(used) == expected
