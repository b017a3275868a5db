"""Receives what the kernel says by netlink as hints where to look: its objects' events, and changes of network interfaces.

Events become records, too, where they tell what sysfs does not keep. Of interfaces rtnetlink tells that they come, go, go up or
down, and only of those of this process's network namespace: in a container it must be the host's.

Events come from a plain socket; pyudev makes that for udevd's, and only there it is imported: with
libudev it takes 3 ms of a start, and 0.7 MB. Messages are read and parsed here. In a burst an event costs 8 us with all
its properties, and 4 us if no backend wants it; `Monitor.poll` alone takes 11 us, 37 us with the properties, repeats ENOBUFS
for ever after an overflow, and raises ValueError for a message it finds odd.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, Literal, TypeVar

from anyio import TASK_STATUS_IGNORED, to_thread
from anyio.abc import TaskStatus

from agent.discovery.sources import Beat, Emit, Resync, boot_id, read_in_turns, unwatched
from agent.runtime import process
from agent.runtime.counts import Counts
from agent.runtime.errors import words
from agent.runtime.watchdog import beating
from backends.base import ANY_SUBSYSTEM, Host, HostPath, LinkChange, Record, Uevent
from backends.errors import ShortageError

Mode = Literal["kernel", "udev"]

_Message = TypeVar("_Message")

BUFFER_BYTES: Final = 16 << 20
"""Of the socket, doubled by the kernel: some 35,000 events (0.9 kB each). It takes memory only while they wait."""

_UEVENTS, _FROM_KERNEL = 15, 1  # NETLINK_KOBJECT_UEVENT; the group to which the kernel sends (UDEV_MONITOR_KERNEL)
_SO_RCVBUFFORCE: Final = 33  # asm-generic/socket.h; Python has no name for it
_MESSAGE_BYTES: Final = 8192  # an event's environment is at most 2,048 bytes (UEVENT_BUFFER_SIZE in kobject.h)
_CREDENTIALS: Final = struct.Struct("=iII")  # struct ucred: pid, uid, gid
_UDEV_MAGIC: Final = b"libudev\0\xfe\xed\xca\xfe"  # udev_monitor_netlink_header, as systemd and eudev write it
_UDEV_EXTENT: Final = struct.Struct("=II")  # its properties_off and properties_len, at byte 16
_BATCH: Final = 128  # events between two turns of the event loop: 1 ms

LINK_BUFFER_BYTES: Final = 1 << 20
"""Of the socket, doubled by the kernel: some 800 messages (2.5 kB each). It takes memory only while they wait."""

_GROUP: Final = 1  # RTMGRP_LINK (linux/rtnetlink.h)
_NEW, _GONE = 16, 17  # RTM_NEWLINK, RTM_DELLINK
_NAME: Final = 3  # IFLA_IFNAME (linux/if_link.h)
_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_INTERFACE: Final = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
_ATTRIBUTE: Final = struct.Struct("=HH")  # struct rtattr: length, type
_LINK_BYTES: Final = 32 << 10  # as iproute2 reads them; of a longer one the name, which comes first, is enough
_LINKS_AT_ONCE: Final = 64  # messages between two turns of the event loop: 1 ms


# --- uevents ---


class _Queue:
    """The messages that wait in a netlink socket. Where it is full the kernel drops some, and then a resync is asked for."""

    def __init__(self, what: str, emit: Emit, overflowed: Callable[[], None] = lambda: None) -> None:
        self._what, self._emit, self._overflowed = what, emit, overflowed
        self._lacks_some = False

    def read(self, receive: Callable[[], _Message], take: Callable[[_Message], None], most: int) -> bool:
        """Take one batch, so many messages at most; True if more may be waiting."""
        for _ in range(most):
            try:
                message = receive()
            except BlockingIOError:
                # only now: the kernel goes on dropping without an error until the socket has been drained
                if self._lacks_some:
                    self._lacks_some = False
                    self._emit(Resync(f"the kernel dropped {self._what} because too many were waiting"))
                return False
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._lacks_some = True  # that it was told of has cleared the error
                self._overflowed()
                continue
            take(message)
        return True


class UeventSource:
    """Hands on the events of the wanted subsystems; after an overflow or a restart, a `Resync`."""

    def __init__(
        self,
        emit: Emit,
        host: Host,
        mode: Mode = "kernel",
        buffer_bytes: int = BUFFER_BYTES,
        beat: Beat = unwatched,
        counts: Counts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = counts or Counts()
        """Has the wanted events, and how often the kernel said that it dropped some."""
        self._emit = emit
        self._beat = beat
        self._boot = boot_id(host)
        self._dev = host.host(host.dev)
        self._mode: Mode = mode
        self._buffer_bytes = buffer_bytes
        self._clock = clock
        self._wanted: frozenset[str] = frozenset()
        self._facts: frozenset[str] = frozenset()
        self._queue = _Queue("uevents", emit, self._overflowed)
        self._ran_before = False
        self._socket: socket.socket | None = None  # which is not read yet

    def watch(self, subsystems: frozenset[str], facts: frozenset[str] = frozenset()) -> None:
        """From now on hand on these subsystems' events; `ANY_SUBSYSTEM` among them stands for all.

        Those that have any of the properties in `facts` are handed on as a `Record` first.

        The socket receives every event whatever is wanted (the kernel could not filter its own anyway), so
        a change takes effect with the next message read and loses nothing.
        """
        self._wanted, self._facts = subsystems, facts

    def listen(self) -> bool:
        """Have the kernel keep events from now on until `run` reads them; false if it does not, as with udevd's."""
        if self._mode == "kernel":
            with suppress(OSError):  # `run` tries again, and tells
                self._socket = _open_kernel(self._buffer_bytes)
        return self._socket is not None

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Receive until cancelled; `started` once no later event can be missed.

        Raises:
            OSError: no such socket can be had here; the message says why and what to do.
        """
        with self._socket or await self._open() as sock:
            self._socket = None
            if self._ran_before:
                self._emit(Resync("uevents are received again after an interruption"))
            self._ran_before = True
            task_status.started()
            receive = partial(sock.recvmsg, _MESSAGE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            read = partial(self._queue.read, receive, self._hear, _BATCH)
            await read_in_turns(sock.fileno(), read, self._beat)

    async def _open(self) -> socket.socket:
        if self._mode == "kernel":
            return _open_kernel(self._buffer_bytes)
        return await to_thread.run_sync(_open_udev, self._buffer_bytes)

    def _overflowed(self) -> None:
        self.counts.overflows += 1

    def _hear(self, message: tuple[bytes, list[tuple[int, int, bytes]], int, tuple[int, int]]) -> None:
        data, ancillary, _, sender = message
        if _is_genuine(self._mode, sender, ancillary):
            self._take(data)

    def _take(self, data: bytes) -> None:
        properties = parse_kernel(data) if self._mode == "kernel" else parse_udev(data)
        subsystem = properties.get("SUBSYSTEM", "")
        if subsystem not in self._wanted and ANY_SUBSYSTEM not in self._wanted:
            return
        action, devpath = properties.get("ACTION"), properties.get("DEVPATH")
        if action is None or devpath is None:
            return  # no event; libudev passes over such messages too
        self.counts.uevents[subsystem, action] += 1
        hint = Uevent(action, subsystem, devpath, self._node(properties.get("DEVNAME")), properties)
        if self._facts.isdisjoint(properties):
            self._emit(hint)
            return
        sequence = int(number) if (number := properties.get("SEQNUM", "")).isdecimal() else 0
        self._emit(Record("uevent", self._boot, sequence, self._clock(), devpath, properties))
        # the health that follows from the record is sent first
        asyncio.get_running_loop().call_soon(self._emit, hint)

    def _node(self, name: str | None) -> HostPath | None:
        """The kernel names a node below /dev, udev by its whole path."""
        if not name:
            return None
        return HostPath(name) if name.startswith("/") else self._dev / name


def parse_kernel(data: bytes) -> dict[str, str]:
    """The properties of a message that the kernel sent: `action@devpath`, then `KEY=value`, zero-terminated."""
    return _properties(data.partition(b"\0")[2])


def parse_udev(data: bytes) -> dict[str, str]:
    """The properties of a message that udevd sent; none if it is not one."""
    if not data.startswith(_UDEV_MAGIC) or len(data) < 24:
        return {}
    offset, length = _UDEV_EXTENT.unpack_from(data, 16)
    return _properties(data[offset : offset + length])


def _properties(data: bytes) -> dict[str, str]:
    return dict([line.split("=", 1) for line in data.decode(errors="replace").split("\0") if "=" in line])


def _is_genuine(mode: Mode, sender: tuple[int, int], ancillary: list[tuple[int, int, bytes]]) -> bool:
    """Whether a message is from the kernel (port 0), or from root's udevd. Any process may send us one of its own."""
    if mode == "kernel":
        return sender[0] == 0
    return any(
        level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS and _CREDENTIALS.unpack_from(data)[1] == 0
        for level, kind, data in ancillary
    )


