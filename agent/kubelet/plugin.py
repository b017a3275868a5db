"""The device plugin service of one resource: what the kubelet calls.

ListAndWatch is level-triggered: a stream remembers the generation it sent and sends the latest newer one,
at once for the first change, then at most one message per `COALESCE` seconds (every message makes the
kubelet rewrite its checkpoint: A3). All handlers are raw grpclib handlers: betterproto's servicer base hides
the stream, and an async-generator servicer leaks when the client dies while a send is blocked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import structlog
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError

from agent.kubelet import wire
from agent.kubelet.api.v1beta1 import DevicePluginOptions, PreStartContainerResponse
from backends.base import AllocationRefused

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from grpclib.server import Stream

    from agent.devices.model import Slot, Snapshot

COALESCE: Final = 0.05
"""Seconds between two messages of one stream."""

SERVICE: Final = "/v1beta1.DevicePlugin/"

log = structlog.get_logger()

Allocate = Callable[[str, Sequence[str], Callable[[str], bool]], Awaitable[wire.Encoded]]
"""Gives these IDs of a resource to a container, as an AllocateResponse; asks whether the kubelet was told of an ID.

Raises AllocationRefused with a sentence for the pod's owner.
"""


class Plugin:
    """One resource as the kubelet sees it."""

    def __init__(self, resource: str, allocate: Allocate) -> None:
        self.resource = resource
        self.streaming = False
        self.streams = 0
        """How many streams have been opened so far."""
        self.allocating = 0
        """How many Allocates are under way."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when a stream has opened or ended, and when an Allocate has been answered."""
        self._allocate_ids = allocate
        self._list = _EncodedList()
        self._snapshot: Snapshot | None = None
        self._sent: Mapping[str, Slot] = {}
        self._sending: Mapping[str, Slot] | None = None
        self._news = asyncio.Event()
        self._ending = asyncio.Event()

    # --- for the daemon ---

    def publish(self, snapshot: Snapshot) -> None:
        """The resource's list is this from now on."""
        self._list.apply(snapshot)
        self._snapshot = snapshot
        self._news.set()

    def end_stream(self) -> None:
        """Let the open stream return normally, with trailers; no other is accepted until `reopen`."""
        self._ending.set()
        self._news.set()

    def reopen(self) -> None:
        """Accept a stream again."""
        self._ending.clear()

    # --- the service ---

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers as grpclib wants them; every method is served (an unserved one upsets grpc-go)."""
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            SERVICE + "GetDevicePluginOptions": Handler(self._options, unary, wire.EmptyCall, DevicePluginOptions),
            SERVICE + "ListAndWatch": Handler(self._list_and_watch, stream, wire.EmptyCall, wire.DeviceList),
            SERVICE + "Allocate": Handler(self._allocate, unary, wire.AllocateCall, wire.Encoded),
            SERVICE + "GetPreferredAllocation": Handler(self._prefer, unary, wire.PreferredCall, wire.Encoded),
            SERVICE + "PreStartContainer": Handler(self._pre_start, unary, wire.IdsCall, PreStartContainerResponse),
        }

    async def _options(self, stream: Stream[wire.EmptyCall, DevicePluginOptions]) -> None:
        await _receive(stream)
        await stream.send_message(DevicePluginOptions())

    async def _list_and_watch(self, stream: Stream[wire.EmptyCall, Any]) -> None:
        await _receive(stream)
        if self.streaming or self._ending.is_set():
            raise GRPCError(Status.UNAVAILABLE, f"{self.resource} has an open stream, or its plugin is stopping")
        self.streaming = True
        self.streams += 1
        self.on_call()
        try:
            await self._send_lists(stream)
        finally:
            self.streaming = False
            self._sending = None
            self.on_call()

    async def _send_lists(self, stream: Stream[wire.EmptyCall, Any]) -> None:
        sent, next_message = None, 0.0
        while not self._ending.is_set():
            snapshot = self._snapshot
            if snapshot is None or snapshot is sent:
                self._news.clear()
                await self._news.wait()
            elif (wait := next_message - time.monotonic()) > 0:
                await self._pause(wait)
            else:
                # No timeout around a send: one that is cut off corrupts the stream. A client that
                # does not read holds up this stream alone; registration breaks its connection.
                self._sending = snapshot.slots
                await stream.send_message(self._list.message())
                self._sent, self._sending = snapshot.slots, None
                sent, next_message = snapshot, time.monotonic() + COALESCE

    async def _pause(self, seconds: float) -> None:
        """Let changes gather; cut short when the stream is to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ending.wait()

    def _was_told(self, device_id: str) -> bool:
        """Is this ID in the last list that the kubelet got, and in the one under way (kubelet contract: A7.1)?"""
        return device_id in self._sent and (self._sending is None or device_id in self._sending)

    async def _allocate(self, stream: Stream[wire.AllocateCall, Any]) -> None:
        call = await _receive(stream)
        self.allocating += 1
        try:
            given = [await self._give(ids) for ids in call.containers]
            await stream.send_message(wire.Encoded(b"".join(given)))  # messages one after the other are merged
        finally:
            self.allocating -= 1
            self.on_call()

    async def _give(self, ids: Sequence[str]) -> wire.Encoded:
        try:
            return await self._allocate_ids(self.resource, ids, self._was_told)
        except AllocationRefused as refusal:
            log.warning("allocation-refused", resource=self.resource, ids=list(ids), reason=refusal.sentence)
            raise GRPCError(Status.FAILED_PRECONDITION, refusal.sentence) from None

    async def _prefer(self, stream: Stream[wire.PreferredCall, Any]) -> None:
        # not announced, so a kubelet does not call it; the plain choice is right for whoever does
        call = await _receive(stream)
        await stream.send_message(wire.encode_preferred([request.first_ones() for request in call.containers]))

    async def _pre_start(self, stream: Stream[wire.IdsCall, PreStartContainerResponse]) -> None:
        await _receive(stream)
        await stream.send_message(PreStartContainerResponse())


