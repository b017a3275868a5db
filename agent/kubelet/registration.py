"""Keeps one resource registered with the kubelet, for ever: register, notice, end the old stream, register again.

Never two live streams for one resource, and never a registration that overtakes an old stream's end: the
kubelet would drop the *new* client (kubelet contract: A2). So: end the stream, wait until the kubelet has
closed that connection, register.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.kubelet import wire
from agent.kubelet.handover import Predecessor
from agent.kubelet.plugin import Plugin
from agent.kubelet.transport.client import Channel
from agent.kubelet.transport.server import SocketServer
from agent.runtime.counts import Counts
from agent.runtime.errors import words

API_VERSION: Final = "v1beta1"  # the only one a kubelet accepts (A1)

_REGISTER: Final = "/v1beta1.Registration/Register"
_REGISTER_DEADLINE: Final = 30.0  # seconds; it is passed on to the dial-back, which may take 10 (A1)
_AT_ONCE: Final = 16  # concurrent registrations; each has the kubelet dial back to us
_STREAM_WITHIN: Final = 5.0  # seconds after which a registration without a stream did not work (A2)
_TRAILERS_WITHIN: Final = 1.0  # seconds for an ended stream's trailers to leave; then its connection is reset
_CLOSED_WITHIN: Final = 0.5  # seconds; a kubelet that has not closed by then has forgotten us (A2)
_ALLOCATE_PATIENCE: Final = 0.5  # seconds for Allocates under way when we stop, before their stream ends
_STOP_PATIENCE: Final = 0.7  # seconds for running calls when we stop
_FIRST_DELAY: Final = 0.001  # seconds before the second try: a new socket may not listen yet for 3 ms (A6); doubling
_LINK: Final = "It is a symbolic link, which no kubelet makes, and is not followed; remove it"
_UNREACHABLE_DELAY: Final = 1.0  # seconds, at most, while nobody listens
_REFUSED_DELAY: Final = 5.0  # seconds, at most, while it refuses or drops us: no event tells when it is well
_SETTLED_AFTER: Final = 5.0  # seconds after which a registration counts as one that works
_TWICE: Final = "the kubelet asked for a second stream, and forgets the first as that is refused"
_WORTH_SAYING: Final = 0.25  # seconds; a kubelet that does not answer for less is just starting

log = structlog.get_logger()


class RegistrationError(Exception):
    """This registration did not work; the sentence says why."""


class UnreachableError(RegistrationError):
    """Nobody answers on the kubelet's socket."""


