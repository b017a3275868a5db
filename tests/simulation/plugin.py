"""A tiny device plugin whose every step a test decides: it has no wisdom about kubelets at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpclib.client import Channel
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError

from agent.kubelet.api.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    DevicePluginBase,
    DevicePluginOptions,
    Empty,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
    RegisterRequest,
    RegistrationStub,
)
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Codec, Encoded, device_head, device_tail, join_list, list_item
from agent.kubelet.witnesses import record
from agent.simulation.kubelet import Kubelet
from agent.simulation.model import ResourceView
from tests.wait import until

TOY = "example.com/toy"
LIST_AND_WATCH = "/v1beta1.DevicePlugin/ListAndWatch"


def devices(*ids: str, unhealthy: Sequence[str] = (), numa_node: int | None = None) -> Encoded:
    """A list of healthy devices, then unhealthy ones."""
    healthy_items = [list_item(device_head(i), device_tail(True, numa_node)) for i in ids]
    return join_list(healthy_items + [list_item(device_head(i), device_tail(False, numa_node)) for i in unhealthy])


async def recorded(plugin_dir: Path, resource: str, *ids: str) -> None:
    """Wait until the kubelet has written that exactly these are healthy: it shows them before."""
    await until(lambda: record(plugin_dir)[1].get(resource) == frozenset(ids), f"the kubelet's record of {resource}")


async def register(
    socket: Path, resource: str, endpoint: str, *, version: str = "v1beta1", timeout: float | None = None
) -> None:
    """One Register call; raises what the kubelet answers."""
    channel = Channel(path=str(socket), codec=Codec())
    try:
        request = RegisterRequest(version=version, endpoint=endpoint, resource_name=resource)
        await RegistrationStub(channel).register(request, timeout=timeout)
    finally:
        channel.close()


@asynccontextmanager
async def serving(
    kubelet: Kubelet, listed: Encoded, name: str = "toy.sock", **settings: object
) -> AsyncIterator[ToyPlugin]:
    """A toy that has registered, and whose devices can be had; `settings` are attributes it has before."""
    async with ToyPlugin(kubelet.plugin_dir, TOY, listed, name) as plugin:
        for setting, value in settings.items():
            setattr(plugin, setting, value)
        await serve(kubelet, plugin)
        yield plugin


async def serve(kubelet: Kubelet, plugin: ToyPlugin) -> None:
    """Register it, and wait until its devices can be had."""
    await plugin.register()
    await kubelet.wait_for(lambda k: k.resources.get(TOY, ResourceView(TOY)).allocatable > 0)


class ToyPlugin(DevicePluginBase):
    """Serves one resource on a socket in the kubelet's plugin directory; a new stream gets the current list.

    What it was asked is recorded (`allocations`, `preferences`, `pre_starts`); `on_allocate`, `on_pre_start`
    and `prefer` change how it answers; `fail_options` is the error of its options call.
    """

    def __init__(self, plugin_dir: Path, resource: str, listed: Encoded, name: str = "toy.sock") -> None:
        self.resource = resource
        self.endpoint = name
        self.kubelet = plugin_dir / "kubelet.sock"
        self.options = DevicePluginOptions()
        self.fail_options: str | None = None
        self.on_allocate: Callable[[Sequence[str]], Awaitable[AllocateResponse]] | None = None
        self.on_pre_start: Callable[[Sequence[str]], Awaitable[None]] | None = None
        self.prefer: Callable[[Sequence[str], Sequence[str], int], Sequence[str]] | None = None
        self.allocations: list[list[str]] = []
        self.preferences: list[tuple[list[str], list[str], int]] = []
        self.pre_starts: list[list[str]] = []
        self.calls: list[str] = []
        self._list = listed
        self._queues: list[asyncio.Queue[Encoded | None]] = []
        self.server = SocketServer([self], plugin_dir / name)

    async def __aenter__(self) -> Self:
        await self.server.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_streams()
        await self.server.shut_down()

    async def register(self, *, timeout: float | None = None) -> None:
        await register(self.kubelet, self.resource, self.endpoint, timeout=timeout)

    def publish(self, listed: Encoded) -> None:
        """Send this list on every open stream, and first on every later one."""
        self._list = listed
        for queue in self._queues:
            queue.put_nowait(listed)

    def end_streams(self, which: slice = slice(None)) -> None:
        """Let streams return normally, oldest first."""
        for queue in self._queues[which]:
            queue.put_nowait(None)

    def die(self) -> None:
        """Break every connection, as the end of a process does."""
        self.server.reset_connections()

    @property
    def streams(self) -> int:
        return len(self._queues)

    async def _list_and_watch(self, stream: Any) -> None:
        self.calls.append("ListAndWatch")
        await stream.recv_message()
        queue: asyncio.Queue[Encoded | None] = asyncio.Queue()
        queue.put_nowait(self._list)
        self._queues.append(queue)
        try:
            while (message := await queue.get()) is not None:
                await stream.send_message(message)
        finally:
            self._queues.remove(queue)

    async def get_device_plugin_options(self, empty: Empty) -> DevicePluginOptions:
        self.calls.append("GetDevicePluginOptions")
        if self.fail_options is not None:
            raise GRPCError(Status.UNKNOWN, self.fail_options)
        return self.options

    async def allocate(self, allocate_request: AllocateRequest) -> AllocateResponse:
        (container,) = allocate_request.container_requests
        self.allocations.append(container.device_ids)
        if self.on_allocate is not None:
            return await self.on_allocate(container.device_ids)
        return AllocateResponse([ContainerAllocateResponse(envs={"GIVEN": ",".join(sorted(container.device_ids))})])

    async def get_preferred_allocation(
        self, preferred_allocation_request: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        (wish,) = preferred_allocation_request.container_requests
        self.preferences.append((wish.available_ids, wish.must_include_ids, wish.allocation_size))
        if self.prefer is None:
            raise GRPCError(Status.INTERNAL, "no preference today")
        preferred = self.prefer(wish.available_ids, wish.must_include_ids, wish.allocation_size)
        return PreferredAllocationResponse([ContainerPreferredAllocationResponse(list(preferred))])

    async def pre_start_container(
        self, pre_start_container_request: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        self.pre_starts.append(pre_start_container_request.device_ids)
        if self.on_pre_start is not None:
            await self.on_pre_start(pre_start_container_request.device_ids)
        return PreStartContainerResponse()

    def __mapping__(self) -> dict[str, Handler]:
        mapping: dict[str, Handler] = super().__mapping__()
        mapping[LIST_AND_WATCH] = mapping[LIST_AND_WATCH]._replace(func=self._list_and_watch)
        return mapping
