"""The device plugin service of one resource: what the kubelet calls. What Allocate answers is decided in `allocation.py`.

ListAndWatch is level-triggered: a stream remembers the generation it sent and sends the latest newer one, at once
for the first `CREDIT` changes, then at most one message per `COALESCE` seconds (every message makes the kubelet
rewrite its checkpoint: A3). All handlers are raw grpclib handlers: betterproto's servicer base hides
the stream, and an async-generator servicer leaks when the client dies while a send is blocked.
"""

from __future__ import annotations

import asyncio
import time
from binascii import crc32
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import anyio
import structlog
from anyio import to_thread
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from msgspec import Struct

from agent.kubelet import wire
from agent.kubelet.allocation import Allocate, Prefer, PreStart, plain
from agent.kubelet.handover_socket import StandbyLostError
from agent.kubelet.rivals import Offer
from agent.kubelet.server import refusal
from agent.runtime.counts import Counts
from agent.runtime.errors import brief_list, some
from agent.runtime.pacing import STEP, Credit, Running
from backends.base import AllocationRefused

if TYPE_CHECKING:
    from grpclib.server import Stream

    from agent.kubelet.client import GatheringTransport
    from agent.kubelet.handover_socket import Relay
    from agent.kubelet.lock import Lock
    from agent.model import Slot, Snapshot

COALESCE: Final = 0.05
"""Seconds between two messages of one stream, once its credit is spent."""

CREDIT: Final = 3
"""Messages that a stream may send at once: an event is often followed by a second one. `COALESCE` seconds earn one."""

REMEMBERED: Final = 2.5
"""Seconds for which an ID that was missing from a list is not given out, though it is back (kubelet contract: A7.1).

The kubelet may have asked for it before it read that list, and looks it up again after our reply, perhaps while it is
still at that list. It takes milliseconds for one, and waits for its disk meanwhile: two seconds for one record are not rare on
a busy one. While it has not read its socket, it stands still, and no time counts. While it writes records, as it does at each
list, it may be on its way to that list: these seconds begin with the last of them, `_SLOWEST` seconds after that list at the
latest. An Allocate waits as long: a refusal would fail a pod that asks, as it should, for hardware that is there.
"""
_SLOWEST: Final = 10.0
_DELISTED_AT_MOST: Final = 100_000  # a list of 4 MiB has half as many

_PARTS: Final = 64  # of an encoded list; each device is always in the same one
_AT_ONCE: Final = 5000  # IDs that are encoded in one step of the loop, which takes some ms
_LONG: Final = 1 << 16
"""Bytes of a request that a thread reads: 5,000 IDs; a list has ten times as many, all may be free."""

T = TypeVar("T")

log = structlog.get_logger()


class _Departure(Struct, gc=False):
    """That a list lacked IDs which one before had."""

    sent: float
    """Monotonic seconds, moved on by the time in which this process or the kubelet stood still."""
    remembered_since: float
    """Since when the IDs are remembered."""


