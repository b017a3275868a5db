"""What test_links runs in an isolated child process; each function returns JSON."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import anyio

from agent.discovery import uevents
from agent.discovery.sources import Emitted, Resync
from agent.discovery.uevents import LINK_BUFFER_BYTES, LinkSource
from backends.base import LinkChange
from tests.wait import limit, settled, until

SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFNAME = 0x8913, 0x8914, 0x8923  # linux/sockios.h
IFF_UP = 1
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h
NETLINK_ROUTE = 0


class Interface:
    """A TAP interface of this network namespace; closing its file removes it."""

    def __init__(self, name: str) -> None:
        self._tun = Path("/dev/net/tun").open("r+b", buffering=0)  # noqa: SIM115
        self.name = name
        fcntl.ioctl(self._tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        self.index = socket.if_nametoindex(name)

    def up(self, *, up: bool) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH22x", self.name.encode(), 0)
            flags = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)[0]
            flags = flags | IFF_UP if up else flags & ~IFF_UP
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", self.name.encode(), flags))

    def rename(self, name: str) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFNAME, struct.pack("16s16s8x", self.name.encode(), name.encode()))
        self.name = name

    def remove(self) -> None:
        self._tun.close()


class Case:
    """A running source, and what it emitted until the last change."""

    def __init__(self, buffer_bytes: int = LINK_BUFFER_BYTES) -> None:
        self.emitted: list[str] = []
        self.indexes: dict[str, int] = {}
        self._ends = 0
        self._ended = asyncio.Event()
        self.source = LinkSource(self._take, buffer_bytes)
        self.source.watch(wanted=True)

    def _take(self, said: Emitted) -> None:
        if isinstance(said, Resync):
            self.emitted.append("resync")
            return
        assert isinstance(said, LinkChange)
        if said.name.startswith("last"):
            if said.name == f"last{self._ends}":
                self._ended.set()
        elif not self.emitted or self.emitted[-1] != said.name:  # a change may be told in several messages
            self.emitted.append(said.name)
            self.indexes[said.name] = said.index

    async def end(self) -> None:
        """Wait until everything so far has been read."""
        self._ended.clear()
        self._ends += 1  # a name of its own: what is told of the one before may come late
        last = Interface(f"last{self._ends}")
        async with limit("the last change is told", lambda: self.emitted):
            await self._ended.wait()
        last.remove()


def _run(body: Callable[[Case], Awaitable[None]], buffer_bytes: int = LINK_BUFFER_BYTES) -> Case:
    async def run() -> Case:
        case = Case(buffer_bytes)
        async with anyio.create_task_group() as tasks:
            await tasks.start(case.source.run)
            await body(case)
            tasks.cancel_scope.cancel()
        return case

    return anyio.run(run)


def changes() -> Any:
    made: list[int] = []

    async def body(case: Case) -> None:
        interface = Interface("ib0")
        made.append(interface.index)
        await case.end()
        todo: list[Callable[[], None]] = [
            lambda: interface.up(up=True),
            lambda: interface.up(up=False),
            lambda: interface.rename("ib7"),
            interface.remove,
        ]
        for change in todo:
            case.emitted.append("then")
            change()
            await case.end()

    case = _run(body)
    return {"emitted": case.emitted, "right index": [case.indexes[name] for name in ("ib0", "ib7")] == made * 2}


def unwanted() -> Any:
    async def body(case: Case) -> None:
        case.source.watch(wanted=False)
        Interface("ib0").remove()
        await until(lambda: not any(_waiting()), "all is read", _waiting)
        case.source.watch(wanted=True)
        await case.end()

    return _run(body).emitted


def wanted_late() -> Any:
    async def run() -> Case:
        case = Case()
        case.source.watch(wanted=False)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(case.source.run)
            await settled()
            before = _sockets()
            case.source.watch(wanted=True)
            await until(lambda: case.emitted, "it is told")
            case.emitted.append(f"{before} and then {_sockets()} sockets")
            await case.end()
            tasks.cancel_scope.cancel()
        return case

    return anyio.run(run).emitted


def overflow(changes: int, buffer_bytes: int) -> Any:
    async def body(case: Case) -> None:
        interface = Interface("ib0")
        for number in range(changes):  # the loop does not run meanwhile: nothing is read
            interface.up(up=number % 2 == 0)
        # until then there may be no room for what follows
        await until(lambda: case.emitted[-1:] == ["resync"], "the overflow is told", lambda: case.emitted)
        interface.rename("ib7")
        await case.end()
        interface.remove()

    return _run(body, buffer_bytes).emitted


def burst(changes: int, batch: int) -> Any:
    turn, taken_in = 0, list[int]()

    async def body(case: Case) -> None:
        def next_turn() -> None:
            nonlocal turn
            turn += 1
            asyncio.get_running_loop().call_soon(next_turn)

        def take(said: Emitted) -> None:
            taken_in.append(turn)
            case._take(said)

        case.source._emit = take
        interface = Interface("ib0")
        for number in range(changes):
            interface.up(up=number % 2 == 0)
        next_turn()
        await case.end()
        interface.remove()

    with mock.patch.object(uevents, "_LINKS_AT_ONCE", batch):
        case = _run(body)
    return {"emitted": case.emitted, "taken": len(taken_in), "most in one turn": max(map(taken_in.count, taken_in))}


def impostors() -> Any:
    async def body(case: Case) -> None:
        message = link_message(16, "evil", 7)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as sender:
            for port in _ports():
                sender.sendto(message, (port, 0))
        await case.end()

    return _run(body).emitted


def run_again() -> Any:
    async def run() -> Case:
        case = Case()
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                await tasks.start(case.source.run)
                await case.end()
                tasks.cancel_scope.cancel()
        return case

    case = anyio.run(run)
    return {"emitted": case.emitted, "open sockets": _sockets()}


def link_message(kind: int, name: str, index: int) -> bytes:
    """struct nlmsghdr, struct ifinfomsg, and an address before the name."""
    attributes = b""
    for number, value in ((1, b"\x00" * 6), (3, os.fsencode(name) + b"\0")):
        attributes += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    body = struct.pack("=BxHiII", 0, 32, index, 1, 0xFFFFFFFF) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


def _listening() -> list[list[str]]:
    """What the kernel says of this namespace's rtnetlink sockets that listen to link changes."""
    rows = [line.split() for line in Path("/proc/self/net/netlink").read_text().splitlines()[1:]]
    return [row for row in rows if int(row[1]) == NETLINK_ROUTE and int(row[3], 16) == 1]


def _ports() -> list[int]:
    return [int(row[2]) for row in _listening()]


def _waiting() -> list[int]:
    """How many bytes each has not read yet."""
    return [int(row[4]) for row in _listening()]


def _sockets() -> int:
    return len(_ports())
