"""Serves HTTP on the daemon's event loop, as one supervised part of it."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import structlog
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agent.console.control import Control
from agent.console.http.app import Face
from agent.console.http.connections import Reception
from agent.console.probe_service import Health
from agent.kubelet.transport.server import listen as listen_at
from agent.runtime.counts import Counts
from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.restarts import supervise

log = structlog.get_logger()


async def serve(
    control: Control,
    health: Health,
    counts: Counts,
    listen: str,
    hosts: Sequence[str] = (),
    problems: Problems | None = None,
    listeners: list[socket.socket] | None = None,
    given: Sequence[socket.socket] = (),
) -> None:
    """Serve at "host:port" or "unix:/path" until cancelled.

    Args:
        control: is asked.
        health: of the daemon itself.
        counts: are shown.
        listen: where.
        hosts: names of this node beside its own.
        problems: is told what does not work.
        listeners: has the sockets meanwhile that another agent may go on listening at.
        given: such sockets of the agent before us.

    Raises:
        OSError: one cannot listen there.
    """
    face = Face(control, health, counts, problems)
    async with listening(listen, given) as sockets, anyio.create_task_group() as tasks:
        tasks.start_soon(supervise, "live page", face.viewers.run)
        log.info("http-served", listen=listen)
        shared = [it for it in sockets if it.family != socket.AF_UNIX]  # a path is another's by itself
        listeners = [] if listeners is None else listeners
        listeners[:] = shared
        try:
            await Reception(OnlyFor(face, Hosts(own_names(listen, hosts))), problems=problems).receive(sockets)
        finally:
            listeners.clear()


# --- the sockets that HTTP is served on: TCP at a host's addresses, or a unix socket that appears ready ---

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


# --- which Host headers are answered: names and addresses of this node alone, against DNS rebinding ---
#
# A page in a browser on the node may have its own name lead to 127.0.0.1 (DNS rebinding) and then read what we say;
# its requests bear that name. An address in the header is no name that could be led elsewhere. A unix socket no
# browser reaches.

_PORT = re.compile(r":[0-9]*\Z")


class Hosts:
    """The Host headers that are answered."""

    def __init__(self, names: Iterable[str]) -> None:
        """Take these names; `localhost` and every address come by themselves."""
        self._names = frozenset(_folded(name) for name in names) - {""}

    def include(self, header: str) -> bool:
        """Is this Host header one of ours?"""
        name = _folded(_PORT.sub("", header))
        return name == "localhost" or name.endswith(".localhost") or name in self._names or _is_address(name)


def own_names(listen: str, configured: Iterable[str] = ()) -> list[str]:
    """What this node is called: by the configuration, by its kernel, by the Downward API."""
    return [*configured, listen.rpartition(":")[0], socket.gethostname(), os.environ.get("NODE_NAME", "")]


def _folded(name: str) -> str:
    return name.lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


class OnlyFor:
    """The application, for requests to these hosts alone."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse."""
        is_tcp = (scope.get("server") or ("", None))[1] is not None
        said = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if is_tcp and not all(map(self._hosts.include, said)):
            why = "this node does not go by that name; if it should, add the name to hosts in [http]\n"
            await PlainTextResponse(why, 421, {"connection": "close", "cache-control": "no-store"})(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, send)
