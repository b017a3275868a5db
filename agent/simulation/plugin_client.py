"""A plugin as the kubelet holds it: the connection dialled at its registration, and the calls on it.

Kubelet contract: A1, A4. Errors read as Go's gRPC writes them, for the pod's owner sees them so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status
from grpclib.exceptions import GRPCError, StreamTerminatedError
from grpclib.protocol import H2Protocol
from msgspec import Struct

from agent.kubelet.api.v1beta1 import (
    AllocateRequest,
    ContainerAllocateRequest,
    ContainerPreferredAllocationRequest,
    DevicePluginOptions,
    Empty,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
)
from agent.kubelet.wire import Codec, MalformedError, messages
from agent.simulation.clock import Clock

DIAL_TIMEOUT: Final = 10.0  # seconds (kubelet contract: A1)
PRE_START_TIMEOUT: Final = 30.0  # seconds (kubelet contract: A4)
MESSAGE_LIMIT: Final = 4 * 1024 * 1024  # bytes that grpc-go receives (kubelet contract: A1)
_BACKOFF: Final = (1.0, 1.6)  # grpc-go's first pause between attempts to connect, and its growth

_Reply = TypeVar("_Reply")


class PluginError(Exception):
    """The plugin cannot be reached, or has answered with an error."""


class Arrival(Struct, frozen=True):
    """A list as its bytes, and the `time.perf_counter()` at which the last of them had come."""

    at: float
    data: bytes

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Only take note; reading comes later."""
        return cls(time.perf_counter(), data)


