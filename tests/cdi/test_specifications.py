"""What a container gets of a resource with `edits`, and what the specification says by the time it is told."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence, Set
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from msgspec.structs import replace

from agent.cdi import spec
from agent.cdi.directory import Directory
from agent.cdi.on_demand import Cdi
from agent.hardware.jobs import HardwareQueue, Jobs
from agent.inventory.inventory import Inventory
from agent.kubelet.allocation import Allocator
from agent.kubelet.api.v1beta1 import AllocateResponse, ContainerAllocateResponse
from agent.model import Held
from agent.runtime.problems import Problems
from backends.base import AllocationRefused, Backend, ContainerEdits, Edits, Grant, Host, Resource
from backends.cex import Cex
from backends.chardev import CharDev
from backends.gpu import Gpu
from backends.linux import files
from tests.backends.cex.cex_trees import ZcryptKernel, machine
from tests.backends.cex.cex_trees import resource as cex_set
from tests.backends.chardev.chardevs import configured
from tests.backends.gpu.gpus import resource as of_gpus
from tests.backends.machines import hgx_h100, uuid
from tests.backends.trees import plant, planted_host
from tests.cdi.runtime import Container, container, specs
from tests.wait import at_once, limit, until

PORT = "example.com/port"
PORTS = "dev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\n"
FILE = "run/cdi/fairlead_example.com_port.json"


def by(edits: Edits, resource: Resource[Any]) -> Resource[Any]:
    return replace(resource, spec=replace(resource.spec, edits=edits))


def with_zcrypt(host: Host, resources: Sequence[Resource[Any]]) -> Cex:
    return Cex(host, resources, ZcryptKernel(host))


class House:
    """One resource, whose devices are found and on offer, and an agent that may run or not."""

    def __init__(self, root: Path, tree: str, resource: Resource[Any], kind: Callable[..., Backend[Any]] = CharDev):
        self.root, self.resource = root, resource
        self.backend = kind(planted_host(root, tree), [resource])
        self.inventory = Inventory([resource], {resource.spec.backend: self.backend})
        self.problems = Problems()
        self.cdi = self.another_run()
        jobs = Jobs(HardwareQueue(), self._look)
        backends = {resource.spec.backend: self.backend}
        self.allocator = Allocator(self.inventory, backends, jobs, self._record, cdi=self.cdi)
        self.look()

    def another_run(self, *resources: Resource[Any]) -> Cdi:
        backends = {self.resource.spec.backend: self.backend}
        inventory = Inventory(resources, backends) if resources else self.inventory
        return Cdi(self.backend.host, self.root / "state", inventory, backends, self.problems)

    def look(self) -> None:
        kind = self.resource.spec.backend
        units = {*self.backend.units(), *(it.unit for it in self.inventory.devices(kind))}
        self.inventory.update(kind, {unit: self.backend.discover(unit).devices for unit in units})
        self.cdi.changed([self.resource.name])

    async def _look(self, _kind: str, _units: Set[str]) -> None:
        self.look()

    async def _record(self, given: Sequence[Held]) -> None:
        self.inventory.claim(given)

    async def allocate(self, *ids: str) -> ContainerAllocateResponse:
        async with limit():
            reply = await self.allocator.allocate(self.resource.name, ids, lambda _: True)
        return AllocateResponse().parse(reply).container_responses[0]

    def end(self, *ids: str) -> None:
        """No pod has these any more."""
        self.inventory.unclaim([self.inventory.claims(self.resource.name)[one] for one in ids])
        self.cdi.changed([self.resource.name])

    def named(self) -> set[str]:
        """The devices that a runtime knows."""
        return {device["name"] for data in specs(self.root) for device in json.loads(data)["devices"]}

    async def running_until(self, holds: Callable[[], bool]) -> None:
        async with self.running():
            await until(holds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.cdi.run)
            yield
            tasks.cancel_scope.cancel()


def got(root: Path, answer: ContainerAllocateResponse) -> Container:
    """What the container has in the end: what the kubelet asks for, and what the runtime makes by names."""
    nodes = {it.container_path: (it.host_path, it.permissions) for it in answer.devices}
    mounts = {it.container_path: (it.host_path, it.read_only) for it in answer.mounts}
    by_name = container(specs(root), [it.name for it in answer.cdi_devices])
    return {**nodes, **by_name[0]}, {**mounts, **by_name[1]}


async def test_a_container_has_the_same_inline_by_cdi_and_both_ways(tmp_path: Path) -> None:
    wanted = configured(PORT, paths=[{"path": "/dev/ttyUSB*", "permissions": "rw"}])
    told = dict[str, ContainerAllocateResponse]()
    for edits in ("inline", "cdi", "both"):
        house = House(tmp_path / edits, PORTS, by(edits, wanted))
        told[edits] = await house.allocate("ttyUSB0", "ttyUSB1")
        nodes = {f"/dev/ttyUSB{n}": (f"/dev/ttyUSB{n}", "rw") for n in (0, 1)}
        assert got(house.root, told[edits]) == (nodes, {})
    every = ["fairlead.example.com/port=ttyUSB0", "fairlead.example.com/port=ttyUSB1"]
    names_given = {edits: [it.name for it in answer.cdi_devices] for edits, answer in told.items()}
    assert names_given == {"inline": [], "cdi": every, "both": every}
    assert {edits: len(answer.devices) for edits, answer in told.items()} == {"inline": 2, "cdi": 0, "both": 2}
    # kubelets before 1.28 know no other way
    assert [*told["cdi"].annotations.items()] == [(spec.annotation(PORT), ",".join(every))]
    assert not list((tmp_path / "inline/run").iterdir())


async def test_a_gpu_goes_by_nvidias_names_only_once_these_are_defined(tmp_path: Path) -> None:
    house = House(tmp_path, hgx_h100(), of_gpus(device_list_strategy="cdi-cri", cdi_vendor="nvidia.com"), Gpu)
    with pytest.raises(AllocationRefused, match=f"No CDI specification in .* defines nvidia.com/gpu={uuid(0)}, which"):
        await house.allocate(uuid(0))
    plant(tmp_path, f'run/cdi/n.json = {{"kind": "nvidia.com/gpu", "devices": [{{"name": "{uuid(0)}"}}]}}')
    assert [it.name for it in (await house.allocate(uuid(0))).cdi_devices] == [f"nvidia.com/gpu={uuid(0)}"]


async def test_a_thousand_tokens_of_a_node_are_one_device(tmp_path: Path) -> None:
    house = House(tmp_path, PORTS, by("cdi", configured(PORT, paths=[{"path": "/dev/ttyUSB0"}], count=1000)))
    first, last = await house.allocate("ttyUSB00"), await house.allocate("ttyUSB0999", "ttyUSB0998")
    assert first.cdi_devices == last.cdi_devices
    assert house.named() == {"ttyUSB00"}


async def test_ids_of_one_queue_that_have_nodes_of_their_own_have_names_of_their_own(tmp_path: Path) -> None:
    wanted = by("cdi", cex_set(PORT, (1, 6), (1, 7), overcommit=2))
    house = House(tmp_path, machine(), wanted, with_zcrypt)
    nodes = [got(tmp_path, await house.allocate(f"apqn-1-6-{n}"))[0]["/dev/z90crypt"] for n in (0, 1)]
    assert nodes == [(f"/dev/zcrypt-apqn-1-6-{n}", "rw") for n in (0, 1)]
    async with house.running():
        await until(lambda: house.named() == {"apqn-1-6-0", "apqn-1-6-1", "apqn-1-7-0"})
        (tmp_path / FILE).unlink()  # as a reboot does: the containers are made again from their names
        house.cdi.changed([PORT])
        await until(lambda: (tmp_path / FILE).exists())
        assert house.named() == {"apqn-1-6-0", "apqn-1-6-1", "apqn-1-7-0"}
        house.end("apqn-1-6-1")
        await until(lambda: house.named() == {"apqn-1-6-0", "apqn-1-7-0"})


class Numbering(CharDev):
    """Puts the nodes of a request at numbered paths, which no device has alone."""

    def edits(self, resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:
        found = super().edits(resource, grants).nodes
        return ContainerEdits(tuple(replace(node, container_path=f"/dev/{n}") for n, node in enumerate(found)))


async def test_what_only_the_whole_request_decides_stays_in_the_answer(tmp_path: Path) -> None:
    house = House(tmp_path, PORTS, by("cdi", configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])), Numbering)
    answer = await house.allocate("ttyUSB0", "ttyUSB1")
    assert ([it.container_path for it in answer.devices], answer.cdi_devices) == (["/dev/0", "/dev/1"], [])


async def test_what_cannot_be_written_is_refused_or_given_inline_and_reported_once(tmp_path: Path) -> None:
    wanted = configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])
    house, other = House(tmp_path / "a", PORTS, by("cdi", wanted)), House(tmp_path / "b", PORTS, by("both", wanted))
    for one in (house, other):
        (one.root / "run/cdi").write_text("in the way")
    for _ in range(2):
        with pytest.raises(AllocationRefused) as refused:
            await house.allocate("ttyUSB0")
    why = f"Not a directory: {house.root}/{FILE}"
    assert refused.value.sentence == (
        f"/{FILE}, by which the container runtime knows ttyUSB0 of {PORT}, cannot be written: {why}. Ask this node's "
        'administrator to let Fairlead write there, or to set edits = "inline".'
    )
    assert [it.sentence for it in house.problems.lasting()] == [
        f"/{FILE}, which tells container runtimes of {PORT}, is not written: {why}; trying again"
    ]
    answer = await other.allocate("ttyUSB0")
    assert ([it.host_path for it in answer.devices], answer.cdi_devices) == (["/dev/ttyUSB0"], [])
    assert not answer.annotations
    (house.root / "run/cdi").unlink()
    await at_once(house.running_until(lambda: not house.problems.lasting()))
    assert house.named() == {"ttyUSB0", "ttyUSB1"}


@pytest.mark.parametrize(
    "left",
    [b"", bytes(100), b'{"cdiVersion": "0.5.0", "ki', b"\xff\xfe", None],
    ids=["empty", "zeros", "begin", "garbage", "end"],
)
async def test_a_specification_of_ours_that_was_cut_off_refuses_no_pod_and_loses_no_name(
    tmp_path: Path, left: bytes | None
) -> None:
    house = House(tmp_path, PORTS, by("cdi", configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])))
    await house.allocate("ttyUSB0")
    file = house.root / FILE
    file.write_bytes(file.read_bytes()[:-20] if left is None else left)
    assert (await house.allocate("ttyUSB1")).cdi_devices
    assert house.named() == {"ttyUSB0", "ttyUSB1"}
    assert house.problems.lasting() == []
    file.write_bytes(file.read_bytes()[:99])
    assert Directory(house.backend.host, tmp_path / "state").remove(PORT)
    assert not file.exists()


async def test_what_an_allocate_could_not_write_is_tried_again_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House(tmp_path, machine(), by("both", cex_set(PORT, (1, 6), overcommit=2)), with_zcrypt)
    really, failing = files.replace, [True]

    def replace_file(path: Path, data: bytes, mode: int = 0o600, *, synced: bool = False) -> None:
        if failing and path.name.startswith("fairlead_") and failing.pop():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        really(path, data, mode, synced=synced)

    async with house.running():
        await until(lambda: house.named() == {"apqn-1-6-0"})
        monkeypatch.setattr(files, "replace", replace_file)
        failing[:] = [True]
        assert not (await house.allocate("apqn-1-6-1")).cdi_devices
        await until(lambda: not failing and not house.problems.lasting())
        assert house.named() == {"apqn-1-6-0", "apqn-1-6-1"}


async def test_a_name_lasts_as_long_as_a_pod_may_have_it(tmp_path: Path) -> None:
    house = House(tmp_path, PORTS, by("cdi", configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])))
    async with house.running():
        await until(lambda: house.named() == {"ttyUSB0", "ttyUSB1"})
        await house.allocate("ttyUSB0")
        (tmp_path / "dev/ttyUSB0").unlink()
        (tmp_path / "dev/ttyUSB1").unlink()
        plant(tmp_path, "dev/ttyUSB2 c 188:2")
        house.look()
        await until(lambda: "ttyUSB2" in house.named())
        assert "ttyUSB0" in house.named()
        house.end("ttyUSB0")
        await until(lambda: house.named() == {"ttyUSB2"})
        (tmp_path / FILE).unlink()  # whoever does that
        await until(lambda: (tmp_path / FILE).exists())


async def test_a_container_gets_the_numbers_that_a_node_has_now_whatever_its_runtime_remembers(tmp_path: Path) -> None:
    def numbers() -> list[tuple[str, int, int]]:
        """Of each device's node; a runtime looks up those that are not said, and may remember them for ever."""
        (data,) = specs(tmp_path)
        found = [node for device in json.loads(data)["devices"] for node in device["containerEdits"]["deviceNodes"]]
        return [(it.get("type", ""), it.get("major", 0), it.get("minor", 0)) for it in found]

    house = House(tmp_path, PORTS, by("cdi", configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])))
    async with house.running():
        await house.allocate("ttyUSB0")
        assert numbers()[0] == ("c", 188, 0)
        (tmp_path / "dev/ttyUSB0").unlink()  # the pod's container cannot start without it
        house.look()
        await until(lambda: numbers() == [("", 0, 0), ("c", 188, 1)])
        plant(tmp_path, "dev/ttyUSB0 c 166:7")
        house.look()
        await until(lambda: numbers() == [("c", 166, 7), ("c", 188, 1)])
        (tmp_path / "dev/ttyUSB1").unlink()
        plant(tmp_path, "dev/ttyUSB1 c 166:8")  # nobody has looked
        await house.allocate("ttyUSB1")
        assert numbers() == [("c", 166, 7), ("c", 166, 8)]