class Plugin:
    """One resource as the kubelet sees it."""

    def __init__(
        self,
        resource: str,
        allocate: Allocate,
        prefer: Prefer | None = None,
        pre_start: PreStart | None = None,
        *,
        confirm: Callable[[str, Callable[[], Set[str]]], Awaitable[None]] | None = None,
        counts: Counts | None = None,
        record: Callable[[], object] = lambda: None,
        lock: Lock | None = None,
    ) -> None:
        """Prepare; the kubelet is told to ask which devices a pod should get, and before a container starts, if given.

        `confirm` takes in, before a list is sent, what pods hold of the resource and these IDs lack (kubelet contract: A7.2).
        `record` identifies the last writing of the kubelet's record; `lock` is what the one agent of the node has.
        """
        self.resource = resource
        self.streams = 0
        """How many streams have been opened so far."""
        self.refused = 0
        """How many were refused: one was open and no other was awaited, or the plugin is stopping."""
        self.allocating = 0
        """How many Allocates are under way."""
        self.awaited = 0
        """How many parts of the daemon wait until one is answered, or the first list is sent."""
        self.asked = 0
        """How many Allocates have come for IDs of our lists. Only a client that is not the kubelet asks for others."""
        self.relay: Relay | None = None
        """Passes calls on to the standby while the resource is handed over."""
        self.on_call: Callable[[], None] = lambda: None
        """Called when a stream has opened or ended, or was refused, and when an awaited Allocate or first list has gone out."""
        self._counts = counts or Counts()
        self._allocate_ids = allocate
        self._prefer_ids = prefer
        self._check_start = pre_start
        self._confirm, self._lock = confirm, lock
        self._list = EncodedList()
        self._snapshot: Snapshot | None = None
        self._since: float | None = None
        self.sent_at = 0.0
        """When the last list was sent, in monotonic seconds."""
        self.began = 0.0
        """When the first list of the open stream was sent; 0: none was."""
        self._records: tuple[object, object] = None, None  # the kubelet's, when the first and the last list were sent
        self._is_silent = self._sends_again = False
        self._besides: Set[str] = frozenset()
        self._sent: Mapping[str, Slot] = {}
        self._unhealthy: Set[str] = frozenset()  # of these
        self._sending: Mapping[str, Slot] | None = None
        self._running = Running(time.monotonic())
        self._missed = 0.0
        self._ticking = False
        self._is_unread: Callable[[], bool] = lambda: False
        self._record, self._recorded = record, record()
        self._departures: list[_Departure] = []
        self._left: dict[str, _Departure] = {}
        """ID → the last list that took it off, as long as it is remembered."""
        self._delisted: dict[str, None] = {}  # the IDs that left the lists of the open stream, the latest of them last
        self._news = asyncio.Event()
        self._reading = anyio.CapacityLimiter(1)  # of long messages: one of 4 MiB becomes 50 MB
        self._open: list[asyncio.Event] = []  # of each open stream what ends it; the one that opened last has the lists
        self._latest: asyncio.Event | None = None
        self._accepts_another, self._is_stopping = False, False

    # --- for the daemon ---

    @property
    def streaming(self) -> bool:
        """Whether the stream that was opened last is open."""
        return self._latest is not None

    @property
    def earlier_streams(self) -> int:
        """How many streams are open beside the one that was opened last."""
        return len(self._open) - self.streaming

    @property
    def options(self) -> wire.PluginOptions:
        """What the kubelet is told to ask for; it reads them when the resource is registered (kubelet contract: A1)."""
        return wire.PluginOptions(self._check_start is not None, self._prefer_ids is not None)

    @property
    def offers(self) -> bool:
        """Whether the last list that was sent had healthy devices."""
        return len(self._sent) > len(self._unhealthy)

    @property
    def offer(self) -> Offer | None:
        """What the open stream has told the kubelet; None before its first list."""
        if not self.began:
            return None
        return Offer(self._sent, self._unhealthy, self._delisted, self.began, self.sent_at, *self._records)

    def silence(self, silent: bool, besides: Set[str] = frozenset()) -> None:
        """Send no list until this is called with False or a stream opens; then send the list, changed or not.

        One in which an ID of `besides` is healthy no more is sent all the same: the kubelet would give that to a pod.
        """
        self._sends_again = self._is_silent and not silent
        self._is_silent, self._besides = silent, besides
        self._news.set()

    def repeat(self) -> None:
        """Send the list again: the kubelet has read an earlier one after it."""
        self._sends_again = True
        self._news.set()

    def set_hooks(self, prefer: Prefer | None, pre_start: PreStart | None) -> bool:
        """Answer with these from now on; True if the options differ, so that the kubelet has to read them again."""
        before = self.options
        self._prefer_ids, self._check_start = prefer, pre_start
        return self.options != before

    def publish(self, snapshot: Snapshot, since: float | None = None) -> None:
        """Send this list to the kubelet; `since` is the monotonic time of the event that caused it, where one did."""
        self._since = since if self._since is None else self._since
        self._list.apply(snapshot)
        self._snapshot = snapshot
        self._news.set()

    def end_stream(self) -> None:
        """End each open stream with trailers, and accept no other until `reopen`."""
        self._is_stopping = True
        self._end(*self._open)

    def end_earlier_streams(self) -> None:
        """End each stream but the one that was opened last."""
        self._end(*(one for one in self._open if one is not self._latest))

    def _end(self, *streams: asyncio.Event) -> None:
        for ending in streams:
            ending.set()
        self._news.set()

    def reopen(self) -> None:
        """Accept one more stream, also beside an open one; from then on that one has the lists."""
        self._is_stopping, self._accepts_another = False, True

    def assume_told(self) -> None:
        """Take the list for one that the kubelet has: the agent before us sent it, and pods are given its IDs already."""
        if self._snapshot is not None and not self._sent:
            self._sent = self._snapshot.slots
            self._unhealthy = self._sent.keys() - _healthy(self._sent)

    # --- the service ---

    def __mapping__(self) -> dict[str, Handler]:
        """The handlers as grpclib wants them; every method is served (an unserved one upsets grpc-go)."""
        unary, stream = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        return {
            wire.PLUGIN_SERVICE + "GetDevicePluginOptions": Handler(self._options, unary, wire.Encoded, wire.Encoded),
            wire.PLUGIN_SERVICE + "ListAndWatch": Handler(self.list_and_watch, stream, wire.Encoded, wire.DeviceList),
            wire.PLUGIN_SERVICE + "Allocate": Handler(self._allocate, unary, wire.Encoded, wire.Encoded),
            wire.PLUGIN_SERVICE + "GetPreferredAllocation": Handler(self._prefer, unary, wire.Encoded, wire.Encoded),
            wire.PLUGIN_SERVICE + "PreStartContainer": Handler(self._pre_start, unary, wire.Encoded, wire.Encoded),
        }

    async def _options(self, stream: Stream[wire.Encoded, wire.Encoded]) -> None:
        await self._receive(stream, wire.EmptyCall.parse)
        # these count: those of a RegisterRequest are ignored (A1)
        await stream.send_message(wire.encode_options(self.options))

    async def list_and_watch(self, stream: Stream[wire.Encoded, Any], *, is_late: bool = False) -> None:
        """Send the lists until the stream is to end; refuse one that comes too late for its registration."""
        await self._receive(stream, wire.EmptyCall.parse)
        if is_late or self._is_stopping or (self._open and not self._accepts_another):
            self.refused += 1
            self.on_call()
            raise GRPCError(Status.UNAVAILABLE, f"{self.resource} has an open stream, or its plugin is stopping")
        self._latest = ending = asyncio.Event()
        self._open.append(ending)
        self._accepts_another = False
        self.streams += 1
        self._left.clear()
        self._departures.clear()
        self._delisted.clear()
        self.began, self._is_silent, self._sends_again = 0.0, False, False
        self._is_unread = cast("GatheringTransport", stream.peer._transport).is_unread
        self.on_call()
        try:
            await self._send_lists(stream, ending)
        finally:
            self._open.remove(ending)
            if ending is self._latest:
                self._latest, self.began, self._sending = None, 0.0, None
            self.on_call()

    async def _send_lists(self, stream: Stream[wire.Encoded, Any], ending: asyncio.Event) -> None:
        sent, credit = None, Credit(CREDIT, COALESCE)
        while not ending.is_set():
            snapshot = self._snapshot
            is_over = ending is not self._latest
            if (
                snapshot is None
                or is_over
                or (snapshot is sent and not self._sends_again)
                or self._is_withheld(snapshot)
            ):
                self._news.clear()
                await self._news.wait()
            elif (wait := credit.wait(time.monotonic())) > 0:
                await self._pause(wait, ending)
            else:
                while not self._list.encode(_AT_ONCE):  # noqa: ASYNC110  # others have their turn meanwhile
                    await asyncio.sleep(0)
                if self._confirm is not None:
                    await self._confirm(self.resource, lambda: self._snapshot.slots.keys() if self._snapshot else set())
                    snapshot = self._snapshot or snapshot  # by now there may be a later one, with what is held
                if ending.is_set() or ending is not self._latest or self._is_withheld(snapshot):
                    continue
                self._sends_again = False
                # No timeout around a send: one that is cut off corrupts the stream. A client that
                # does not read holds up this stream alone; registration breaks its connection.
                self._sending = snapshot.slots
                left = self._list.take_left()
                since, self._since = self._since, None
                if self._left:
                    self._let_pass()  # once this list is sent, the kubelet has something to read
                recorded = self._record()
                message = self._list.message()
                unhealthy = frozenset(self._list.unhealthy)  # as it was encoded by now
                await stream.send_message(message)
                if ending is not self._latest:  # a later stream has sent a later list
                    continue
                if left or self._left:
                    self._note_left(left, snapshot.slots)
                self._sent, self._unhealthy, self._sending = snapshot.slots, unhealthy, None
                if self._is_silent:
                    self._besides = frozenset(self._sent.keys() - self._unhealthy)
                self.sent_at = time.monotonic()
                self._records = self._records[0] if self.began else recorded, recorded
                self._counts.updates += 1
                if since is not None:
                    self._counts.hotplug.observe(self.sent_at - since)
                if not self.began:
                    self.began = self.sent_at
                    if self.awaited:
                        self.on_call()
                credit.spend(self.sent_at)
                sent = snapshot

    def _is_withheld(self, snapshot: Snapshot) -> bool:
        """Whether this list is kept from the kubelet for now."""
        return self._is_silent and self._besides <= _healthy(snapshot.slots)

    async def _pause(self, seconds: float, ending: asyncio.Event) -> None:
        """Let changes gather for so long, or until the stream is to end."""
        with anyio.move_on_after(seconds):
            await ending.wait()

    def _note_left(self, left: Set[str], slots: Mapping[str, Slot]) -> None:
        """Remember the IDs that the list which was just sent lacks, and when; forget those that left long ago."""
        gone = [device_id for device_id in left if device_id in self._sent and device_id not in slots]
        if not self._ticking:
            self._running, self._missed = Running(time.monotonic()), 0.0
        now = self._let_pass()
        if gone:
            self._departures.append(_Departure(now, now))
            self._left.update(dict.fromkeys(gone, self._departures[-1]))
        self._delisted.update(dict.fromkeys(gone))
        for device_id in list(islice(self._delisted, max(0, len(self._delisted) - _DELISTED_AT_MOST))):
            del self._delisted[device_id]
        if not self._ticking:
            self._tick()

    def _tick(self) -> None:
        self._let_pass()
        if self._left:
            asyncio.get_running_loop().call_later(STEP, self._tick)
        self._ticking = bool(self._left)

    def _let_pass(self) -> float:
        """Forget the IDs that left long ago, and return the time; while this process or the kubelet stands still none passes."""
        before, now = self._missed, time.monotonic()
        self._missed = self._running.missed(now, counts=not self._is_unread())
        missed, recorded = self._missed - before, self._recorded
        self._recorded = self._record()
        since = now if self._recorded != recorded else 0.0
        for one in self._departures:
            one.sent += missed
            one.remembered_since = max(one.remembered_since + missed, min(since, one.sent + _SLOWEST))
        if any(now >= one.remembered_since + REMEMBERED for one in self._departures):
            self._departures = [one for one in self._departures if now < one.remembered_since + REMEMBERED]
            self._left = {it: one for it, one in self._left.items() if now < one.remembered_since + REMEMBERED}
        return now

    def _was_told(self, device_id: str) -> bool:
        """Whether this ID is in every list that the kubelet may be reading, and in the one being sent (A7.1)."""
        if self._left:
            self._let_pass()
        is_listed = device_id in self._sent and (self._sending is None or device_id in self._sending)
        return is_listed and device_id not in self._left

    async def _allocate(self, stream: Stream[wire.Encoded, Any]) -> None:
        began = time.monotonic()
        containers = await self._receive(stream, wire.read_allocate)
        self.allocating += 1
        self.asked += any(device_id in self._sent for ids in containers for device_id in ids)
        try:
            given = [await self._give(ids) for ids in containers]
            await stream.send_message(wire.Encoded(b"".join(given)))  # messages one after the other are merged
            asyncio.get_running_loop().call_soon(self._tell_allocated, containers)  # once the reply has left
        finally:
            self._counts.allocating.observe(time.monotonic() - began)
            self.allocating -= 1
            if self.awaited:
                self.on_call()

    def _tell_allocated(self, containers: Sequence[Sequence[str]]) -> None:
        for ids in containers:
            log.info("allocated", resource=self.resource, ids=sorted(set(ids)))

    async def _until_back(self, ids: Sequence[str]) -> None:
        """Wait until the IDs that are back in the list have been remembered for long enough, `_SLOWEST` seconds at most."""
        until = time.monotonic() + _SLOWEST
        while (
            remembered_since := [
                self._left[one].remembered_since for one in ids if one in self._left and one in self._sent
            ]
        ) and time.monotonic() < until:
            await asyncio.sleep(min(max(remembered_since) + REMEMBERED - time.monotonic(), STEP))
            self._let_pass()

    async def _give(self, ids: Sequence[str]) -> wire.Encoded:
        was_silent = self._is_silent
        if self._left:
            await self._until_back(ids)
        try:
            if self.relay is not None:
                with suppress(StandbyLostError):
                    given = await self.relay.allocate(self.resource, ids)
                    await self._see_that_none_left(ids)
                    return given
            self._see_that_we_serve(was_silent=was_silent)
            given = await self._allocate_ids(self.resource, ids, self._was_told)
            self._see_that_we_serve(was_silent=was_silent)
        except AllocationRefused as refused:
            self._counts.allocations[self.resource, "refused"] += 1
            log.warning("allocation-refused", resource=self.resource, ids=brief_list(ids), reason=refused.sentence)
            raise refusal(Status.FAILED_PRECONDITION, refused.sentence) from None
        self._counts.allocations[self.resource, "granted"] += 1
        return given

    async def _see_that_none_left(self, ids: Sequence[str]) -> None:
        """Refuse what a list of ours lacked while another agent answered: that agent does not know of it (kubelet contract: A7.1)."""
        await self._until_back(ids)
        if gone := sorted(self._left.keys() & set(ids)):
            raise AllocationRefused(
                f"{some(gone)} of {self.resource} was gone while this request waited. Create the pod again."
            )

    def _see_that_we_serve(self, *, was_silent: bool = True) -> None:
        """Refuse where another plugin or agent has the name by now: its list may lack what we would give.

        Its kubelet would crash at our reply (kubelet contract: A7.1). An agent that takes back what it gave us does not tell one
        that stands still.

        Args:
            was_silent: whether the kubelet had another plugin's list when it asked: it has asked with that.
        """
        if self._is_silent and not was_silent and self.relay is None:
            raise AllocationRefused(
                f"another plugin has registered {self.resource} while this request waited. Create the pod again."
            )
        if self._lock is not None and self._lock.is_replaced:
            raise AllocationRefused(
                f"this process of Fairlead stood still, and another one serves {self.resource} by now. Create the pod again."
            )

    async def _prefer(self, stream: Stream[wire.Encoded, Any]) -> None:
        began = time.monotonic()
        containers, size = await self._receive(stream, lambda data: (wire.read_preferred(data), len(data)))
        preferred = [
            await (self._aside(size, plain, request) if self._prefer_ids is None else self._prefer_ids(request))
            for request in containers
        ]
        await stream.send_message(await self._aside(size, wire.encode_preferred, preferred))
        self._counts.preferring.observe(time.monotonic() - began)

    async def _pre_start(self, stream: Stream[wire.Encoded, wire.Encoded]) -> None:
        ids = await self._receive(stream, wire.read_ids)
        if self._check_start is not None:
            try:
                await self._let_start(self._check_start, ids)
            except AllocationRefused as refused:
                raise refusal(Status.FAILED_PRECONDITION, refused.sentence) from None
        await stream.send_message(wire.Encoded())  # PreStartContainerResponse has no fields

    async def _receive(self, stream: Stream[wire.Encoded, Any], parse: Callable[[wire.Encoded], T]) -> T:
        """What a call says; malformed bytes end this call alone."""
        try:
            if (data := await stream.recv_message()) is None:
                raise GRPCError(Status.INVALID_ARGUMENT, "the request has no message")
            return await self._aside(len(data), parse, data)
        except wire.SENSELESS as error:
            raise GRPCError(Status.INVALID_ARGUMENT, f"malformed request: {error}") from None

    async def _aside(self, size: int, call: Callable[[Any], T], argument: Any) -> T:
        """Do work on a message of so many bytes: in a thread where that is long, one message after the other."""
        if size > _LONG:
            return await to_thread.run_sync(call, argument, limiter=self._reading)
        return call(argument)

    async def _let_start(self, check: PreStart, ids: Sequence[str]) -> None:
        if self.relay is not None:
            with suppress(StandbyLostError):
                await self.relay.pre_start(self.resource, ids)
                return
        self._see_that_we_serve()
        await check(self.resource, ids)


