"""What runs on a card, as its driver tells it by devlink; with a kernel's answers as its headers lay them out."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Host
from backends.linux import netlink
from tests.backends.trees import planted_host

ADDRESS = "0000:3b:00.0"
FAMILY = 0x15
NESTED = 0x8000


def attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content + bytes(-len(content) % 4)


def message(kind: int, *attributes: bytes) -> bytes:
    body = struct.pack("=BBH", 1, 1, 0) + b"".join(attributes)
    return struct.pack("=IHHII", 16 + len(body), kind, 0, 1, 0) + body


def version(kind: int, name: str, value: str) -> bytes:
    return attribute(NESTED | kind, attribute(103, name.encode() + b"\0") + attribute(104, value.encode() + b"\0"))


REFUSAL = struct.pack("=IHHIIi", 36, 2, 0, 1, 0, -2) + bytes(16)  # NLMSG_ERROR with ENOENT
IS_DEVLINK = message(16, attribute(2, b"devlink\0"), attribute(1, struct.pack("=H", FAMILY)))
E810 = message(
    FAMILY,
    attribute(1, b"pci\0"),
    attribute(98, b"ice\0"),
    version(100, "board.id", "K65390-000"),
    version(101, "fw.mgmt", "6.1.4"),
    version(101, "fw.app.name", "ICE COMMS Package"),
    version(102, "fw.app.name", "ICE OS Default Package"),
)


class Kernel:
    """Answers one request after the other; each has a socket of its own."""

    def __init__(self, *answers: bytes) -> None:
        self.answers = [*answers]
        self.asked: list[bytes] = []

    def __call__(self, *_: Any) -> Kernel:
        return self

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def settimeout(self, seconds: float) -> None:
        assert seconds

    def sendto(self, request: bytes, _: object) -> None:
        self.asked.append(request)

    def recv(self, _: int) -> bytes:
        if not self.answers:
            raise TimeoutError
        return self.answers.pop(0)


def running(root: Path, *answers: bytes, here: bool = True) -> tuple[dict[str, str], Kernel]:
    host, kernel = planted_host(root), Kernel(*answers)
    with (
        patch.object(netlink, "is_of_host", lambda _: here),
        patch("backends.linux.netlink.socket.socket", kernel),
    ):
        return netlink.devlink_versions(host, ADDRESS), kernel


def test_the_running_versions_of_a_card_are_told(tmp_path: Path) -> None:
    found, kernel = running(tmp_path, IS_DEVLINK, E810)
    assert found == {"fw.mgmt": "6.1.4", "fw.app.name": "ICE COMMS Package"}
    family, info = kernel.asked
    assert family[16:20] + family[20:] == struct.pack("=BBH", 3, 1, 0) + attribute(2, b"devlink\0")
    assert struct.unpack_from("=IHH", info) == (len(info), FAMILY, 1)
    assert info[16:] == struct.pack("=BBH", 51, 1, 0) + attribute(1, b"pci\0") + attribute(2, b"0000:3b:00.0\0")


@pytest.mark.parametrize("answers", [(), (REFUSAL,), (IS_DEVLINK,), (IS_DEVLINK, REFUSAL)])
def test_where_nobody_tells_nothing_is_known(tmp_path: Path, answers: tuple[bytes, ...]) -> None:
    assert running(tmp_path, *answers)[0] == {}


def test_another_network_namespaces_kernel_is_not_asked(tmp_path: Path) -> None:
    assert running(tmp_path, IS_DEVLINK, E810, here=False)[1].asked == []


@given(st.lists(st.binary(max_size=40) | st.builds(lambda b: message(FAMILY, b), st.binary(max_size=40)), max_size=3))
def test_no_answer_makes_the_reader_fail(answers: list[bytes]) -> None:
    kernel = Kernel(IS_DEVLINK, *answers)
    with (
        patch.object(netlink, "is_of_host", lambda _: True),
        patch("backends.linux.netlink.socket.socket", kernel),
    ):
        netlink.devlink_versions(Host(), ADDRESS)
