from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.base import HostPath
from backends.linux.nodes import DeviceNode, Fault, NoNodeError, device_node, directory, numa_node
from tests.backends.trees import planted_host


def look(tmp_path: Path, tree: str, path: str = "/dev/x") -> DeviceNode:
    return device_node(planted_host(tmp_path, tree), HostPath(path))


@contextmanager
def as_nobody() -> Iterator[None]:
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_node_has_its_type_and_number(tmp_path: Path) -> None:
    tree = "dev/net/tun c 10:200\ndev/loop0 b 7:0"
    assert look(tmp_path, tree, "/dev/net/tun") == DeviceNode(HostPath("/dev/net/tun"), False, 10, 200, frozenset())
    assert device_node(planted_host(tmp_path), HostPath("/dev/loop0")).number == "b:7:0"


@pytest.mark.parametrize(
    ("links", "via"),
    [
        ("dev/x -> y", ["/dev/y"]),
        ("dev/x -> /dev/y", ["/dev/y"]),
        ("dev/x -> ../dev/./y", ["/dev/y"]),
        ("dev/x -> by-id/z\ndev/by-id/z -> ../y", ["/dev/by-id/z", "/dev/y"]),
        ("dev/x -> d/y\ndev/d -> .", ["/dev/d/y", "/dev/y"]),
        ("dev/x -> d/y\ndev/d -> /dev", ["/dev/d/y", "/dev/y"]),
        ("dev/x -> d/../y\ndev/d/", ["/dev/y"]),
    ],
)
def test_links_are_followed_inside_the_hosts_tree(tmp_path: Path, links: str, via: list[str]) -> None:
    found = look(tmp_path, f"dev/y c 240:7\n{links}")
    assert found.path == HostPath("/dev/y")
    assert found.number == "c:240:7"
    assert found.via == {HostPath(path) for path in via}


def test_an_absolute_link_does_not_lead_into_our_own_dev(tmp_path: Path) -> None:
    # ours has a /dev/null, the host's has not
    with pytest.raises(NoNodeError, match=r"^/dev/x is a link to /dev/null, which does not exist$"):
        look(tmp_path, "dev/x -> /dev/null")


@pytest.mark.parametrize(
    ("tree", "fault", "sentence"),
    [
        ("", Fault.MISSING, "/dev/x does not exist"),
        ("dev/x", Fault.OTHER, "/dev/x is a plain file, not a device node"),
        ("dev/x/", Fault.DIRECTORY, "/dev/x is a directory, not a device node"),
        ("dev/x -> .", Fault.DIRECTORY, "/dev/x, a link to /dev, is a directory, not a device node"),
        ("dev/d/\ndev/x -> d/..", Fault.DIRECTORY, "/dev/x, a link to /dev, is a directory, not a device node"),
        ("dev/n c 1:3\ndev/x -> n/..", Fault.DIRECTORY, "/dev/x, a link to /dev, is a directory, not a device node"),
        ("dev/x -> y", Fault.DANGLING, "/dev/x is a link to /dev/y, which does not exist"),
        ("dev/x -> y\ndev/y", Fault.OTHER, "/dev/x, a link to /dev/y, is a plain file, not a device node"),
        ("dev/x -> x", Fault.OTHER, "/dev/x is a loop of symbolic links"),
        ("dev/x -> y\ndev/y -> /dev/x", Fault.OTHER, "/dev/x is a loop of symbolic links"),
        ("dev/x -> /run/y\nrun/y c 1:3", Fault.OTHER, "/dev/x, a link to /run/y, leads out of /dev"),
        ("dev/x -> ../run/y\nrun/y c 1:3", Fault.OTHER, "/dev/x, a link to /run/y, leads out of /dev"),
        ("dev/x -> /proc/self/fd/0", Fault.OTHER, "/dev/x, a link to /proc/self/fd/0, leads out of /dev"),
        ("dev/x -> /", Fault.OTHER, "/dev/x, a link to /, leads out of /dev"),
        ("dev/x -> ../../..", Fault.OTHER, "/dev/x, a link to /, leads out of /dev"),
    ],
)
def test_what_is_no_node_says_why(tmp_path: Path, tree: str, fault: Fault, sentence: str) -> None:
    with pytest.raises(NoNodeError) as error:
        look(tmp_path, tree)
    assert (error.value.fault, error.value.sentence) == (fault, sentence)


