"""Hands the node's resources from the agent that serves them to one that stands by, over a socket beside theirs.

In the order of `agent.kubelet.registration`, so that the kubelet has an endpoint, and devices to give, at every moment. Lines
of words, each side's own; an end of the connection says that the other side is gone:

    standby   ready PID VERSION 3    it has looked at the hardware; before that it only connects
    serving   take 3                 the lock is free; until it hears the next word it serves as ever
    standby   taking                 it has the lock
    serving   given                  it writes no state and sends no list any more
    standby   end RESOURCE PATH      the kubelet has its list, with its socket at that path (relative to the plugin directory)
    serving   ended RESOURCE HOW     our stream has ended; what the kubelet asks of us, the standby is asked from now on.
                                     HOW is a value of `End`. `closed`: the kubelet closed its connection. `kept`: it had forgotten ours and the
                                     standby's client, as one until 1.36 does (A2); the standby has to register once more
    standby   done                   the kubelet listens to it for all that it has: we may end

A serving agent that takes back what it gave puts another lock file into the place of the one that the standby has, and ends
the connection then: a standby whose lock is not in its place any more stands by again.

The number says what an agent knows, and what the serving one says counts. 2: `given` is not said; the serving agent has stopped
by the time it says `take`. No number: 1. It registers at a path that each resource has for good, names no
path, and takes an `end` for word that the kubelet has forgotten its client; it does not say how. An agent that knows no such
socket is waited for by its lock alone.

A connection whose only word is `listeners` is answered with the sockets at which HTTP is served, as descriptors (unix(7),
SCM_RIGHTS): another process that wants the port finds it taken at every moment.
"""

from __future__ import annotations

import asyncio
import enum
import math
import os
import socket
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog
from anyio import to_thread
from grpclib.exceptions import GRPCError, StreamTerminatedError
from msgspec import Struct

from agent.kubelet import wire
from agent.kubelet.client import Channel
from agent.kubelet.lock import identity
from agent.kubelet.server import listen
from agent.runtime import limits, pacing
from agent.runtime.pacing import Doorbell
from backends.base import AllocationRefused

SOCKET: Final = "handover"
"""Beside the resources' sockets."""

FIXED_PATHS: Final = 1
TELLS_GIVEN: Final = 3
SPEAKS: Final = 3
"""How this agent speaks, as the module says."""

_CONNECT_AGAIN: Final = 0.5  # seconds
_SAYS_WITHIN: Final = 2.0  # seconds in which one that lives has said what it has to say
_GIVES_WITHIN: Final = 10.0  # seconds in which one that lives has ended what it does: Allocates, and what it writes
_ENDS_WITHIN: Final = 10.0  # seconds in which one that lives has ended a stream: it lets Allocates be answered first
_LISTENERS_AT_MOST: Final = 64  # a host has few addresses
_COMES_WITHIN: Final = 2.0  # seconds in which one that has been started again has connected

log = structlog.get_logger()


class StandbyLostError(Exception):
    """The standby is gone: this agent has to answer the kubelet's calls again."""


class End(enum.StrEnum):
    """What became of a stream that the agent before us was to end."""

    CLOSED = "closed"
    """It ended, and the kubelet closed its connection."""
    KEPT = "kept"
    """It ended; the kubelet had forgotten that agent's client, and with it ours."""
    UNKNOWN = "unknown"
    """That agent was lost meanwhile, had to break the connection, or does not say."""


# --- of the agent that serves ---


