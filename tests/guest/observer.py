"""In the guest: a simulated kubelet, and what the kernel says beside what the kubelet is told, in one order.

`python -m tests.guest.observer ROOT` prints JSON lines: the kubelet's changes as `python -m agent.simulation` does,
kernel events, and answers to the orders that it reads from stdin.

    → {"admit": "pod", "wants": {"nvidia.com/gpu": 1}}    {"end": "pod"}
    ← {"uevent": "add", "DEVPATH": …}    {"change": "list", …}
      {"pod": "pod", "phase": "Running", "message": "", "gets": {"nvidia.com/gpu": {"ids": […], "envs": {…}, "nodes": […]}}}
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any, Final

from agent.kubelet.api.v1beta1 import ContainerAllocateResponse
from agent.simulation import checkpoint
from agent.simulation.__main__ import line
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import Change, Container, Pod

_NETLINK_KOBJECT_UEVENT: Final = 15  # linux/netlink.h
_KERNEL_GROUP: Final = 1
_CONTAINER: Final = "main"


def _tell(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _uevent(message: bytes) -> dict[str, str]:
    """Its properties: what follows `action@devpath`, NAME=value each."""
    return dict(field.decode().split("=", 1) for field in message.split(b"\0")[1:] if b"=" in field)


def _watch_kernel() -> socket.socket:
    """From now on tell of every event that the kernel sends."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _NETLINK_KOBJECT_UEVENT)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    link.bind((0, _KERNEL_GROUP))

    def ready() -> None:
        properties = _uevent(link.recv(8192))
        _tell({"uevent": properties.pop("ACTION"), **properties})

    asyncio.get_running_loop().add_reader(link, ready)
    return link


class _Orders:
    """What may be asked of the kubelet."""

    def __init__(self, kubelet: Kubelet) -> None:
        self._kubelet = kubelet
        self._pods: dict[str, Pod] = {}

    async def admit(self, name: str, wants: dict[str, int]) -> None:
        pod = self._pods[name] = Pod(name, (Container(_CONTAINER, wants),))
        status = await self._kubelet.admit(pod)
        _tell({"pod": name, "phase": status.phase, "message": status.message, "gets": self._given(status.uid)})

    def _given(self, uid: str) -> dict[str, Any]:
        """What a pod's container gets, read where the kubelet writes it down."""
        entries, _ = checkpoint.decode((self._kubelet.plugin_dir / checkpoint.NAME).read_bytes())
        given = {}
        for (owner, _, resource), allocation in entries.items():
            if owner == uid:
                reply = ContainerAllocateResponse().parse(allocation.reply)
                nodes = [node.host_path for node in reply.devices]
                given[resource] = {"ids": sorted(allocation.ids), "envs": reply.envs, "nodes": nodes}
        return given

    def end(self, name: str) -> None:
        self._kubelet.end(self._pods.pop(name))

    async def serve(self) -> None:
        """Carry out what comes from stdin, until its end."""
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        async for order in reader:
            wanted = json.loads(order)
            if "admit" in wanted:
                await self.admit(wanted["admit"], wanted["wants"])
            else:
                self.end(wanted["end"])


def _print(change: Change) -> None:
    print(line(change), flush=True)


async def observe(root: Path) -> None:
    """Run until stdin ends."""
    kubelet = Kubelet(root)
    kubelet.subscribe(_print)
    with _watch_kernel():
        async with kubelet:
            await _Orders(kubelet).serve()


if __name__ == "__main__":
    asyncio.run(observe(Path(sys.argv[1])))
