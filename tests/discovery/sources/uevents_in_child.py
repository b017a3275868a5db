"""What test_uevents runs in an isolated child process; each function returns JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from agent.discovery.sources import Emitted
from agent.discovery.uevents import UeventSource
from backends.base import ANY_SUBSYSTEM, Host, Uevent
from tests.discovery.sources.stages import Uevents, without_udevd
from tests.wait import until


class Case(Uevents):
    """The kernel's events, with all that is told of each."""

    def watch(self, *subsystems: str) -> None:
        """Want these, and the last event."""
        self.source.watch(frozenset({*subsystems, "end"}))

    def name(self, found: Emitted) -> str:
        name = super().name(found)
        if name.startswith("end") or not isinstance(found, Uevent):
            return name
        return " ".join([found.action, found.subsystem, found.devpath, found.node.text if found.node else "-"])


def _run(body: Callable[[Case], Awaitable[None]]) -> Case:
    async def run() -> Case:
        case = Case(Path())
        async with case.running():
            await body(case)
        return case

    return anyio.run(run)


def hints() -> Any:
    async def body(case: Case) -> None:
        case.watch("block", "usb", "pci")
        case.send("add", "/devices/virtual/block/loop9", "block", DEVNAME="loop9", MAJOR="7", MINOR="9")
        case.send("add", "/devices/pci0/usb1/1-2", "usb", DEVNAME="bus/usb/001/002")
        case.send("change", "/devices/pci0", "pci", DEVNAME="/dev/odd")
        case.send("remove", "/devices/pci0", "pci")
        case.send("add", "/devices/virtual/net/x", "net")
        await case.end()

    case = _run(body)
    received = {f"{subsystem} {action}": n for (subsystem, action), n in case.source.counts.uevents.items()}
    return {"told": case.told, "received": received}


def facts() -> Any:
    async def body(case: Case) -> None:
        case.source.watch(frozenset({"pci", "end"}), frozenset({"ERROR_EVENT", "WEDGED"}))
        case.count_turns()
        case.send("change", "/devices/pci0", "pci", ERROR_EVENT="BEGIN_RECOVERY", SEQNUM="1")
        await until(lambda: len(case.takes) == 2)
        case.send("change", "/devices/pci0", "pci", ERROR="none of it")
        case.send("change", "/devices/card0", "drm", WEDGED="rebind")
        await case.end()
        case.watch("pci")
        case.send("change", "/devices/pci1", "pci", ERROR_EVENT="FAILED_RECOVERY")
        await case.end()

    case = _run(body)
    (record,) = case.records
    return {
        "told": case.told,
        "later": case.takes[0] < case.takes[1],
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
                case.send("add", f"/devices/{number}", subsystem)
            await case.end()

    return _run(body).told


def wanted_is_never_lost_while_the_filter_changes(rounds: int) -> Any:
    async def body(case: Case) -> None:
        for number in range(rounds):
            case.send("add", f"/devices/{number}", "pci")
            case.watch(*(["pci"], ["pci", "usb"], [ANY_SUBSYSTEM])[number % 3])
            if number % 7 == 0:
                await asyncio.sleep(0)
        await case.end()

    return _run(body).told


def overflow() -> Any:
    async def run() -> Case:
        case = Case(Path(), small=True)
        async with case.running():
            case.crowd(case.too_many)
            await until(lambda: case.losses)
        return case

    return anyio.run(run).source.counts.overflows


def early() -> Any:
    async def run() -> Case:
        case = Case(Path())
        assert case.source.listen()
        case.send("add", "/devices/loop9", "block")
        async with case.running():
            case.send("remove", "/devices/loop9", "block")
            await case.end()
        return case

    case = anyio.run(run)
    return {"told": [told.split()[0] for told in case.told], "open sockets": case.files()}


def udev_without_udevd() -> Any:
    without_udevd()
    with pytest.raises(OSError, match="udevd") as raised:
        anyio.run(UeventSource(print, Host(), "udev").run)
    return str(raised.value)
