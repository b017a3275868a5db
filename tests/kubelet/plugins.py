"""A plugin under test: its lists are made by hand, its calls by a client that counts what it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod

from agent.inventory.lists import Listing
from agent.kubelet.api.v1beta1 import AllocateRequest, AllocateResponse, ContainerAllocateRequest, Empty
from agent.kubelet.plugin import Plugin
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Codec, DeviceList, Encoded, encode_allocate
from agent.model import HEALTHY, Health, Slot, State
from backends.base import ContainerEdits, Device
from tests.wait import limit

TOY = "example.com/toy"
SICK = Health(State.UNHEALTHY, "node-missing", "/dev/toy does not exist")
SERVICE = "/v1beta1.DevicePlugin/"


def device(key: str, numa_node: int | None = None) -> Device:
    return Device(key, "unit", frozenset({f"toy:{key}"}), numa_node=numa_node)


@dataclass(frozen=True, slots=True)
class Raw:
    """A message as its bytes."""

    data: bytes

    @classmethod
    def parse(cls, data: bytes) -> Self:
        return cls(data)


async def nothing(resource: str, ids: Sequence[str], told: Callable[[str], bool]) -> Encoded:
    """Hands out an environment variable with the IDs."""
    return encode_allocate([ContainerEdits(env={"GIVEN": ",".join(ids)})])


class Lists:
    """The lists of a resource, published to a plugin as the inventory would."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin
        self.listing = Listing(plugin.resource)

    def put(self, *ids: str, health: Health = HEALTHY, numa_node: int | None = None) -> None:
        for device_id in ids:
            self.listing.write({device_id: Slot(device_id, device(device_id, numa_node), health)})
        self.publish()

    def drop(self, *ids: str) -> None:
        for device_id in ids:
            self.listing.drop(device_id)
        self.publish()

    def publish(self) -> None:
        self.plugin.publish(self.listing.snapshot())


class Client:
    """What a kubelet does with a plugin."""

    def __init__(self, path: Path) -> None:
        self.channel = Channel(path=str(path), codec=Codec())

    def close(self) -> None:
        self.channel.close()

    async def call(self, method: str, request: Any, reply: type[Any]) -> Any:
        async with limit():
            return await UnaryUnaryMethod(self.channel, SERVICE + method, type(request), reply)(request)

    async def allocate(self, *ids: str) -> AllocateResponse:
        request = AllocateRequest([ContainerAllocateRequest(list(ids))])
        reply: AllocateResponse = await self.call("Allocate", request, AllocateResponse)
        return reply

    @asynccontextmanager
    async def watch(self, message: type[Any] = DeviceList) -> AsyncIterator[Any]:
        """An open ListAndWatch, of which the messages can be received."""
        async with UnaryStreamMethod(self.channel, SERVICE + "ListAndWatch", Empty, message).open() as stream:
            await stream.send_message(Empty(), end=True)
            yield stream
            if stream._stream.closable:  # else leaving would wait for the stream's end
                await stream.cancel()


async def received(stream: Any) -> Any:
    async with limit():
        return await stream.recv_message()


async def listed(stream: Any) -> Mapping[str, str]:
    """The next list: ID → health."""
    message = await received(stream)
    assert message is not None, "the stream has ended"
    return {device_id: health for device_id, health, _ in message.devices}


@asynccontextmanager
async def served(path: Path, plugin: Plugin) -> AsyncIterator[SocketServer]:
    server = SocketServer([plugin], path, directly=True)
    await server.open()
    try:
        yield server
    finally:
        plugin.end_stream()
        await server.shut_down(0.1)


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Client]:
    client = Client(path)
    try:
        yield client
    finally:
        client.close()
        await asyncio.sleep(0)


def healthy(ids: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(ids, "Healthy")


def more_than_fits() -> list[str]:
    """IDs whose list is longer than what sockets hold for a client that does not read."""
    return [f"device-{n:04}-{'x' * 500}" for n in range(4000)]
