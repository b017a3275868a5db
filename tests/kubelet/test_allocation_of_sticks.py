"""Nodes that may belong to another device by the time they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

from agent.hardware.jobs import HardwareQueue, Jobs
from agent.inventory.inventory import Inventory
from agent.kubelet.allocation import Allocator
from agent.kubelet.api.v1beta1 import AllocateResponse
from agent.model import Held
from agent.runtime.workers import Workers
from backends.base import AllocationRefused, Resource, ResourceSpec
from backends.chardev import CharDev, CharDevOptions, PathOption
from backends.chardev.options import UsbOption
from tests.backends.linux.sticks import stick
from tests.backends.trees import planted_host

STICK = "0403:6001:A1"


class CountedWorkers(Workers):
    """Counts what it is given to do."""

    started = 0

    def start(self, job: Callable[[], Any]) -> Any:
        self.started += 1
        return super().start(job)


class Node:
    """A stick and a node that the config names, found and on offer."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path
        stick_ = Resource("a/stick", ResourceSpec("chardev", CharDevOptions(usb=UsbOption("0403"))))
        kvm = Resource("a/kvm", ResourceSpec("chardev", CharDevOptions([PathOption("/dev/kvm")])))
        self.backend = CharDev(planted_host(tmp_path, stick("1-2", 5, serial="A1") + "dev/kvm c 10:232"), [stick_, kvm])
        self.inventory = Inventory([stick_, kvm], {"chardev": self.backend})
        units = {unit: self.backend.discover(unit).devices for unit in self.backend.units()}
        self.inventory.update("chardev", units)
        self.workers = CountedWorkers("chardev")
        jobs = Jobs(HardwareQueue(), self._look)
        jobs._workers["chardev"] = self.workers
        self.allocator = Allocator(self.inventory, {"chardev": self.backend}, jobs, self._record)
        self.recorded: list[Held] = []

    async def _look(self, kind: str, units: Set[str]) -> None:
        self.inventory.update(kind, {unit: self.backend.discover(unit).devices for unit in units})

    async def _record(self, given: Sequence[Held]) -> None:
        self.recorded += given

    async def allocate(self, resource: str, device_id: str) -> list[str]:
        """The nodes a container gets."""
        reply = AllocateResponse().parse(await self.allocator.allocate(resource, [device_id], lambda _: True))
        return [node.host_path for node in reply.container_responses[0].devices]


async def test_a_thread_is_asked_only_for_what_may_be_another_device_by_now(tmp_path: Path) -> None:
    node = Node(tmp_path)
    assert await node.allocate("a/kvm", "kvm0") == ["/dev/kvm"]
    assert node.workers.started == 0
    assert await node.allocate("a/stick", STICK) == ["/dev/bus/usb/001/005"]
    assert node.workers.started == 1
    node.workers.close()


async def test_a_stick_that_was_plugged_in_again_is_not_given_under_its_old_node(tmp_path: Path) -> None:
    node = Node(tmp_path)
    (tmp_path / "sys/bus/usb/devices/1-2/devnum").write_text("6\n")
    with pytest.raises(AllocationRefused, match=f"{STICK} of a/stick was unplugged or plugged in again this moment"):
        await node.allocate("a/stick", STICK)
    node.workers.close()
