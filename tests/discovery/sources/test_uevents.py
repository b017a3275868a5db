from __future__ import annotations

import asyncio
import errno
import fcntl
import inspect
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.discovery.sources import Emitted
from agent.discovery.uevents import UeventSource, parse_kernel, parse_udev
from backends.base import Host, HostPath, Uevent
from tests.discovery import one_child
from tests.e2e import hermetic
from tests.needs import skip_without
from tests.wait import block_until, limit

LOOP_CTL_ADD, LOOP_CTL_REMOVE = 0x4C80, 0x4C81  # linux/loop.h

keys = st.text(st.characters(codec="ascii", exclude_characters="=\0"), min_size=1)
values = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


CASES: dict[str, Sequence[object]] = {
    "hints": (),
    "facts": (),
    "filter_changes": (),
    "wanted_is_never_lost_while_the_filter_changes": (500,),
    "overflow": (),
    "early": (),
    "udev_without_udevd": (),  # from here on /dev and /run are others
}


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    return one_child.run("tests.discovery.sources.uevents_in_child", CASES)


@settings(deadline=None)
@given(st.dictionaries(keys, values))
def test_every_property_of_a_kernel_message_is_read(properties: dict[str, str]) -> None:
    body = "".join(f"{key}={value}\0" for key, value in properties.items())
    assert parse_kernel(f"add@/devices/x=y\0{body}".encode()) == properties


@settings(deadline=None)
@given(st.dictionaries(keys, values))
def test_every_property_of_a_udev_message_is_read(properties: dict[str, str]) -> None:
    usual = {"ACTION": "add", "DEVPATH": "/devices/x", "SUBSYSTEM": "block", "SEQNUM": "1"}
    message = hermetic.udev_message("add", "/devices/x", "block", **properties)
    assert parse_udev(message) == usual | properties


@settings(deadline=None)
@given(st.binary())
def test_no_bytes_upset_the_parsers(data: bytes) -> None:
    parse_kernel(data)
    parse_udev(data)
    parse_udev(b"libudev\0\xfe\xed\xca\xfe" + data)


class TestInjected:
    def test_events_become_hints_with_their_node(self, cases: dict[str, Any]) -> None:
        assert cases["hints"] == {
            "told": [
                "add block /devices/virtual/block/loop9 /dev/loop9",
                "add usb /devices/pci0/usb1/1-2 /dev/bus/usb/001/002",
                "change pci /devices/pci0 /dev/odd",
                "remove pci /devices/pci0 -",
            ],
            "received": {"block add": 1, "usb add": 1, "pci change": 1, "pci remove": 1, "end add": 1},
        }

    def test_an_event_with_a_wanted_fact_is_a_record_and_then_a_hint(self, cases: dict[str, Any]) -> None:
        seen = cases["facts"]
        hints = [f"change pci /devices/{name} -" for name in ("pci0", "pci0", "pci1")]
        assert seen["told"] == ["record of /devices/pci0", *hints]
        assert (seen["source"], seen["event"], seen["numbered"]) == ("uevent", "BEGIN_RECOVERY", True)
        assert seen["boot"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert seen["time"] == 4711.5
        assert inspect.signature(UeventSource).parameters["clock"].default is time.monotonic

    def test_what_follows_from_a_record_is_sent_before_its_hint_has_anybody_look(self, cases: dict[str, Any]) -> None:
        assert cases["facts"]["later"]

    def test_that_the_kernel_dropped_some_is_counted_once(self, cases: dict[str, Any]) -> None:
        assert cases["overflow"] == 1

    def test_a_filter_change_on_a_live_socket_takes_effect(self, cases: dict[str, Any]) -> None:
        told = [line.split()[1:3] for line in cases["filter_changes"]]
        assert told == [
            ["pci", "/devices/0"],
            ["pci", "/devices/1"],
            ["usb", "/devices/1"],
            ["pci", "/devices/2"],
            ["usb", "/devices/2"],
            ["net", "/devices/2"],
            ["usb", "/devices/3"],
        ]

    def test_what_is_wanted_throughout_is_never_lost_while_the_filter_changes(self, cases: dict[str, Any]) -> None:
        found = cases["wanted_is_never_lost_while_the_filter_changes"]
        assert [line.split()[2] for line in found] == [f"/devices/{number}" for number in range(500)]

    def test_a_missing_udevd_is_told_in_a_sentence(self, cases: dict[str, Any]) -> None:
        assert "no udevd runs here" in cases["udev_without_udevd"]

    def test_what_happens_before_anybody_reads_is_told(self, cases: dict[str, Any]) -> None:
        assert cases["early"] == {"told": ["add", "remove"], "open sockets": 0}


class Loop:
    """A loop device of a number that nobody else has; removing it takes the kernel some 30 ms."""

    number = 300 + os.getpid() % 500
    is_there = False

    def _act(self, request: int) -> None:
        with Path("/dev/loop-control").open("rb", buffering=0) as control:
            fcntl.ioctl(control, request, self.number)

    def add(self) -> None:
        while True:
            try:
                self._act(LOOP_CTL_ADD)
            except FileExistsError:
                self.number += 1
            else:
                self.is_there = True
                return

    def remove(self) -> None:
        block_until(self._is_removed, "nobody has the loop device open")

    def _is_removed(self) -> bool:
        try:
            self._act(LOOP_CTL_REMOVE)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            return False  # the host's udevd looks into every new disk
        self.is_there = False
        return True


@pytest.fixture
def loop() -> Iterator[Loop]:
    skip_without("loop devices")
    made = Loop()
    yield made
    if made.is_there:
        made.remove()


@asynccontextmanager
async def running(*subsystems: str) -> Any:
    queue: asyncio.Queue[Emitted] = asyncio.Queue()
    source = UeventSource(queue.put_nowait, Host())
    source.watch(frozenset(subsystems))
    async with anyio.create_task_group() as tasks:
        await tasks.start(source.run)
        yield queue
        tasks.cancel_scope.cancel()


async def test_a_real_loop_device_is_seen_coming_and_going(loop: Loop) -> None:
    async with running("block") as queue:
        for act, action in ((loop.add, "add"), (loop.remove, "remove")):
            await asyncio.to_thread(act)
            node = HostPath(f"/dev/loop{loop.number}")
            async with limit(f"{action} of {node}"):
                hint = await queue.get()
                while not (isinstance(hint, Uevent) and hint.action == action and hint.node == node):
                    hint = await queue.get()
            assert hint.devpath == f"/devices/virtual/block/loop{loop.number}"
            assert hint.properties["DEVTYPE"] == "disk"
