"""What test_uevents runs in an isolated child process; each function returns JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.discovery.sources import Emitted, Resync
from agent.discovery.uevents import BUFFER_BYTES, Mode, UeventSource
from backends.base import ANY_SUBSYSTEM, Host, Record, Uevent
from tests.e2e.hermetic import NETLINK_KOBJECT_UEVENT, Injector, private_tmpfs, udev_message
from tests.nodes import make_node
from tests.wait import limit, until

_LAST = "last"  # the subsystem of the event that ends a case


class Case:
    """A running source, and what it emitted until the last event."""

    def __init__(self, mode: Mode = "kernel", buffer_bytes: int = BUFFER_BYTES) -> None:
        self.inject = Injector()
        self.emitted: list[list[Any]] = []
        self.records: list[Record] = []
        self.ended = asyncio.Event()
        self.source = UeventSource(self._take, Host(), mode, buffer_bytes, clock=lambda: 4711.5)

    def _take(self, hint: Emitted) -> None:
        if isinstance(hint, Resync):
            self.emitted.append(["resync"])
            return
        if isinstance(hint, Record):
            self.records.append(hint)
            self.emitted.append(["record", hint.sequence, hint.text])
            return
        assert isinstance(hint, Uevent)
        if hint.subsystem == _LAST:
            self.ended.set()
            return
        self.emitted.append([hint.action, hint.subsystem, hint.devpath, hint.node and hint.node.text])

    def watch(self, *subsystems: str) -> None:
        self.source.watch(frozenset({*subsystems, _LAST}))

    async def end(self) -> None:
        """Wait until everything injected so far has been read."""
        self.ended.clear()
        self.inject.kernel("change", "/devices/last", _LAST)
        async with limit("the last event is told", lambda: self.emitted[-3:]):
            await self.ended.wait()


def _run(body: Callable[[Case], Awaitable[None]], mode: Mode = "kernel", buffer_bytes: int = BUFFER_BYTES) -> Case:
    async def run() -> Case:
        case = Case(mode, buffer_bytes)
        async with anyio.create_task_group() as tasks:
            await tasks.start(case.source.run)
            await body(case)
            tasks.cancel_scope.cancel()
        return case

    return anyio.run(run)


def hints() -> Any:
    async def body(case: Case) -> None:
        case.watch("block", "usb", "pci")
        case.inject.kernel("add", "/devices/virtual/block/loop9", "block", DEVNAME="loop9", MAJOR="7", MINOR="9")
        case.inject.kernel("add", "/devices/pci0/usb1/1-2", "usb", DEVNAME="bus/usb/001/002")
        case.inject.kernel("change", "/devices/pci0", "pci", DEVNAME="/dev/odd")
        case.inject.kernel("remove", "/devices/pci0", "pci")
        case.inject.kernel("add", "/devices/virtual/net/x", "net")
        await case.end()

    case = _run(body)
    received = {f"{subsystem} {action}": n for (subsystem, action), n in case.source.counts.uevents.items()}
    return {"emitted": case.emitted, "received": received}


def facts() -> Any:
    async def body(case: Case) -> None:
        case.source.watch(frozenset({"pci", _LAST}), frozenset({"ERROR_EVENT", "WEDGED"}))
        case.inject.kernel("change", "/devices/pci0", "pci", ERROR_EVENT="BEGIN_RECOVERY", SEQNUM="1")
        case.inject.kernel("change", "/devices/pci0", "pci", ERROR="none of it")
        case.inject.kernel("change", "/devices/card0", "drm", WEDGED="rebind")
        await case.end()
        case.source.watch(frozenset({"pci", _LAST}))
        case.inject.kernel("change", "/devices/pci1", "pci", ERROR_EVENT="FAILED_RECOVERY")
        await case.end()

    case = _run(body)
    (record,) = case.records
    return {
        "emitted": [[what, *rest] for what, *rest in case.emitted],
        "source": record.source,
        "boot": record.boot,
        "time": record.time,
        "numbered": record.sequence == int(record.properties["SEQNUM"]) > 0,
        "event": record.properties["ERROR_EVENT"],
    }


def filter_changes() -> Any:
    async def body(case: Case) -> None:
        for number, wanted in enumerate((["pci"], ["pci", "usb"], [ANY_SUBSYSTEM], ["usb"], [])):
            case.watch(*wanted)
            for subsystem in ("pci", "usb", "net"):
                case.inject.kernel("add", f"/devices/{number}", subsystem)
            await case.end()

    return [[devpath, subsystem] for _, subsystem, devpath, _ in _run(body).emitted]


def wanted_is_never_lost_while_the_filter_changes(rounds: int) -> Any:
    async def body(case: Case) -> None:
        for number in range(rounds):
            case.inject.kernel("add", f"/devices/{number}", "pci")
            case.watch(*(["pci"], ["pci", "usb"], [ANY_SUBSYSTEM])[number % 3])
            if number % 7 == 0:
                await asyncio.sleep(0)
        await case.end()

    return [devpath for _, _, devpath, _ in _run(body).emitted]


def overflow(events: int, buffer_bytes: int) -> Any:
    async def body(case: Case) -> None:
        case.watch("block")
        for number in range(events):  # the loop does not run meanwhile: nothing is read
            case.inject.kernel("add", f"/devices/{number}", "block", SEQNUM=str(number + 1))
        # until then there may be no room for what follows
        await until(lambda: case.emitted[-1:] == [["resync"]], "the overflow is told", lambda: case.emitted[-3:])
        overflown = len(case.emitted)
        case.inject.kernel("add", "/devices/after", "block")
        await case.end()
        case.emitted.append(["overflown at", overflown])

    case = _run(body, buffer_bytes=buffer_bytes)
    return {"emitted": case.emitted, "overflows": case.source.counts.overflows}


def burst(events: int) -> Any:
    turns = 0

    async def body(case: Case) -> None:
        nonlocal turns
        case.watch("block")
        for number in range(events):
            case.inject.kernel("add", f"/devices/virtual/block/loop{number}", "block", DEVNAME=f"loop{number}")
        end = asyncio.ensure_future(case.end())
        while not end.done():
            await asyncio.sleep(0)
            turns += 1
        await end

    case = _run(body)
    return {"emitted": len(case.emitted), "overflows": case.source.counts.overflows, "turns": turns}


def impostors() -> Any:
    async def body(case: Case) -> None:
        case.watch(ANY_SUBSYSTEM)
        message = b"add@/devices/evil\0ACTION=add\0DEVPATH=/devices/evil\0SUBSYSTEM=block\0"
        case.inject.multicast(1, message)  # to the kernel's group, but from a port
        for port in _ports():
            case.inject.unicast(port, message)
        case.inject.multicast(2, udev_message("add", "/devices/evil", "block"))
        await case.end()

    return _run(body).emitted


def _ports() -> list[int]:
    """The ports of this namespace's uevent sockets that listen to the kernel."""
    lines = Path("/proc/self/net/netlink").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return [int(row[2]) for row in rows if int(row[1]) == NETLINK_KOBJECT_UEVENT and int(row[3], 16) == 1]