def _healthy(slots: Mapping[str, Slot]) -> frozenset[str]:
    return frozenset(device_id for device_id, slot in slots.items() if slot.health.offered)


# --- the encoded list: only what changed since the last message is encoded again, when it is to be sent ---


class _Part:
    """Some of the list's items, and these joined, unless one has changed since."""

    __slots__ = ("items", "joined")

    def __init__(self) -> None:
        self.items: dict[str, bytes] = {}
        self.joined: bytes | None = None


class EncodedList:
    """The list as bytes.

    It is in parts, of which only those with a change are joined again: the items of 10,000 devices lie apart in memory, and to
    join all of them, which nothing has touched since the last list, takes 0.8 ms.
    """

    def __init__(self) -> None:
        self._heads: dict[str, bytes] = {}
        self._parts: defaultdict[int, _Part] = defaultdict(_Part)
        self.unhealthy: set[str] = set()
        """The IDs that it has as Unhealthy, as far as it was encoded."""
        self._slots: Mapping[str, Slot] = {}
        self._generation = 0
        self._changed: set[str] = set()  # since they were encoded
        self._gone: set[str] = set()
        self._message: wire.Encoded | None = None

    def apply(self, snapshot: Snapshot) -> None:
        """Note which IDs this snapshot has changed."""
        self._message = None
        slots = snapshot.slots
        changed: Set[str] | None = snapshot.changed
        if changed is None or snapshot.generation != self._generation + 1:
            changed = self._heads.keys() | self._changed | slots.keys()
        self._generation, self._slots = snapshot.generation, slots
        self._gone |= {device_id for device_id in changed if device_id not in slots and device_id in self._heads}
        self._changed |= changed

    def encode(self, most: int | None = None) -> bool:
        """Encode `most` of the IDs that changed, or all of them; True if none is left."""
        if most is None or len(self._changed) <= most:
            changed, self._changed = self._changed, set()
        else:
            changed = set(islice(self._changed, most))
            self._changed -= changed
        slots, heads, unhealthy = self._slots, self._heads, self.unhealthy
        device, health, tail = None, None, b""
        for device_id in changed:
            slot = slots.get(device_id)
            head = heads.get(device_id)
            if head is None:
                if slot is None:
                    continue
                head = heads[device_id] = wire.device_head(device_id)
            part = self._parts[crc32(head) % _PARTS]
            part.joined = None
            if slot is None:
                del heads[device_id], part.items[device_id]
                unhealthy.discard(device_id)
                continue
            if slot.health is not health or slot.device is not device:  # 1,000 tokens of one device share them
                device, health = slot.device, slot.health
                tail = wire.device_tail(health.offered, device.numa_node if device else None)
            part.items[device_id] = wire.list_item(head, tail)
            if health.offered:
                unhealthy.discard(device_id)
            else:
                unhealthy.add(device_id)
        return not self._changed

    def take_left(self) -> Set[str]:
        """The IDs that were taken off since the last call; they may be back by now."""
        left, self._gone = self._gone, set()
        return left

    def message(self) -> wire.Encoded:
        """The whole list."""
        if self._message is None:
            self.encode()
            for part in self._parts.values():
                if part.joined is None:
                    part.joined = wire.join_list(part.items.values())
            self._message = wire.join_list(part.joined for part in self._parts.values() if part.joined)
        return self._message
