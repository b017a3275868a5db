"""One stage for each source: it makes changes of which the source must tell, and notes what it told."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import anyio

from agent.discovery.kmsg import KmsgSource
from agent.discovery.paths import PathSource
from agent.discovery.sources import Emitted, Resync
from agent.discovery.uevents import BUFFER_BYTES, LINK_BUFFER_BYTES, LinkSource, Mode, UeventSource
from agent.runtime.problems import Problems
from backends.base import ANY_SUBSYSTEM, Host, HostPath, LinkChange, PathChange, Record, Uevent
from tests.e2e.hermetic import NETLINK_KOBJECT_UEVENT, Injector, private_tmpfs, udev_message
from tests.e2e.kmsg import USER, KernelLog
from tests.nodes import make_node
from tests.wait import limit, settled, until

RESYNC = "resync"
NETLINK_ROUTE = 0
SIOCGIFFLAGS, SIOCSIFFLAGS, SIOCSIFNAME = 0x8913, 0x8914, 0x8923  # linux/sockios.h
IFF_UP = 1
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x2, 0x1000  # linux/if_tun.h


class Stage:
    """A source, and the names of what it told of; `RESYNC` where it asked for a look at everything."""

    isolated: ClassVar = True
    """Whether it needs a network of its own."""
    needs: ClassVar[tuple[str, ...]] = ()
    many: ClassVar = 0
    """Changes that come at once and are all kept."""
    too_many: ClassVar = 0
    """Changes at once of which the kernel drops some, where its buffer is small."""
    remembers: ClassVar = False
    """Whether it tells what came before that was wanted."""
    forges: ClassVar = True
    """Whether others than the kernel can send what it reads."""

    def __init__(self, directory: Path, *, small: bool = False) -> None:
        self.directory, self.small = directory, small
        self.told: list[str] = []
        self.takes: list[int] = []
        """In which turn of the event loop each was told."""
        self.beats = self.turn = 0
        self._ends, self._ended = 0, asyncio.Event()
        self.source = self.make()
        self.want(wanted=True)

    def make(self) -> Any:
        """The source."""
        raise NotImplementedError

    def want(self, *, wanted: bool) -> None:
        """Want what happens here, or not."""
        raise NotImplementedError

    def happen(self, name: str) -> None:
        """A change of this name, which the kernel tells of."""
        raise NotImplementedError

    def forge(self) -> None:
        """Send what looks like a change named `evil`, as another process can."""

    def crowd(self, changes: int) -> None:
        """So many changes at once, while the loop reads nothing."""
        for number in range(changes):
            self.happen(f"n{number}")

    def files(self) -> int:
        """How many files the source has open."""
        raise NotImplementedError

    def name(self, found: Emitted) -> str:
        """The name of the change that is told."""
        raise NotImplementedError

    @property
    def losses(self) -> int:
        """How often it was told that something was lost."""
        return self.told.count(RESYNC)

    def take(self, found: Emitted) -> None:
        """What the source hands on."""
        name = RESYNC if isinstance(found, Resync) else self.name(found)
        self.takes.append(self.turn)
        if name.startswith("end"):
            if name == f"end{self._ends}":  # what is told of the one before may come late
                self._ended.set()
        else:
            self.told.append(name)

    def beat(self) -> None:
        """A sign of life."""
        self.beats += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """The source runs inside."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self.source.run)
            yield
            tasks.cancel_scope.cancel()

    async def end(self) -> None:
        """Wait until all that happened so far has been read."""
        self._ended.clear()
        self._ends += 1
        self.happen(f"end{self._ends}")
        async with limit("the last change is told", lambda: self.told[-5:]):
            await self._ended.wait()

    def close(self) -> None:
        """Undo what it made outside of its directory."""

    def count_turns(self) -> None:
        """Count the turns of the event loop from now on."""
        self.turn += 1
        asyncio.get_running_loop().call_soon(self.count_turns)


