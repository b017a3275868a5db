"""The second baseline: what a plugin on bare grpclib takes to hear of a change by itself and to send its list.

Run as `python -m bench.bare_server HOME RESOURCES`. The nodes in HOME/dev are the devices of the first resource. It hears of
them by inotify, and by the kernel's uevents where the network namespace has them; it looks at the one that is named, on the
loop, encodes that one and joins the bytes of the others. Allocate has a fixed reply. A byte `r` on its standard input has
it register again.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any, Final

from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.encoding.base import CodecBase
from grpclib.server import Server

from agent.discovery.paths import CREATE, DELETE, Inotify
from agent.kubelet import wire
from backends.base import ContainerEdits, HostPath, Node
from bench.names import resource_names

_SERVICE: Final = "/v1beta1.DevicePlugin/"
_KOBJECT_UEVENT: Final = 15  # NETLINK_KOBJECT_UEVENT in linux/netlink.h
_REPLY: Final = wire.encode_allocate(
    [
        ContainerEdits(
            nodes=tuple(Node(HostPath(f"/dev/bench/node{n}"), f"/dev/bench/node{n}", "rw") for n in range(4)),
            env={f"BENCH_{n}": "the value of a variable" for n in range(2)},
        )
    ]
)


class _Bytes(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ARG002  # grpclib's signature
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> bytes:  # noqa: ARG002  # grpclib's signature
        return data


class _Plugin:
    def __init__(self, home: Path, *, has_nodes: bool) -> None:
        self._dev, self._sys = home / "dev", home / "sys"
        self._items: dict[str, bytes] = {}
        self._changed = asyncio.Event()
        if has_nodes:
            for name in os.listdir(self._dev):  # noqa: PTH208  # strings are enough
                self.look(name)
        else:
            self._items["one"] = self._item("one", None)

    def look(self, name: str) -> None:
        before = self._items.get(name)
        try:
            number = (self._dev / name).lstat().st_rdev
        except FileNotFoundError:
            self._items.pop(name, None)
        else:
            self._items[name] = self._item(name, self._numa_node(number))
        if self._items.get(name) != before:
            self._changed.set()

    def _numa_node(self, number: int) -> int | None:
        place = self._sys / "dev/char" / f"{os.major(number)}:{os.minor(number)}" / "device/numa_node"
        try:
            node = int(place.read_text())
        except FileNotFoundError:
            return None
        return node if node >= 0 else None

    def _item(self, name: str, numa_node: int | None) -> bytes:
        return wire.list_item(wire.device_head(name), wire.device_tail(True, numa_node))

    def __mapping__(self) -> dict[str, Handler]:
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            _SERVICE + "GetDevicePluginOptions": Handler(self._options, unary, bytes, bytes),
            _SERVICE + "ListAndWatch": Handler(self._list_and_watch, stream, bytes, bytes),
            _SERVICE + "Allocate": Handler(self._allocate, unary, bytes, bytes),
        }

    async def _options(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(b"")

    async def _list_and_watch(self, stream: Any) -> None:
        await stream.recv_message()
        while True:
            self._changed.clear()
            await stream.send_message(b"".join(self._items.values()))
            await self._changed.wait()

    async def _allocate(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(_REPLY)


def _hear(dev: Path, plugin: _Plugin) -> None:
    """By inotify and by uevents."""
    loop, inotify = asyncio.get_running_loop(), Inotify()
    inotify.add_watch(str(dev), CREATE | DELETE)
    uevents = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK, _KOBJECT_UEVENT)
    uevents.bind((0, 1))

    def changed() -> None:
        for _, _, name in inotify.read()[0]:
            plugin.look(name)

    def told() -> None:
        for part in uevents.recv(8192).split(b"\0"):
            if part.startswith(b"DEVNAME="):
                plugin.look(part[8:].decode())

    loop.add_reader(inotify.fileno(), changed)
    loop.add_reader(uevents.fileno(), told)


async def _register(directory: Path, resources: int) -> None:
    channel = Channel(path=f"{directory}/kubelet.sock", codec=_Bytes())
    call = UnaryUnaryMethod[bytes, bytes](channel, "/v1beta1.Registration/Register", bytes, bytes)
    requests = [
        wire.encode_register("v1beta1", f"{n}.sock", name, wire.PluginOptions())
        for n, name in enumerate(resource_names(resources))
    ]
    await asyncio.gather(*map(call, requests))
    channel.close()


async def _main(home: Path, resources: int) -> None:
    directory = home / "kubelet" / "device-plugins"
    plugins = [_Plugin(home, has_nodes=n == 0) for n in range(resources)]
    servers = [Server([plugin], codec=_Bytes()) for plugin in plugins]
    for n, server in enumerate(servers):
        await server.start(path=f"{directory}/{n}.sock")
    _hear(home / "dev", plugins[0])
    over = asyncio.Event()
    tasks = {asyncio.create_task(_register(directory, resources))}

    def obey() -> None:
        orders = os.read(sys.stdin.fileno(), 64)
        tasks.update(asyncio.create_task(_register(directory, resources)) for order in orders if order == ord("r"))
        if not orders:
            over.set()

    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), obey)
    await over.wait()


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2])))