async def _receive(stream: Stream[Any, Any]) -> Any:
    """The call's message; malformed bytes are the caller's error and end this call alone."""
    try:
        message = await stream.recv_message()
    except (wire.MalformedError, AssertionError, NotImplementedError) as error:  # grpclib's: cut off; compressed
        raise GRPCError(Status.INVALID_ARGUMENT, f"malformed request: {error}") from None
    if message is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request has no message")
    return message


class _EncodedList:
    """The list as bytes, ID by ID; only what changed is encoded again."""

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        self._items: dict[str, bytes] = {}
        self._generation = 0
        self._message: wire.Encoded | None = None

    def apply(self, snapshot: Snapshot) -> None:
        """Take over what the snapshot changed."""
        self._message = None
        changed: Set[str] | None = snapshot.changed
        if changed is None or snapshot.generation != self._generation + 1:
            self._heads, self._items = {}, {}
            changed = snapshot.slots.keys()
        self._generation = snapshot.generation
        slots, heads, items = snapshot.slots, self._heads, self._items
        device, health, tail = None, None, b""
        for device_id in changed:
            slot = slots.get(device_id)
            if slot is None:
                heads.pop(device_id, None)
                items.pop(device_id, None)
                continue
            head = heads.get(device_id)
            if head is None:
                head = heads[device_id] = wire.device_head(device_id)
            if slot.health is not health or slot.device is not device:  # 1,000 tokens of one device share them
                device, health = slot.device, slot.health
                tail = wire.device_tail(health.offered, device.numa_node if device else None)
            items[device_id] = wire.list_item(head, tail)

    def message(self) -> wire.Encoded:
        """The whole list."""
        if self._message is None:
            self._message = wire.join_list(self._items.values())
        return self._message
