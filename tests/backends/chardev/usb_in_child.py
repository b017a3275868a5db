"""What test_usb_events runs in an isolated child process: a stick that comes and goes, events and tree alike."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio

from agent.discovery.discoverer import Discoverer
from agent.discovery.reading import Changes
from agent.discovery.sources import Emitted, Resync
from agent.discovery.uevents import UeventSource
from backends.base import Device, Discovery, Record, Resource, ResourceSpec
from backends.chardev import CharDev, CharDevOptions
from backends.chardev.options import UsbOption
from tests.backends.linux.sticks import directory, stick, tty
from tests.backends.trees import plant, planted_host
from tests.e2e.hermetic import Injector
from tests.wait import limit, settled

PORT = "1-2"
UNIT = f"usb:{PORT}"


class Counting(CharDev):
    """Counts its looks at units."""

    looks = 0

    def discover(self, unit: str) -> Discovery:
        self.looks += 1
        return super().discover(unit)


class Node:
    """A made-up node with one USB port, the source of its events, and discovery behind it."""

    def __init__(self, root: str) -> None:
        self.root = Path(root)
        self.inject = Injector()
        self.hints = 0
        self.found = asyncio.Condition()
        options = CharDevOptions(usb=UsbOption("0403"), nodes=["usb", "tty"])
        self.backend = Counting(planted_host(self.root), [Resource("a/stick", ResourceSpec("chardev", options))])
        self.discoverer = Discoverer("chardev", self.backend, self._news, resync=3600, probe=3600)
        self.source = UeventSource(self._take, self.backend.host)
        self.news = asyncio.Event()

    def _news(self, _news: Changes) -> None:
        self.news.set()

    def _take(self, hint: Emitted) -> None:
        assert not isinstance(hint, Resync | Record)
        self.hints += 1
        self.discoverer.hint(hint)

    def plug(self, number: int) -> None:
        """In the kernel's order: the stick, its interface, the driver's tty, each with its event."""
        plant(self.root, stick(PORT, number, serial="A1"))
        self._event("add", "", "usb", f"bus/usb/001/{number:03}")
        self._event("add", f"/{PORT}:1.0", "usb")
        if not (self.root / f"dev/ttyUSB{number % 2}").exists():
            plant(self.root, f"dev/ttyUSB{number % 2} c 188:{number % 2}")
        plant(self.root, tty(PORT, f"ttyUSB{number % 2}", f"188:{number % 2}", dev=False))
        for below, subsystem, name in self._functions(number):
            self._event("add", below, subsystem, name)
        self._event("bind", "", "usb")

    def unplug(self, number: int) -> None:
        """In the kernel's order, the other way round."""
        (self.root / "sys/bus/usb/devices" / PORT).unlink()
        shutil.rmtree(self.root / "sys" / directory(PORT))
        for below, subsystem, name in reversed(self._functions(number)):
            self._event("remove", below, subsystem, name)
        self._event("remove", "", "usb", f"bus/usb/001/{number:03}")
        (self.root / f"dev/bus/usb/001/{number:03}").unlink()

    def _functions(self, number: int) -> list[tuple[str, str, str | None]]:
        name = f"ttyUSB{number % 2}"
        return [(f"/{PORT}:1.0/{name}", "usb-serial", None), (f"/{PORT}:1.0/{name}/tty/{name}", "tty", name)]

    def _event(self, action: str, below: str, subsystem: str, node: str | None = None) -> None:
        self.inject.kernel(action, f"/{directory(PORT)}{below}", subsystem, **({"DEVNAME": node} if node else {}))

    def paths(self) -> list[str]:
        """The nodes of the stick as it is known."""
        devices: tuple[Device, ...] = self.discoverer.known.get(UNIT, ())
        return [node.path.text for device in devices for node in device.nodes]

    async def until(self, paths: list[str]) -> None:
        """Wait until the stick is known with these nodes."""
        async with limit(f"it is known with {paths}", self.paths):
            while self.paths() != paths:
                self.news.clear()
                await self.news.wait()


def _run(root: str, body: Callable[[Node], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        node = Node(root)
        node.source.watch(node.discoverer.watches().subsystems)
        async with anyio.create_task_group() as tasks:
            await tasks.start(node.source.run)
            tasks.start_soon(node.discoverer.run)
            await node.discoverer.first_scan.wait()
            result = await body(node)
            tasks.cancel_scope.cancel()
        return result

    return anyio.run(run)


def replug(root: str) -> Any:
    """What is known after each of: in, out, in again."""

    async def body(node: Node) -> Any:
        node.plug(5)
        await node.until(["/dev/bus/usb/001/005", "/dev/ttyUSB1"])
        node.unplug(5)
        await node.until([])
        node.plug(6)
        await node.until(["/dev/bus/usb/001/006", "/dev/ttyUSB0"])
        return node.paths()

    return _run(root, body)


def flap(root: str, times: int, seen: bool) -> Any:
    """Plug in and unplug so many times, where each is `seen` before the next or nothing is read; then leave it in."""

    async def body(node: Node) -> Any:
        for number in range(2, 2 + times):
            for change in (node.plug, node.unplug):
                change(number)
                if seen:
                    await settled()
        node.plug(2 + times)
        await node.until([f"/dev/bus/usb/001/{2 + times:03}", f"/dev/ttyUSB{times % 2}"])
        looks = node.backend.looks
        await settled()
        return {
            "hints": node.hints,
            "looks": looks,
            "looks when quiet": node.backend.looks - looks,
            "problems": [problem.sentence for unit in node.discoverer.problems.values() for problem in unit],
        }

    return _run(root, body)