def test_a_file_where_a_directory_is_due_is_a_missing_node(tmp_path: Path) -> None:
    with pytest.raises(NoNodeError) as error:
        look(tmp_path, "dev/x", "/dev/x/y")
    assert error.value.fault is Fault.MISSING


def test_pipes_and_sockets_are_no_nodes(tmp_path: Path) -> None:
    host = planted_host(tmp_path)
    os.mkfifo(tmp_path / "dev/pipe")
    with pytest.raises(NoNodeError, match="is a pipe, not a device node"):
        device_node(host, HostPath("/dev/pipe"))
    with socket.socket(socket.AF_UNIX) as log:
        log.bind(str(tmp_path / "dev/log"))
        with pytest.raises(NoNodeError, match="is a socket, not a device node"):
            device_node(host, HostPath("/dev/log"))


def test_forty_links_are_followed_and_no_more(tmp_path: Path) -> None:
    chain = "\n".join(f"dev/l{n} -> l{n + 1}" for n in range(41)) + "\ndev/l41 c 1:3"
    assert look(tmp_path, chain, "/dev/l1").number == "c:1:3"
    with pytest.raises(NoNodeError, match="loop"):
        device_node(planted_host(tmp_path), HostPath("/dev/l0"))


@pytest.mark.needs("root")
def test_a_node_that_may_not_be_seen_is_unreadable(tmp_path: Path) -> None:
    host = planted_host(tmp_path, "dev/secret/x c 1:3")
    (tmp_path / "dev/secret").chmod(0o700)
    with as_nobody(), pytest.raises(NoNodeError, match=r"^/dev/secret/x cannot be read: permission denied$") as error:
        device_node(host, HostPath("/dev/secret/x"))
    assert error.value.fault is Fault.UNREADABLE


def test_a_name_that_is_too_long_is_unreadable(tmp_path: Path) -> None:
    with pytest.raises(NoNodeError, match="cannot be read: file name too long"):
        look(tmp_path, "", "/dev/" + "x" * 300)


@pytest.mark.parametrize(
    ("path", "real"),
    [
        ("/dev", "/dev"),
        ("/dev/d", "/dev/d"),
        ("/dev/link", "/dev/d"),
        ("/dev/file", None),
        ("/dev/none", None),
        ("/dev/lost", None),
    ],
)
def test_a_directory_is_found_through_links(tmp_path: Path, path: str, real: str | None) -> None:
    host = planted_host(tmp_path, "dev/d/\ndev/link -> /dev/d\ndev/file\ndev/lost -> nowhere")
    assert directory(host, HostPath(path)) == (real and HostPath(real))


@pytest.mark.parametrize(("text", "expected"), [("1", 1), ("0", 0), ("-1", None), ("", None), ("x", None)])
def test_the_numa_node_is_what_sysfs_says_and_not_minus_one(tmp_path: Path, text: str, expected: int | None) -> None:
    tree = f"sys/devices/pci/x/numa_node = {text}\nsys/devices/pci/x/misc/y/device -> ../../\n"
    host = planted_host(
        tmp_path, tree + "sys/dev/char/10:232 -> ../../devices/pci/x/misc/y\nsys/dev/block/7:0/device/numa_node = 3"
    )
    assert numa_node(host, DeviceNode(HostPath("/dev/y"), False, 10, 232, frozenset())) == expected
    assert numa_node(host, DeviceNode(HostPath("/dev/y"), True, 7, 0, frozenset())) == 3
    assert numa_node(host, DeviceNode(HostPath("/dev/y"), True, 10, 232, frozenset())) is None