class Standby(Struct, eq=False):
    """An agent that waits to take our place."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    who: str = ""
    """Its process and version, once it is ready."""
    speaks: int = FIXED_PATHS
    """How, as the module says."""
    words: asyncio.Queue[tuple[str, str]] = msgspec.field(default_factory=asyncio.Queue)
    """What it says after that; two empty words where it is gone."""
    is_gone: bool = False

    @property
    def pid(self) -> int:
        """Its process ID."""
        number = self.who.partition(" ")[0]
        return int(number) if number.isdecimal() else 0

    def say(self, *words: str) -> None:
        """Send a line; nothing happens where it is gone."""
        _say(self.writer, *words)

    async def says(self, within: float) -> tuple[str, str]:
        """What it says next, the first word and the rest; two empty words where it is gone, or says nothing for so many seconds."""
        with suppress(TimeoutError):
            async with pacing.running_timeout(within):
                return await self.words.get()
        return "", ""


class Standbys:
    """The agents that have connected to take over."""

    def __init__(self) -> None:
        self._connected: dict[Standby, None] = {}
        self.hung = False
        """Whether one that said nothing was disconnected, and may still live."""
        self.listeners: list[socket.socket] = []
        """At which HTTP is served; they get them."""
        self._server: asyncio.AbstractServer | None = None
        self._made: tuple[int, int] | None = None
        self._changed = Doorbell()

    @property
    def any(self) -> bool:
        """Whether one has connected, ready or not."""
        return bool(self._connected)

    async def come(self) -> bool:
        """Whether one has connected, or does within `_COMES_WITHIN` seconds. One that hung is waited for."""
        return await self._changed.until(lambda: self.any, math.inf if self.hung else _COMES_WITHIN)

    def ready(self, pid: int | None = None) -> Standby | None:
        """The first that is ready, or the one with that process ID if it is ready."""
        return next((one for one in self._connected if one.who and pid in (None, one.pid)), None)

    def dismiss(self, one: Standby) -> None:
        """Disconnect one that hangs, or is gone."""
        self.hung = self.hung or not one.is_gone
        one.writer.close()

    async def changed(self) -> None:
        """Wait until one connects, becomes ready, or goes."""
        self._changed.clear()
        await self._changed.wait()

    @asynccontextmanager
    async def listening(self, directory: Path) -> AsyncIterator[None]:
        """Listen for them while in this context.

        Raises:
            OSError: no socket can be made there.
        """
        try:
            await self.listen(directory)
            yield
        finally:
            if self._is_listening(directory):
                with suppress(OSError):  # of a read-only disk; who has the lock next removes it
                    (directory / SOCKET).unlink()
            self._stop_listening()
            for one in list(self._connected):
                one.writer.close()

    async def listen(self, directory: Path) -> None:
        """Listen there, also where a standby that was lost has put its own socket into the place of ours.

        Raises:
            OSError: no socket can be made there.
        """
        if self._is_listening(directory):
            return
        sock = listen(directory / SOCKET)
        self._stop_listening()
        self._made = identity(directory / SOCKET)
        self._server = await asyncio.start_unix_server(self._meet, sock=sock, start_serving=False)
        await self._server.start_serving()  # which may be cancelled

    def _is_listening(self, directory: Path) -> bool:
        return self._server is not None and identity(directory / SOCKET) == self._made

    def _stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one = Standby(reader, writer)
        self._connected[one] = None
        self._changed.set()
        try:
            async for word, what in _words(reader):
                if word == "ready":
                    pid, version, speaks = (*what.split(), "", "", "")[:3]
                    one.who, one.speaks = f"{pid} {version}", _number(speaks)
                    self.hung = False
                    log.info("standby-ready", standby=one.who, then="it takes over when this agent is told to end")
                    self._changed.set()
                elif word == "listeners":
                    _send(writer, self.listeners)
                    break
                else:
                    one.words.put_nowait((word, what))
        finally:
            del self._connected[one]
            self._changed.set()
            one.is_gone = True
            one.words.put_nowait(("", ""))
            writer.close()


class Relay:
    """Passes the kubelet's calls on to the standby's servers, once they are in the place of ours."""

    def __init__(self, plugin_dir: Path) -> None:
        """Prepare; the standby's paths are relative to that directory."""
        self._plugin_dir = plugin_dir
        self._paths: dict[str, str] = {}
        self._is_there: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._channels: dict[str, Channel] = {}
        self._is_lost = False
        self.on_wait: Callable[[str], None] = lambda _: None
        """Called with the resource of each call that is passed on."""
        self.waiting: Counter[str] = Counter()
        """How many calls are being passed on, by resource."""

    def is_there(self, resource: str, path: str) -> None:
        """The standby serves this resource at that path; empty: where it has a fixed one."""
        self._paths[resource] = path or limits.endpoint(self._plugin_dir, resource, fixed=True)
        self._is_there[resource].set()

    def close(self) -> None:
        """Fail the calls that still wait: the standby is gone, or all is handed over."""
        self._is_lost = True
        for event in self._is_there.values():
            event.set()
        for channel in self._channels.values():
            channel.close()

    async def allocate(self, resource: str, ids: Sequence[str]) -> wire.Encoded:
        """An AllocateResponse for these IDs.

        Raises:
            AllocationRefused: with the standby's sentence for the pod's owner.
            StandbyLostError: no standby has answered.
        """
        return await self._ask(resource, "Allocate", wire.encode_preferred([ids]))

    async def pre_start(self, resource: str, ids: Sequence[str]) -> None:
        """Ask whether a container may start with these IDs.

        Raises:
            AllocationRefused: with the standby's sentence for the pod's owner.
            StandbyLostError: no standby has answered.
        """
        await self._ask(resource, "PreStartContainer", wire.encode_ids(ids))

    async def _ask(self, resource: str, method: str, request: wire.Encoded) -> wire.Encoded:
        self.waiting[resource] += 1
        try:
            self.on_wait(resource)
            if not self._is_lost:
                await self._is_there[resource].wait()
            if self._is_lost:
                raise StandbyLostError
            if (channel := self._channels.get(resource)) is None:
                channel = self._channels[resource] = Channel(str(self._plugin_dir / self._paths[resource]))
            return await channel.call(wire.PLUGIN_SERVICE + method, request, wire.Encoded)
        except GRPCError as error:
            raise AllocationRefused(error.message or error.status.name) from None
        except (OSError, StreamTerminatedError, *wire.SENSELESS) as error:
            raise StandbyLostError from error
        finally:
            self.waiting[resource] -= 1