class Kubelet:
    """The kubelet's registration socket: notices a new one, and registers there."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.generation = 0
        """Counts the sockets that we saw appear."""
        self._identity: tuple[int, ...] | None = None
        self._appeared = asyncio.Event()
        self._attempts: set[anyio.CancelScope] = set()
        self._channel: Channel | None = None
        self._users: Counter[Channel] = Counter()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self.complaint = ""
        """Why it does not answer, if it was asked and has not for a while."""
        self._silent_since: float | None = None

    def look(self) -> None:
        """Look whether the socket is another one, of a kubelet that has just started.

        A new one may have the old one's inode number (A6), but then it has another time.
        """
        try:
            found = self.socket.lstat()
        except OSError:
            return
        if stat.S_ISLNK(found.st_mode):
            self._refuse_link()
            return
        identity = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if identity == self._identity:
            return
        log.info("kubelet-restarted" if self.generation else "kubelet-found", socket=str(self.socket))
        self._identity = identity
        self.generation += 1
        self._channel = None  # closed by the last who uses it
        self._silent_since, self.complaint = None, ""
        self._appeared.set()
        self._appeared = asyncio.Event()
        for scope in tuple(self._attempts):
            scope.cancel()

    def _refuse_link(self) -> None:
        """Report a link in the place of the socket, once; the directory may be one, where it lies on another disk."""
        self._identity = None
        if self.complaint != _LINK:
            self.complaint = _LINK
            log.warning(
                "kubelet-silent", socket=str(self.socket), reason=_LINK, then="waiting until a kubelet makes its own"
            )

    async def newer_than(self, generation: int) -> None:
        """Wait until a socket newer than this one has appeared."""
        while self.generation <= generation:
            await self._appeared.wait()

    @contextmanager
    def until_restart(self) -> Iterator[None]:
        """Cancel the body when another kubelet starts."""
        with anyio.CancelScope() as scope:
            self._attempts.add(scope)
            try:
                yield
            finally:
                self._attempts.discard(scope)

    async def register(self, resource: str, endpoint: str, options: wire.PluginOptions) -> None:
        """Announce our socket `endpoint` (relative to the plugin directory) as the plugin of `resource`.

        Returns when the kubelet has dialled back and opened ListAndWatch (A1).

        Raises:
            UnreachableError: nobody listens.
            RegistrationError: the kubelet refuses.
        """
        if self.socket.is_symlink():
            self._refuse_link()
            raise UnreachableError(f"the kubelet does not answer on {self.socket}: {_LINK}")
        request = wire.encode_register(API_VERSION, endpoint, resource, options)
        try:
            async with self._turns, self._connection() as channel:
                await channel.call(_REGISTER, request, wire.EmptyCall, _REGISTER_DEADLINE)
        except GRPCError as error:
            raise RegistrationError(f"the kubelet refused: {error.message or error.status.name}") from None
        except wire.SENSELESS as error:
            raise RegistrationError(f"the kubelet's answer makes no sense: {error}") from None
        except (OSError, StreamTerminatedError, ProtocolError, AttributeError) as error:  # grpclib's: lost when made
            self._note_silence(error)
            raise UnreachableError(f"the kubelet does not answer on {self.socket}: {words(error)}") from None
        self._silent_since, self.complaint = None, ""

    def _note_silence(self, error: Exception) -> None:
        """Report once, for all resources, that the kubelet does not answer."""
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since >= _WORTH_SAYING and not self.complaint:
            self.complaint = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else words(error)
            log.warning(
                "kubelet-silent", socket=str(self.socket), reason=self.complaint, then="trying again until it does"
            )

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Channel]:
        """One connection to this kubelet for all registrations under way; closed when the last is done."""
        channel = self._channel = self._channel or Channel(str(self.socket))
        self._users[channel] += 1
        try:
            yield channel
        finally:
            self._users[channel] -= 1
            if not self._users[channel]:
                del self._users[channel]
                channel.close()
                if self._channel is channel:
                    self._channel = None


class Registrar:
    """One resource's server and its registration."""

    def __init__(
        self,
        plugin: Plugin,
        kubelet: Kubelet,
        directory: Path,
        endpoint: str,
        counts: Counts | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        """Prepare.

        Args:
            plugin: the resource's service.
            kubelet: the one to register with.
            directory: the plugin directory.
            endpoint: our socket, relative to it.
            counts: has the registrations.
            predecessor: the agent that may be about to hand the resource over.
        """
        self.plugin = plugin
        self.registered = False
        """Registered, with an open stream."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `registered` changes."""
        self._counts = counts or Counts()
        self._kubelet = kubelet
        self._endpoint = endpoint
        self._server = SocketServer([plugin], directory / endpoint)
        self.complaint = ""
        """Why the last registration did not work, if it was this resource's own fault; empty once one did."""
        self.rival = ""
        """Which other plugin has registered the name since, if one has."""
        self._predecessor = predecessor
        self._attention = asyncio.Event()
        self._is_outdated = self._is_given = False
        self._refused = 0  # streams, before this registration
        plugin.on_call = self._attention.set

    def renew(self) -> None:
        """Register once more, as soon as no Allocate is under way.

        The kubelet reads the options only then, and takes back a resource that it has lost though the stream is open.
        """
        self._is_outdated = True
        self._attention.set()

    def give_up(self) -> None:
        """Register no more, and leave the open stream as it is: the resource is being handed over."""
        self._is_given = True

    async def answered(self, relayed: Callable[[], int]) -> None:
        """Wait until all Allocates are answered but those that were relayed to another agent."""
        await self._until_answered(lambda: self.plugin.allocating <= relayed())

    async def end_stream(self) -> None:
        """End the stream, and go on answering calls over its connection."""
        self.plugin.end_stream()
        if not await self._until(lambda: not self.plugin.streaming, _TRAILERS_WITHIN):
            self._server.reset_connections()  # a stream that ends later would make the kubelet drop the next one (A2)
            await self._until(lambda: not self.plugin.streaming, _TRAILERS_WITHIN)

    async def run(self) -> None:
        """Serve and stay registered until cancelled; then end the stream and remove the socket."""
        delay = _FIRST_DELAY
        try:
            while not self._is_given:
                generation, most = self._kubelet.generation, _REFUSED_DELAY
                try:
                    if not self._kubelet.generation:
                        await self._listen()  # while nobody waits for it
                        await self._kubelet.newer_than(0)
                    self._kubelet.look()  # before connecting, so that its create event is no news afterwards
                    generation = self._kubelet.generation
                    with self._kubelet.until_restart():
                        await self._register()
                        if await self._stay() >= _SETTLED_AFTER or self._is_outdated:
                            delay = _FIRST_DELAY
                except UnreachableError:
                    self._count("unreachable")
                    most = _UNREACHABLE_DELAY  # the kubelet's own complaint, said once for all resources
                except (RegistrationError, OSError) as error:
                    self._count("refused")
                    if (complaint := words(error)) != self.complaint:  # said once, not at every try
                        self.complaint = complaint
                        log.warning("not-registered", resource=self.plugin.resource, reason=complaint)
                delay = await self._wait_to_retry(min(delay, most), most, generation)
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                # a kubelet closes the connection when the stream ends, and an Allocate under way fails its pod for good
                await self._until_answered(lambda: not self.plugin.allocating, _ALLOCATE_PATIENCE)
                is_forgotten = self._is_given and not self.plugin.streaming  # the kubelet closes no such connection
                self.plugin.end_stream()
                if await self._until(lambda: not self.plugin.streaming, _STOP_PATIENCE) and not is_forgotten:
                    # a name that is back, or another agent, registers at once, and must not overtake this end (A2)
                    await self._server.wait_disconnected(_CLOSED_WITHIN)
                await self._server.shut_down(_STOP_PATIENCE)

    async def _stay(self) -> float:
        """Stay registered until the stream ends or the resource must be registered again; the seconds that took."""
        began = time.monotonic()
        self._set_registered(True)
        try:
            await self._until(lambda: not self.plugin.streaming or self._must_renew)
            await self._until_answered(lambda: not self.plugin.streaming or not self.plugin.allocating)
        finally:
            self._set_registered(False)
        if not self.plugin.streaming:
            log.info("stream-ended", resource=self.plugin.resource)
        elif not self._is_outdated:
            log.warning("stream-refused", resource=self.plugin.resource, reason=_TWICE, then="registering once more")
        return time.monotonic() - began

    @property
    def _must_renew(self) -> bool:
        """Have the options changed, or did the kubelet lose the client whose stream is open?

        It took up a registration that we had given up, perhaps of our last run: the stream that we then refuse makes it
        drop the resource, and the one that is open keeps us from noticing (kubelet contract: A2).
        """
        return self._is_outdated or self.plugin.refused > self._refused

    async def _listen(self) -> None:
        """Make the socket where there is none, or where somebody removed it."""
        if self._server.is_reachable():
            return
        await self._end_streams()
        await self._server.shut_down(_STOP_PATIENCE)
        ours = self._server.path.parent
        ours.mkdir(mode=0o750, exist_ok=True)
        if ours.is_symlink():
            raise OSError(errno.ELOOP, "It is a symbolic link", str(ours))
        await self._server.open()

    async def _register(self) -> None:
        await self._listen()
        await self._end_streams()
        if self._predecessor is not None and self._predecessor.gives:
            await self._take_from(self._predecessor)
        self.plugin.reopen()
        self._is_outdated, self._refused = False, self.plugin.refused
        before = self.plugin.streams
        await self._kubelet.register(self.plugin.resource, self._endpoint, self.plugin.options)
        if not await self._until(lambda: self.plugin.streams > before, _STREAM_WITHIN):
            raise RegistrationError(f"the kubelet accepted {self.plugin.resource} but opened no ListAndWatch")

    async def _take_from(self, predecessor: Predecessor) -> None:
        """Make the kubelet forget the client before us, and end that one's stream: nothing is disconnected then (A2).

        A registration whose options call fails does that, and leaves the endpoint as it is until the next one.
        """
        self.plugin.assume_told()
        self.plugin.is_detaching = True
        try:
            await self._kubelet.register(self.plugin.resource, self._endpoint, self.plugin.options)
        except UnreachableError:
            raise
        except RegistrationError:
            pass  # as is meant
        finally:
            self.plugin.is_detaching = False
        self._server.reset_connections()  # nobody uses them any more
        await predecessor.end(self.plugin.resource)

    async def _end_streams(self) -> None:
        """End the old stream and see the kubelet close its connection (A2)."""
        await self.end_stream()
        if not await self._server.wait_disconnected(_CLOSED_WITHIN):
            self._server.reset_connections()

    async def _until(self, reached: Callable[[], bool], within: float | None = None) -> bool:
        """Wait until `reached` is true, looking at each of the plugin's calls; False after so many seconds."""
        if reached():
            return True
        try:
            with anyio.fail_after(within):
                while not reached():
                    self._attention.clear()
                    await self._attention.wait()
        except TimeoutError:
            return reached()  # where this process stood still, both have come by now
        return True

    async def _until_answered(self, reached: Callable[[], bool], within: float | None = None) -> bool:
        """The same, also looking whenever an Allocate is answered."""
        self.plugin.awaited += 1
        try:
            return await self._until(reached, within)
        finally:
            self.plugin.awaited -= 1

    async def _wait_to_retry(self, delay: float, most: float, generation: int) -> float:
        """Wait for so long, or until a new kubelet starts; returns the next delay."""
        try:
            with anyio.fail_after(delay):
                await self._kubelet.newer_than(generation)
        except TimeoutError:
            return min(delay * 2, most)
        return _FIRST_DELAY

    def _set_registered(self, registered: bool) -> None:
        self.registered, self.rival = registered, ""
        if registered:
            self.complaint = ""
            self._count("registered")
            log.info("registered", resource=self.plugin.resource)
        self.on_change()

    def _count(self, result: str) -> None:
        self._counts.registrations[self.plugin.resource, result] += 1