class Uevents(Stage):
    """The kernel's own events."""

    many, too_many = 10_000, 5000
    mode: Mode = "kernel"
    wanted = "block"

    def make(self) -> Any:
        self.inject = Injector()
        self.records: list[Record] = []
        size = 4096 if self.small else BUFFER_BYTES
        return UeventSource(self.take, Host(), self.mode, size, self.beat, clock=lambda: 4711.5)

    def want(self, *, wanted: bool) -> None:
        self.source.watch(frozenset({self.wanted, "end"} if wanted else {"end"}))

    def happen(self, name: str) -> None:
        self.send("add", f"/devices/{name}", "end" if name.startswith("end") else self.wanted)

    def send(self, action: str, devpath: str, subsystem: str, /, **properties: str) -> None:
        """One event."""
        self.inject.kernel(action, devpath, subsystem, **properties)

    def forge(self) -> None:
        self.source.watch(frozenset({ANY_SUBSYSTEM}))
        message = b"add@/devices/evil\0ACTION=add\0DEVPATH=/devices/evil\0SUBSYSTEM=block\0"
        self.inject.multicast(1, message)  # to the kernel's group, but from a port
        for row in _netlink(NETLINK_KOBJECT_UEVENT, 1):
            self.inject.unicast(int(row[2]), message)
        self.inject.multicast(2, udev_message("add", "/devices/evil", "block"))

    def files(self) -> int:
        return len(_netlink(NETLINK_KOBJECT_UEVENT, 1))

    def name(self, found: Emitted) -> str:
        if isinstance(found, Record):
            self.records.append(found)
            return f"record of {found.text}"
        assert isinstance(found, Uevent)
        return found.devpath.rpartition("/")[2]


class UdevsEvents(Uevents):
    """The events of udevd, which libudev reads where it runs."""

    mode: Mode = "udev"
    many = 5000

    def make(self) -> Any:
        without_udevd()
        Path("/run/udev").mkdir()
        Path("/run/udev/control").touch()
        return super().make()

    def send(self, action: str, devpath: str, subsystem: str, /, **properties: str) -> None:
        self.inject.udev(action, devpath, subsystem, **properties)

    def forge(self) -> None:
        self.source.watch(frozenset({ANY_SUBSYSTEM}))
        self.inject.kernel("add", "/devices/evil", "block")
        self.inject.multicast(2, b"libudev\0garbage")

    def files(self) -> int:
        return len(_netlink(NETLINK_KOBJECT_UEVENT, 2))


def without_udevd() -> None:
    """libudev listens to udevd only where it runs, or /dev is a devtmpfs."""
    for path in ("/dev", "/run"):
        private_tmpfs(path)
    make_node(Path("/dev/null"), "c", 1, 3, 0o666)  # ldconfig, which finds libudev, is run with it


class Interface:
    """A TAP interface of this network namespace; closing its file removes it."""

    def __init__(self, name: str) -> None:
        self._tun = Path("/dev/net/tun").open("r+b", buffering=0)  # noqa: SIM115
        self.name = name
        fcntl.ioctl(self._tun, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
        self.index = socket.if_nametoindex(name)

    def up(self, *, up: bool) -> None:
        """Set it up, or down."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = struct.pack("16sH22x", self.name.encode(), 0)
            flags = struct.unpack_from("H", fcntl.ioctl(any_socket, SIOCGIFFLAGS, request), 16)[0]
            flags = flags | IFF_UP if up else flags & ~IFF_UP
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", self.name.encode(), flags))

    def rename(self, name: str) -> None:
        """Give it another name."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFNAME, struct.pack("16s16s8x", self.name.encode(), name.encode()))
        self.name = name

    def remove(self) -> None:
        """Have it gone."""
        self._tun.close()


class Links(Stage):
    """Changes of network interfaces."""

    needs = ("/dev/net/tun",)
    many, too_many = 600, 1000

    def make(self) -> Any:
        self.made: dict[str, Interface] = {}
        self.indexes: dict[str, int] = {}
        return LinkSource(self.take, 4096 if self.small else LINK_BUFFER_BYTES, self.beat)

    def want(self, *, wanted: bool) -> None:
        self.source.watch(wanted=wanted)

    def happen(self, name: str) -> None:
        self.made[name] = Interface(name)
        if name.startswith("end"):
            self.made.pop(name).remove()

    def crowd(self, changes: int) -> None:
        interface = self.made["crowd"] = Interface("crowd")
        for number in range(changes):
            interface.up(up=number % 2 == 0)

    def forge(self) -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_ROUTE) as sender:
            for row in _netlink(NETLINK_ROUTE, 1):
                sender.sendto(link_message(16, "evil", 7), (int(row[2]), 0))

    def files(self) -> int:
        return len(_netlink(NETLINK_ROUTE, 1))

    def close(self) -> None:
        for interface in self.made.values():
            interface.remove()

    async def all_read(self) -> None:
        """Wait until the kernel keeps no message for the source any more."""
        await until(lambda: not any(int(row[4]) for row in _netlink(NETLINK_ROUTE, 1)), "all is read")

    def name(self, found: Emitted) -> str:
        assert isinstance(found, LinkChange)
        self.indexes[found.name] = found.index
        return found.name


