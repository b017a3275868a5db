from __future__ import annotations

import asyncio
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import pyudev
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.devices.sources.base import Resync
from agent.devices.sources.uevents import Mode, UeventSource, parse_kernel, parse_udev
from backends.base import Hint, Host, HostPath, Uevent
from tests.e2e import hermetic

LOOP_CTL_ADD, LOOP_CTL_REMOVE = 0x4C80, 0x4C81  # linux/loop.h
LOOP_NUMBER = 300 + os.getpid() % 500

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="injecting kernel events needs root")
keys = st.text(st.characters(codec="ascii", exclude_characters="=\0"), min_size=1)
values = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


def in_child(function: str, *arguments: object) -> Any:
    return hermetic.call(f"tests.devices.uevents_in_child:{function}", *arguments)


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


@pytest.mark.root
@needs_root
class TestInjected:
    def test_events_become_hints_with_their_node(self) -> None:
        assert in_child("hints") == {
            "emitted": [
                ["add", "block", "/devices/virtual/block/loop9", "/dev/loop9"],
                ["add", "usb", "/devices/pci0/usb1/1-2", "/dev/bus/usb/001/002"],
                ["change", "pci", "/devices/pci0", "/dev/odd"],
                ["remove", "pci", "/devices/pci0", None],
            ],
            "received": {"block add": 1, "usb add": 1, "pci change": 1, "pci remove": 1, "last change": 1},
        }

    def test_a_filter_change_on_a_live_socket_takes_effect(self) -> None:
        assert in_child("filter_changes") == [
            ["/devices/0", "pci"],
            ["/devices/1", "pci"],
            ["/devices/1", "usb"],
            ["/devices/2", "pci"],
            ["/devices/2", "usb"],
            ["/devices/2", "net"],
            ["/devices/3", "usb"],
        ]

    def test_what_is_wanted_throughout_is_never_lost_while_the_filter_changes(self) -> None:
        found = in_child("wanted_is_never_lost_while_the_filter_changes", 500)
        assert found == [f"/devices/{number}" for number in range(500)]

    def test_an_overflow_is_told_once_after_what_was_saved_and_before_what_follows(self) -> None:
        seen = in_child("overflow", 5000, 4096)
        assert seen["overflows"] == 1
        *saved, resync, after, (_, overflown_at) = seen["emitted"]
        assert [devpath for _, _, devpath, _ in saved] == [f"/devices/{number}" for number in range(len(saved))]
        assert resync == ["resync"]
        assert overflown_at == len(saved) + 1
        assert after[2] == "/devices/after"

    def test_a_burst_of_10_000_is_received_whole_and_leaves_the_loop_its_turns(self) -> None:
        seen = in_child("burst", 10_000)
        assert seen["emitted"] == 10_000
        assert seen["overflows"] == 0
        assert seen["turns"] > 10_000 / 200

    def test_only_the_kernel_is_believed(self) -> None:
        assert in_child("impostors") == []

    def test_on_request_udevs_own_events_are_read(self) -> None:
        assert in_child("udev") == [["add", "block", "/devices/virtual/block/loop9", "/dev/loop9"]]

    def test_a_missing_udevd_is_told_in_a_sentence(self) -> None:
        (sentence,) = in_child("udev_without_udevd")
        assert "no udevd runs here" in sentence

    def test_running_again_asks_for_a_full_look_and_leaves_no_socket(self) -> None:
        assert in_child("run_again") == {"emitted": [["resync"]], "open sockets": 0}


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (OSError(errno.EPERM, "no"), "NETLINK_KOBJECT_UEVENT.*was refused.*allow AF_NETLINK"),
        (OSError(errno.EAFNOSUPPORT, "no"), "Address family not supported.*allow AF_NETLINK"),
        (ValueError("Invalid argument"), "allow AF_NETLINK"),
        (ImportError("No library named udev"), "libudev is missing"),
    ],
)
async def test_a_refused_socket_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, sentence: str
) -> None:
    def refuse(context: object, source: Mode) -> None:
        raise error

    monkeypatch.setattr(pyudev.Monitor, "from_netlink", refuse)
    with pytest.raises(OSError, match=sentence):
        await UeventSource(print, Host()).run()


@pytest.fixture
def loop() -> Iterator[Callable[[int], None]]:
    """Makes or removes loop device LOOP_NUMBER by ioctl; removing takes the kernel some 30 ms."""
    if not os.access("/dev/loop-control", os.W_OK):
        pytest.skip("no /dev/loop-control that we may open")

    def act(request: int) -> None:
        with Path("/dev/loop-control").open("rb", buffering=0) as control:
            fcntl.ioctl(control, request, LOOP_NUMBER)

    yield act
    with suppress(OSError):  # the test has removed it
        act(LOOP_CTL_REMOVE)


@asynccontextmanager
async def running(*subsystems: str) -> Any:
    queue: asyncio.Queue[Hint | Resync] = asyncio.Queue()
    source = UeventSource(queue.put_nowait, Host())
    source.watch(frozenset(subsystems))
    async with anyio.create_task_group() as tasks:
        await tasks.start(source.run)
        yield queue
        tasks.cancel_scope.cancel()


@pytest.mark.root
async def test_a_real_loop_device_is_seen_coming_and_going(loop: Callable[[int], None]) -> None:
    async with running("block") as queue:
        for request, action in ((LOOP_CTL_ADD, "add"), (LOOP_CTL_REMOVE, "remove")):
            await asyncio.to_thread(loop, request)
            while True:
                hint = await asyncio.wait_for(queue.get(), 5)
                if (
                    isinstance(hint, Uevent)
                    and hint.action == action
                    and hint.node == HostPath(f"/dev/loop{LOOP_NUMBER}")
                ):
                    break
            assert hint.devpath == f"/devices/virtual/block/loop{LOOP_NUMBER}"
            assert hint.properties["DEVTYPE"] == "disk"