def _without_udevd() -> None:
    """libudev listens to udevd only where it runs, or /dev is a devtmpfs."""
    for path in ("/dev", "/run"):
        private_tmpfs(path)
    make_node(Path("/dev/null"), "c", 1, 3, 0o666)  # ldconfig, which finds libudev, is run with it


def udev_without_udevd() -> Any:
    async def body(case: Case) -> None:
        raise AssertionError("it was started")

    _without_udevd()
    with pytest.raises(BaseExceptionGroup) as raised:
        _run(body, mode="udev")
    return [str(error) for error in raised.value.exceptions]


def udev() -> Any:
    _without_udevd()
    Path("/run/udev").mkdir()
    Path("/run/udev/control").touch()

    async def body(case: Case) -> None:
        case.source.watch(frozenset({"block", "last"}))
        case.inject.kernel("add", "/devices/of-the-kernel", "block")
        case.inject.multicast(2, b"libudev\0garbage")
        case.inject.udev("add", "/devices/virtual/block/loop9", "block", DEVNAME="/dev/loop9")
        case.inject.udev("change", "/devices/last", "last")
        async with limit("the last event is told", lambda: case.emitted):
            await case.ended.wait()

    return _run(body, mode="udev").emitted


def early() -> Any:
    async def run() -> Case:
        case = Case()
        case.watch("block")
        assert case.source.listen()
        case.inject.kernel("add", "/devices/virtual/block/loop9", "block", DEVNAME="loop9")
        async with anyio.create_task_group() as tasks:
            await tasks.start(case.source.run)
            case.inject.kernel("remove", "/devices/virtual/block/loop9", "block", DEVNAME="loop9")
            await case.end()
            tasks.cancel_scope.cancel()
        return case

    case = anyio.run(run)
    return {"emitted": [action for action, *_ in case.emitted], "open sockets": len(_ports())}


def run_again() -> Any:
    async def run() -> Case:
        case = Case()
        case.watch("block")
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                await tasks.start(case.source.run)
                await case.end()
                tasks.cancel_scope.cancel()
        return case

    case = anyio.run(run)
    return {"emitted": case.emitted, "open sockets": len(_ports())}
