"""Opens the sockets that HTTP is served on: TCP at a host's addresses, or a unix socket that appears ready."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from agent.kubelet.transport.server import listen as listen_at

UNIX_MODE: Final = 0o660
"""Of the unix socket: root, and the group of a directory that hands its own on (setgid)."""

_BACKLOG: Final = 4096
"""Connections that the kernel keeps until they are accepted, one after the other, or have sent nothing yet."""

_SILENT: Final = 5
"""Seconds, about, for which it keeps a connection from us that sends nothing (tcp(7), TCP_DEFER_ACCEPT)."""


@asynccontextmanager
async def listening(address: str, given: Sequence[socket.socket] = ()) -> AsyncIterator[Sequence[socket.socket]]:
    """Listen at "host:port" (at every address of the host) or "unix:/path" while in this context.

    `given` are sockets that an agent before us listened at: those at the same addresses go on. All of them are closed.

    Raises:
        OSError: one cannot listen there; the message says where.
    """
    scheme, _, path = address.partition(":")
    with ExitStack() as open_ones:
        there = {_where(open_ones.enter_context(sock)): sock for sock in given}
        if scheme == "unix":
            yield [_unix(Path(path), open_ones)]
        else:
            host, _, port = address.rpartition(":")
            found = await _resolved(host.strip("[]"), int(port))
            yield [
                there.get((family, where)) or open_ones.enter_context(_tcp(family, where)) for family, where in found
            ]


def _where(sock: socket.socket) -> tuple[int, tuple[str, int]]:
    return sock.family, sock.getsockname()[:2]


def _unix(path: Path, cleanup: ExitStack) -> socket.socket:
    sock = cleanup.enter_context(listen_at(path, UNIX_MODE))
    made = path.lstat()

    def remove() -> None:
        with suppress(OSError):
            if os.path.samestat(path.lstat(), made):
                path.unlink()

    cleanup.callback(remove)  # before it is closed: until then no other file can have its inode number
    return sock


async def _resolved(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[str, int]]]:
    """The addresses of a host, each once; "localhost" may have two."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from error
    return list({where: (family, (str(where[0]), port)) for family, _, _, _, where in found}.values())


def _tcp(family: socket.AddressFamily, where: tuple[str, int]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart must not wait for old connections' ends
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(where[0] != "::"))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _SILENT)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {where[0]} port {where[1]}: {error.strerror}") from error
    return sock