def _open_kernel(buffer_bytes: int) -> socket.socket:
    """A socket bound to the kernel's group, with a large buffer.

    Raises:
        OSError: it cannot be had; the reason is a sentence.
    """
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, _UEVENTS)
        _enlarge(sock, buffer_bytes)
        sock.bind((0, _FROM_KERNEL))
    except OSError as error:
        raise _refused(error.errno or errno.EPERM) from error
    return sock


def _open_udev(buffer_bytes: int) -> socket.socket:
    """The socket of libudev's monitor, bound to udevd's group, with a large buffer; blocks for some milliseconds.

    Raises:
        OSError: it cannot be had; the reason is a sentence.
    """
    import pyudev  # noqa: PLC0415  # see above

    try:
        context = pyudev.Context()  # looks for libudev with a process of its own (ldconfig)
    except (ImportError, OSError) as error:
        raise _unloadable(error) from error
    try:
        monitor = pyudev.Monitor.from_netlink(context)
        monitor.start()
        sock = socket.socket(fileno=os.dup(monitor.fileno()))  # outlives the monitor, which closes its own
    except (OSError, ValueError, MemoryError) as error:
        raise _refused(error.errno if isinstance(error, OSError) and error.errno else errno.EPERM) from error
    if sock.getsockname()[1] == 0:  # libudev's way to say that no udevd runs
        sock.close()
        raise OSError(
            errno.ENOENT,
            'agent.uevents is "udev", but no udevd runs here (/run/udev/control is missing); '
            'mount the host\'s /run/udev, or set agent.uevents = "kernel"',
        )
    _enlarge(sock, buffer_bytes)
    return sock