async def test_a_resource_that_goes_by_cdi_no_more_leaves_its_names_to_pods_that_have_them(tmp_path: Path) -> None:
    wanted = configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])
    house = House(tmp_path, PORTS, by("cdi", wanted))
    await house.allocate("ttyUSB1")
    inline = Inventory([wanted], {"chardev": house.backend})
    inline.claim(house.inventory.claims(PORT).values())
    inline.update("chardev", {unit: house.backend.discover(unit).devices for unit in house.backend.units()})
    house.inventory.become(inline)
    async with house.running():
        house.cdi.changed([PORT])
        await until(lambda: house.named() == {"ttyUSB1"})
        house.end("ttyUSB1")
        await until(lambda: not (tmp_path / FILE).exists())


async def test_the_next_run_removes_what_nobody_configures_or_holds_any_more_and_nothing_else(tmp_path: Path) -> None:
    house = House(tmp_path, PORTS, by("cdi", configured(PORT, paths=[{"path": "/dev/ttyUSB*"}])))
    await house.allocate("ttyUSB1")
    others = tmp_path / "run/cdi/fairlead_example.com_other.json"
    others.write_text("{}")
    house.cdi = house.another_run(configured("example.com/kvm", paths=[{"path": "/dev/kvm"}]))
    async with house.running():
        await until(lambda: not (tmp_path / FILE).exists())
    assert others.exists()