def link_message(kind: int, name: str, index: int) -> bytes:
    """struct nlmsghdr, struct ifinfomsg, and an address before the name."""
    attributes = b""
    for number, value in ((1, b"\x00" * 6), (3, os.fsencode(name) + b"\0")):
        attributes += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    body = struct.pack("=BxHiII", 0, 32, index, 1, 0xFFFFFFFF) + attributes
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 0, 0) + body


class Paths(Stage):
    """Entries of a directory below /dev, which come."""

    isolated, forges = False, False
    many = 3000

    @property
    def too_many(self) -> int:  # type: ignore[override]  # as this kernel is set
        return int(Path("/proc/sys/fs/inotify/max_queued_events").read_text()) + 1

    def make(self) -> Any:
        for name in ("dir", "ends"):
            (self.directory / name).mkdir()
        return PathSource(self.take, Host(root=self.directory / "root", dev=self.directory), self.beat)

    def want(self, *, wanted: bool) -> None:
        names = ("dir", "ends") if wanted else ("ends",)
        self.source.watch(frozenset(HostPath(f"/dev/{name}") for name in names))

    def happen(self, name: str) -> None:
        (self.directory / ("ends" if name.startswith("end") else "dir") / name).mkdir()

    def crowd(self, changes: int) -> None:
        for name in ("one", "other"):
            self.happen(name)
        for number in range(changes):  # in turns: the kernel joins equal events
            (self.directory / "dir" / ("one", "other")[number % 2]).chmod(0o700)

    def files(self) -> int:
        return _descriptors(lambda target: target == "anon_inode:inotify")

    def name(self, found: Emitted) -> str:
        assert isinstance(found, PathChange)
        name = found.path.text.removeprefix("/dev/")
        return "" if name == "ends" else RESYNC if name == "dir" else name.rpartition("/")[2]

    def take(self, found: Emitted) -> None:
        if isinstance(found, Resync) or self.name(found):
            super().take(found)


class Log(Stage):
    """Lines of the kernel's log."""

    isolated, remembers = False, True
    many, too_many = 900, 1  # a FIFO holds no more

    def make(self) -> Any:
        self.problems = Problems()
        plant = self.directory / "proc/sys/kernel/random"
        plant.mkdir(parents=True)
        (plant / "boot_id").write_text("one boot\n")
        (self.directory / "dev").mkdir()
        self.log = KernelLog(self.directory / "dev/kmsg")
        return KmsgSource(self.take, Host.below(self.directory), self.beat, problems=self.problems)

    def want(self, *, wanted: bool) -> None:
        self.source.watch(frozenset({"want: ", "end"} if wanted else {"end"}))
        self.log.repeat()  # a FIFO forgets what was read

    def happen(self, name: str) -> None:
        self.log.say(name if name.startswith("end") else f"want: {name}")

    def crowd(self, changes: int) -> None:
        if not self.small:
            super().crowd(changes)
            return
        real, answers = os.read, [errno.EPIPE] * 2

        def overwritten(file: int, size: int) -> bytes:
            if answers and os.readlink(f"/proc/self/fd/{file}") == str(self.log.path):  # noqa: PTH115
                raise OSError(answers.pop(), "overwritten")
            return real(file, size)

        mock.patch.object(os, "read", overwritten).start()
        super().crowd(changes)

    def forge(self) -> None:
        self.log.say("want: evil", facility=USER)

    def files(self) -> int:
        return _descriptors(lambda target: target == str(self.log.path)) - 1  # the writer's

    def close(self) -> None:
        self.log.__exit__()

    @property
    def losses(self) -> int:
        return len(self.problems.lasting())

    def name(self, found: Emitted) -> str:
        assert isinstance(found, Record)
        return found.text.removeprefix("want: ")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        if self._ends:
            self.log.repeat()
        task = asyncio.create_task(self.source.run())
        await settled()
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
            mock.patch.stopall()


STAGES: dict[str, type[Stage]] = {
    "uevents": Uevents,
    "udevd's events": UdevsEvents,
    "interfaces": Links,
    "directories": Paths,
    "kernel log": Log,
}


def _netlink(protocol: int, groups: int) -> list[list[str]]:
    """What the kernel says of this namespace's netlink sockets that listen to these groups."""
    rows = [line.split() for line in Path("/proc/self/net/netlink").read_text().splitlines()[1:]]
    return [row for row in rows if int(row[1]) == protocol and int(row[3], 16) == groups]


def _descriptors(counts: Callable[[str], bool]) -> int:
    found = 0
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            found += counts(os.readlink(f"/proc/self/fd/{number}"))  # noqa: PTH115
        except OSError:
            continue  # the directory's own is closed again
    return found