def _unloadable(error: ImportError | OSError) -> OSError:
    try:
        process.see_that_files_open()
    except ShortageError as short:
        return OSError(errno.EMFILE, f"hot-plug events cannot be received: {short}")
    if isinstance(error, ImportError):
        why = "libudev is missing; install libudev1 (or eudev)"
        return OSError(errno.ENOENT, f"hot-plug events cannot be received: {why}")
    why = f"libudev cannot be loaded: {words(error)}"
    return OSError(error.errno or errno.EIO, f"hot-plug events cannot be received: {why}")


def _refused(code: int) -> OSError:
    return OSError(
        code,
        "hot-plug events cannot be received: the kernel's event socket (NETLINK_KOBJECT_UEVENT) was refused "
        f'({os.strerror(code)}); allow AF_NETLINK in the unit or the container, or set agent.uevents = "off"',
    )


def _enlarge(sock: socket.socket, buffer_bytes: int) -> None:
    try:
        sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, buffer_bytes)
    except PermissionError:  # needs CAP_NET_ADMIN; without it net.core.rmem_max is the limit
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


# --- network interfaces ---


class LinkSource:
    """Hands on every change of a network interface; after an overflow or a restart, a `Resync`."""

    def __init__(self, emit: Emit, buffer_bytes: int = LINK_BUFFER_BYTES, beat: Beat = unwatched) -> None:
        self._emit = emit
        self._beat = beat
        self._buffer_bytes = buffer_bytes
        self._wanted = asyncio.Event()
        self._queue = _Queue("changes of network interfaces", emit)
        self._ran_before = False

    def watch(self, wanted: bool) -> None:  # as the other sources' `watch`
        """From now on hand changes on, or do not."""
        if wanted:
            self._wanted.set()
        else:
            self._wanted.clear()

    async def run(self, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        """Receive until cancelled, once that is wanted; `started` once no later change can be missed.

        Raises:
            OSError: no such socket can be had here; the message says why and what to do.
        """
        late = self._ran_before or not self._wanted.is_set()
        await beating(self._wanted.wait, self._beat)
        with _open(self._buffer_bytes) as sock:
            self._ran_before = True
            if late:
                self._emit(Resync("changes of network interfaces are received from now on"))
            task_status.started()
            read = partial(self._queue.read, partial(sock.recvfrom, _LINK_BYTES), self._hear, _LINKS_AT_ONCE)
            await read_in_turns(sock.fileno(), read, self._beat)

    def _hear(self, message: tuple[bytes, tuple[int, int]]) -> None:
        data, (port, _groups) = message
        if port == 0 and self._wanted.is_set():  # the kernel's; any process may send us a message of its own
            for change in parse(data):
                self._emit(change)


def parse(data: bytes) -> Iterator[LinkChange]:
    """The changes that a datagram tells of; whatever is cut off or of another kind is passed over."""
    start = 0
    while start + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, start)
        if length < _HEADER.size:
            return
        end = min(start + length, len(data))
        body = start + _HEADER.size
        if kind in (_NEW, _GONE) and body + _INTERFACE.size <= end:
            index = _INTERFACE.unpack_from(data, body)[2]
            if name := _attributes(data[body + _INTERFACE.size : end]).get(_NAME):
                yield LinkChange(os.fsdecode(name.rstrip(b"\0")), index)
        start += _aligned(length)


def _attributes(data: bytes) -> dict[int, bytes]:
    found, start = {}, 0
    while start + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, start)
        if length < _ATTRIBUTE.size:
            break
        found[kind] = data[start + _ATTRIBUTE.size : start + length]
        start += _aligned(length)
    return found


def _aligned(length: int) -> int:
    """NLMSG_ALIGN and RTA_ALIGN."""
    return (length + 3) & ~3


def _open(buffer_bytes: int) -> socket.socket:
    """The socket, bound to the group of link changes."""
    sock = None
    try:
        sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)  # at most net.core.rmem_max
        sock.bind((0, _GROUP))
    except OSError as error:
        if sock is not None:
            sock.close()
        raise OSError(
            error.errno,
            "changes of network interfaces cannot be received: the kernel's socket (NETLINK_ROUTE) was refused "
            f"({os.strerror(error.errno or 0)}); allow AF_NETLINK in the unit or the container; "
            "until then ports are only looked at from time to time",
        ) from error
    return sock