# --- of the agent that stands by ---


class Predecessor:
    """The connection to the agent that serves the node before us."""

    def __init__(self, directory: Path, introduce: Callable[[], str]) -> None:
        """Prepare; `directory` is that of the sockets, and `introduce` tells our process and version."""
        self._path = directory / SOCKET
        self._introduce = introduce
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = False
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._ended: dict[str, asyncio.Future[End]] = {}
        self._speaks = SPEAKS
        self.gives = False
        """Whether it has told us to take over, and is still there."""
        self._has_given = False
        self._listeners: Sequence[socket.socket] = ()
        self._news = Doorbell()
        self._looked, self._gone = asyncio.Event(), asyncio.Event()
        self._gone.set()

    async def run(self) -> None:
        """Stay connected with the agent that serves, except while we do."""
        while True:
            await self._wanted.wait()
            with suppress(OSError):
                await self._listen_to(*await asyncio.open_unix_connection(str(self._path)))
            self._looked.set()
            await asyncio.sleep(_CONNECT_AGAIN)

    @property
    def has_fixed_paths(self) -> bool:
        """Whether it registers at fixed paths, where it looks for ours."""
        return self._speaks == FIXED_PATHS

    @property
    def knows_us(self) -> bool:
        """Whether there is one, and it knows that we are ready."""
        return self._is_ready and self._writer is not None

    async def lasts(self) -> bool:
        """Whether there is one; waits for the first look."""
        await self._looked.wait()
        return not self._gone.is_set()

    async def gone(self) -> None:
        """Wait until there is none, and we have its place."""
        await self._news.until(lambda: not self._wanted.is_set() and self._gone.is_set())

    def listeners(self) -> Sequence[socket.socket]:
        """The sockets at which it served HTTP, once; none where it gave none."""
        given, self._listeners = self._listeners, ()
        return given

    def stand_by(self) -> None:
        """Look for one again: we do not serve, or no more."""
        self._is_ready = False
        self._wanted.set()

    async def decided(self, *, with_listeners: bool = False) -> None:
        """Having its lock, wait until it has handed over or is gone, for as long as one that lives takes.

        With its listeners, where we want them: at no moment another process can listen there.
        """
        self._wanted.clear()
        self._news.set()
        await self._hears(lambda: self.gives, _SAYS_WITHIN)
        for sock in self.listeners():  # of an earlier try
            sock.close()
        if self.gives and with_listeners and self._speaks >= TELLS_GIVEN:
            with suppress(OSError):
                self._listeners = await to_thread.run_sync(_received, self._path)
        if self.gives:
            self._say("taking")
            if self._speaks >= TELLS_GIVEN:
                await self._hears(lambda: self._has_given, _GIVES_WITHIN)

    async def _hears(self, said: Callable[[], bool], within: float) -> None:
        with suppress(TimeoutError):
            async with pacing.running_timeout(within):
                await self._news.until(lambda: said() or self._gone.is_set())

    async def wait(self, seconds: float) -> None:
        """Wait until it lets its lock go or is gone; so many seconds where it does not know us, or has let it go."""
        with anyio.move_on_after(None if self.knows_us and not self.gives else seconds):
            while True:
                self._news.clear()
                await self._news.wait()
                if self.gives or self._gone.is_set():
                    return

    async def _listen_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._gone.clear()
        self._looked.set()
        if self._is_ready:
            self.ready()
        try:
            async for word, what in _words(reader):
                if word == "take":
                    self.gives, self._speaks = True, _number(what)
                    self._news.set()
                elif word == "given":
                    self._has_given = True
                    self._news.set()
                elif word == "ended":
                    resource, _, how = what.partition(" ")
                    self._tell_ended(resource, End(how) if how in set(End) else End.UNKNOWN)
        finally:
            self._writer, self.gives, self._has_given = None, False, False
            writer.close()
            for resource in self._ended:
                self._tell_ended(resource, End.UNKNOWN)
            self._gone.set()
            self._news.set()

    def ready(self) -> None:
        """Tell it that we have looked at the hardware, now and whenever we connect again."""
        self._is_ready = True
        if self._writer is not None:
            self._say("ready", self._introduce(), str(SPEAKS))

    async def end(self, resource: str, path: str) -> End:
        """Have it end a resource's stream, now that we serve the resource at this path.

        One that says nothing is left: it takes its time, and what it does then would be the next stream's end.
        """
        if self._writer is None:
            return End.UNKNOWN
        ended: asyncio.Future[End]
        ended = self._ended[resource] = asyncio.get_running_loop().create_future()
        self._say("end", resource, *([] if self.has_fixed_paths else [path]))
        try:
            with suppress(TimeoutError):
                async with pacing.running_timeout(_ENDS_WITHIN):
                    return await ended
        finally:
            if self._ended.get(resource) is ended:
                del self._ended[resource]
        self.done()  # so that it takes nothing back, should it go on
        if self._writer is not None:
            self._writer.close()
        return End.UNKNOWN

    def _tell_ended(self, resource: str, how: End) -> None:
        if (ended := self._ended.get(resource)) is not None and not ended.done():
            ended.set_result(how)

    def done(self) -> None:
        """Tell it that all resources are registered: it may end."""
        self._say("done")

    def _say(self, *words: str) -> None:
        if self._writer is not None:
            _say(self._writer, *words)