class AllocateReply(Struct, frozen=True):
    """An AllocateResponse: each container's part as its bytes, for the checkpoint."""

    containers: tuple[bytes, ...]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read AllocateResponse{container_responses=1}."""
        return cls(tuple(messages(data, 1)))


class _LimitedCodec(Codec):
    def decode(self, data: bytes, message_type: type[_Reply]) -> _Reply:
        if len(data) > MESSAGE_LIMIT:
            raise GRPCError(
                Status.RESOURCE_EXHAUSTED,
                f"grpc: received message larger than max ({len(data)} vs. {MESSAGE_LIMIT})",
            )
        return super().decode(data, message_type)


class _Protocol(H2Protocol):
    """Knows whether the other side serves: grpc-go calls a connection ready when its settings have come."""

    def __init__(self, base: H2Protocol) -> None:
        super().__init__(base.handler, base.config, base.h2_config)
        self.served = asyncio.Event()

    def data_received(self, data: bytes) -> None:
        self.served.set()
        super().data_received(data)


class _Channel(Channel):
    def __init__(self, path: Path) -> None:
        super().__init__(path=str(path), codec=_LimitedCodec())
        self._authority = "localhost"  # as the kubelet says it
        self._over = False

    async def __connect__(self) -> H2Protocol:
        """As grpclib's, but what was closed stays closed: a call that is late would connect it again.

        Raises:
            OSError: it is closed, or there is no listening socket.
        """
        if not self._over:
            protocol = await super().__connect__()
        if self._over:
            super().close()
            raise ConnectionAbortedError("the client connection is closing")
        return protocol

    def _protocol_factory(self) -> H2Protocol:
        return _Protocol(super()._protocol_factory())

    async def connect(self) -> None:
        """Connect and wait until the other side serves.

        Raises:
            OSError: there is no listening socket.
        """
        protocol = await self.__connect__()
        assert isinstance(protocol, _Protocol)
        await protocol.served.wait()

    def close(self) -> None:
        """Close the connection for good."""
        self._over = True
        super().close()

    def abort(self) -> None:
        """Break the connection."""
        if self._protocol is not None and not self._protocol.connection.is_closing():
            self._protocol.connection._transport.abort()  # grpclib forgets it when it closes
        self.close()


class PluginClient:
    """One dialled plugin; used by the registration that dialled it."""

    def __init__(self, resource: str, path: Path, clock: Clock) -> None:
        self.resource = resource
        self.path = path
        self._clock = clock
        self._channel: _Channel | None = None

    async def dial(self) -> None:
        """Connect, trying again as grpc-go does, for as long as the kubelet blocks.

        Raises:
            PluginError: no plugin serves there within ten seconds.
        """
        channel = _Channel(self.path)
        try:
            async with self._clock.timeout(DIAL_TIMEOUT):
                await self._connect(channel)
        except TimeoutError:
            channel.abort()
            raise PluginError("failed to dial device plugin: context deadline exceeded") from None
        except BaseException:
            channel.abort()
            raise
        self._channel = channel

    async def _connect(self, channel: _Channel) -> None:
        pause, growth = _BACKOFF
        while True:
            try:
                return await channel.connect()
            except OSError:
                await self._clock.sleep(pause)
                pause *= growth

    def close(self) -> None:
        """Close the connection for good; before it is dialled there is none to close, and it will be made (A2)."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def abort(self) -> None:
        """Break the connection for good, as a killed process does."""
        if self._channel is not None:
            self._channel.abort()
            self._channel = None

    async def options(self) -> DevicePluginOptions:
        """GetDevicePluginOptions.

        Raises:
            PluginError: as every call here.
        """
        return await self._call("GetDevicePluginOptions", Empty(), DevicePluginOptions)

    async def watch(self, opened: Callable[[], None], received: Callable[[Arrival], Awaitable[None]]) -> str:
        """ListAndWatch until the stream ends; why it ended."""
        try:
            async with self._method(UnaryStreamMethod, "ListAndWatch", Empty, Arrival).open() as stream:
                await stream.send_message(Empty(), end=True)
                opened()
                while (arrival := await stream.recv_message()) is not None:
                    await received(arrival)
        except (GRPCError, StreamTerminatedError, MalformedError, OSError) as error:
            return _sentence(error)
        return "EOF"

    async def allocate(self, ids: Iterable[str]) -> AllocateReply:
        """Allocate for one container, without a deadline (A4)."""
        request = AllocateRequest([ContainerAllocateRequest(list(ids))])
        return await self._call("Allocate", request, AllocateReply)

    async def preferred(self, available: Iterable[str], must_include: Iterable[str], size: int) -> tuple[str, ...]:
        """GetPreferredAllocation for one container; the IDs it prefers, if it names any."""
        wish = ContainerPreferredAllocationRequest(list(available), list(must_include), size)
        request = PreferredAllocationRequest([wish])
        reply = await self._call("GetPreferredAllocation", request, PreferredAllocationResponse)
        return tuple(reply.container_responses[0].device_ids) if reply.container_responses else ()

    async def pre_start(self, ids: Iterable[str]) -> None:
        """PreStartContainer, within thirty seconds (A4)."""
        request = PreStartContainerRequest(list(ids))
        try:
            async with self._clock.timeout(PRE_START_TIMEOUT):
                await self._call("PreStartContainer", request, PreStartContainerResponse, PRE_START_TIMEOUT)
        except TimeoutError:
            raise PluginError(_rpc_error(Status.DEADLINE_EXCEEDED, "context deadline exceeded")) from None

    async def _call(
        self, method: str, request: object, reply_type: type[_Reply], deadline: float | None = None
    ) -> _Reply:
        try:
            reply: _Reply = await self._method(UnaryUnaryMethod, method, type(request), reply_type)(
                request, timeout=deadline
            )
        except (GRPCError, StreamTerminatedError, MalformedError, OSError) as error:
            raise PluginError(_sentence(error)) from None
        return reply

    def _method(self, kind: type[Any], name: str, request_type: type[Any], reply_type: type[Any]) -> Any:
        if self._channel is None:
            raise GRPCError(Status.CANCELLED, "grpc: the client connection is closing")
        return kind(self._channel, f"/v1beta1.DevicePlugin/{name}", request_type, reply_type)


def _sentence(error: Exception) -> str:
    if isinstance(error, GRPCError):
        return _rpc_error(error.status, error.message or "")
    if isinstance(error, MalformedError):
        return _rpc_error(Status.INTERNAL, f"grpc: failed to unmarshal the received message: {error}")
    return _rpc_error(Status.UNAVAILABLE, f"error reading from server: {error}")


def _rpc_error(status: Status, message: str) -> str:
    code = {Status.CANCELLED: "Canceled"}.get(status, status.name.title().replace("_", ""))
    return f"rpc error: code = {code} desc = {message}"
