"""Runs a function in a child process with namespaces of its own, and injects kernel events there.

The child's network namespace is quiet: the kernel sends real uevents to those owned by the initial user
namespace only, and this one is made inside another; nothing but what is injected arrives. Needs "namespaces".

    result = hermetic.call("tests.discovery.sources.uevents_in_child:early")
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import structlog

from tests import nodes
from tests.wait import PATIENCE

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000  # linux/sched.h
MS_REC, MS_PRIVATE = 1 << 14, 1 << 18  # linux/mount.h
NETLINK_KOBJECT_UEVENT = 15
_REPOSITORY: Final = Path(__file__).parents[2]
_libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: object, timeout: float = PATIENCE) -> Any:
    """What `module:function` returns in an isolated child; arguments and result travel as JSON."""
    from tests.needs import skip_without  # not in the child: it needs no pytest

    skip_without("namespaces")
    child = subprocess.run(
        [sys.executable, "-m", __name__, function, json.dumps(arguments)],
        cwd=_REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def isolate() -> None:
    """Give this process and its children mounts of their own and a quiet network namespace.

    Another user than root becomes root of a user namespace for it, where the kernel lets users make them.
    """
    if os.geteuid() != 0:
        _become_root()
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _hold_network_namespace(ready, go)
    os.close(ready[1])
    try:
        if os.read(ready[0], 1) != b"1":
            raise OSError("no user namespace can be made here")
        _check(_libc.unshare(CLONE_NEWNS), "unshare")
        _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount /")
        join_network(child)
    finally:
        for end in (ready[0], *go):
            os.close(end)
        os.waitpid(child, 0)


def join_network(pid: int) -> None:
    """Move this process to the network namespace of another."""
    if os.geteuid() != 0:
        _join(pid, "user", CLONE_NEWUSER)
    _join(pid, "net", CLONE_NEWNET)


def _become_root() -> None:
    user, group = os.geteuid(), os.getegid()
    _check(_libc.unshare(CLONE_NEWUSER), "unshare")
    for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", file).write_text(text)


def _join(pid: int, kind: str, flag: int) -> None:
    namespace = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(namespace, flag), "setns")
    finally:
        os.close(namespace)


def private_tmpfs(path: str) -> None:
    """An empty file system over this directory, for this process only."""
    _check(_libc.mount(b"tmpfs", path.encode(), b"tmpfs", ctypes.c_ulong(0), b"size=16m,mode=755"), f"mount {path}")


def unmount(path: str) -> None:
    """Take the topmost file system off this directory."""
    _check(_libc.umount2(path.encode(), 0), f"unmount {path}")


def _hold_network_namespace(ready: tuple[int, int], go: tuple[int, int]) -> None:
    """In a forked child: make the namespace, wait until it has been joined, exit."""
    try:
        _check(_libc.unshare(CLONE_NEWUSER | CLONE_NEWNET), "unshare")
        os.write(ready[1], b"1")
        os.close(go[1])
        os.read(go[0], 1)
    finally:
        os._exit(0)


def _check(result: int, what: str) -> None:
    if result:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


class Injector:
    """Sends events to this network namespace: as the kernel does, and as udevd does."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, NETLINK_KOBJECT_UEVENT)
        self._socket.bind((0, 0))

    def kernel(self, action: str, devpath: str, subsystem: str, /, **properties: str) -> None:
        """An event that the kernel itself re-broadcasts here (Linux 4.18), with a SEQNUM, from port 0 to group 1."""
        body = _body({"ACTION": action, "DEVPATH": devpath, "SUBSYSTEM": subsystem, **properties})
        message = f"{action}@{devpath}\0".encode() + body
        # struct nlmsghdr; any type from 16 on, NLM_F_REQUEST
        self._socket.sendto(struct.pack("=IHHII", 16 + len(message), 16, 1, 0, 0) + message, (0, 0))

    def udev(self, action: str, devpath: str, subsystem: str, /, **properties: str) -> None:
        """An event as udevd multicasts it to group 2."""
        self.multicast(2, udev_message(action, devpath, subsystem, **properties))

    def multicast(self, group: int, message: bytes) -> None:
        """Any bytes to a group, from this process's port."""
        self._socket.sendto(message, (0, group))

    def unicast(self, port: int, message: bytes) -> None:
        """Any bytes to one socket."""
        self._socket.sendto(message, (port, 0))


def udev_message(action: str, devpath: str, subsystem: str, /, **properties: str) -> bytes:
    """struct udev_monitor_netlink_header and the properties; the filter hashes are left 0, nobody here uses them."""
    body = _body({"ACTION": action, "DEVPATH": devpath, "SUBSYSTEM": subsystem, "SEQNUM": "1", **properties})
    header = b"libudev\0" + struct.pack(">I", 0xFEEDCAFE) + struct.pack("=III", 40, 40, len(body)) + bytes(16)
    return header + body


def _body(properties: dict[str, str]) -> bytes:
    return "".join(f"{key}={value}\0" for key, value in properties.items()).encode()


def _main(function: str, arguments: str) -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is the result's
    isolate()
    nodes.pretend()
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    _main(*sys.argv[1:])