# --- of both ---


def _number(word: str) -> int:
    """How an agent speaks."""
    return int(word) if word.isdecimal() else FIXED_PATHS


def _send(writer: asyncio.StreamWriter, listeners: Sequence[socket.socket]) -> None:
    """Send descriptors, which asyncio cannot."""
    ours: socket.socket = writer.get_extra_info("socket")
    with socket.socket(fileno=os.dup(ours.fileno())) as sock, suppress(OSError):
        socket.send_fds(sock, [b"\n"], [it.fileno() for it in listeners])


def _received(path: Path) -> Sequence[socket.socket]:
    """What `_send` sends there (blocking).

    Raises:
        OSError: nothing has come; an agent that does not know the word says nothing.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(_SAYS_WITHIN)
        sock.connect(str(path))
        sock.sendall(b"listeners\n")
        _, received, _, _ = socket.recv_fds(sock, 1, _LISTENERS_AT_MOST)
    for one in received:
        os.set_inheritable(one, False)
    return [socket.socket(fileno=one) for one in received]


def _say(writer: asyncio.StreamWriter, *words: str) -> None:
    writer.write(f"{' '.join(words)}\n".encode())


async def _words(reader: asyncio.StreamReader) -> AsyncIterator[tuple[str, str]]:
    """The first word and the rest of each line, until the other side is gone or sends a line that is too long."""
    with suppress(OSError, ValueError):
        while line := await reader.readline():
            word, _, what = line.decode(errors="replace").strip().partition(" ")
            yield word, what
