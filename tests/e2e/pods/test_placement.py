"""What a kubelet gives when it asks us which devices it should: the whole way, with accelerators of published machines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from agent.simulation.model import Container, Pod
from tests.backends.machines import CONTROLS, nvidia_gpu, uuid
from tests.backends.rdma_trees import RDMA_CM, adapter
from tests.backends.trees import planted_host
from tests.e2e.node import Node, pod
from tests.e2e.process import AgentProcess
from tests.simulation.plugin import recorded

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


def _switches(root: Path) -> None:
    """One GPU and two adapters at one PCIe switch, two GPUs and an adapter at another, both at one root complex."""
    lines, numbers = [CONTROLS], {"gpu": 0, "adapter": 0}
    for switch, kinds in enumerate((["gpu", "adapter", "adapter"], ["gpu", "gpu", "adapter"]), 1):
        for slot, kind in enumerate(kinds):
            number = numbers[kind]
            numbers[kind] += 1
            below = f"pci0000:00/0000:00:0{switch}.0/0000:{switch}0:00.0/0000:{switch}1:0{slot}.0"
            address = f"0000:{switch}{slot + 2}:00.0"
            lines.append(
                nvidia_gpu(address, number, below=below)
                if kind == "gpu"
                else adapter(f"mlx5_{number}", address, below=below, number=number)
            )
    planted_host(root, "".join(lines) + RDMA_CM)


PATIENT = "from agent.placement import choice\nchoice.LONGEST = 3600.0"
"""On a busy machine the kubelet may take long between two resources of a container."""


async def test_a_container_gets_a_gpu_and_an_adapter_of_one_switch_whichever_it_is_given_first(
    node: Node, tmp_path: Path
) -> None:
    root, hca = tmp_path / "host", "fl.test/hca"
    root.mkdir()
    _switches(root)
    resources = (
        f'[[resource]]\nname = "{GPU}"\nbackend = "gpu"\n',
        f'[[resource]]\nname = "{hca}"\nbackend = "infiniband"\n',
    )
    seen_at = {name: str(root / name) for name in ("dev", "sys", "proc")}
    async with node.agent(*resources, prelude=PATIENT, environment=None, **seen_at):
        gpus, adapters = [uuid(n) for n in range(3)], ["0000:13:00.0", "0000:14:00.0", "0000:24:00.0"]
        await node.healthy(*gpus, resource=GPU)
        await node.healthy(*adapters, resource=hca)
        # a record that is written between a container's two resources would tell that another container is under way
        await recorded(node.plugin_dir, GPU, *gpus)
        await recorded(node.plugin_dir, hca, *adapters)

        async def given_both(name: str) -> tuple[str, str]:
            wanted = Pod(name, (Container("main", {GPU: 1, hca: 1}),))
            assert (await node.admit(wanted)).phase == "Running"
            ((gpu,), (nic,)) = node.held(wanted, resource=GPU), node.held(wanted, resource=hca)
            node.kubelet.end(wanted)
            return gpu, nic

        seen = {await given_both(f"both{n}") for n in range(12)}
        assert seen == {(gpus[0], adapters[0]), (gpus[1], adapters[2])}, "by either order, each of which has been seen"
        for name in (GPU, hca):  # alone each is given what leaves the other switch whole
            assert (await node.admit(pod(name.rpartition("/")[2], name))).phase == "Running"
        assert node.held(pod("gpu", GPU), resource=GPU) == {gpus[0]}
        assert node.held(pod("hca", hca), resource=hca) == {adapters[2]}
