"""Receives changes of network interfaces from rtnetlink, as hints where to look: they come, go, go up or down.

The kernel tells of those of this process's network namespace alone: in a container it must be the host's.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Iterator
from functools import partial
from typing import Final

from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from agent.discovery.sources.base import Beat, Emit, Resync, read_in_turns, unwatched
from agent.runtime.watchdog import beating
from backends.base import LinkChange

BUFFER_BYTES: Final = 1 << 20
"""Of the socket, doubled by the kernel: some 800 messages (2.5 kB each). It takes memory only while they wait."""

_GROUP: Final = 1  # RTMGRP_LINK (linux/rtnetlink.h)
_NEW, _GONE = 16, 17  # RTM_NEWLINK, RTM_DELLINK
_NAME: Final = 3  # IFLA_IFNAME (linux/if_link.h)
_HEADER: Final = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_INTERFACE: Final = struct.Struct("=BxHiII")  # struct ifinfomsg: family, type, index, flags, change
_ATTRIBUTE: Final = struct.Struct("=HH")  # struct rtattr: length, type
_MESSAGE_BYTES: Final = 32 << 10  # as iproute2 reads them; of a longer one the name, which comes first, is enough
_BATCH: Final = 64  # messages between two turns of the event loop: 1 ms


class LinkSource:
    """Hands on every change of a network interface; after an overflow or a restart, a `Resync`."""

    def __init__(self, emit: Emit, buffer_bytes: int = BUFFER_BYTES, beat: Beat = unwatched) -> None:
        self._emit = emit
        self._beat = beat
        self._buffer_bytes = buffer_bytes
        self._wanted = asyncio.Event()
        self._dropped = False
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
            await read_in_turns(sock.fileno(), partial(self._receive, sock), self._beat)

    def _receive(self, sock: socket.socket) -> bool:
        """Read one batch; True if more may be waiting."""
        for _ in range(_BATCH):
            try:
                data, (port, _groups) = sock.recvfrom(_MESSAGE_BYTES)
            except BlockingIOError:
                self._resync_if_dropped()
                return False
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self._dropped = True
                continue
            if port == 0 and self._wanted.is_set():  # the kernel's; any process may send us a message of its own
                for change in parse(data):
                    self._emit(change)
        return True

    def _resync_if_dropped(self) -> None:
        # only now: the kernel goes on dropping, without a word, until the socket has been drained
        if self._dropped:
            self._dropped = False
            self._emit(Resync("the kernel dropped changes of network interfaces because too many were waiting"))


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
