"""Keeps one resource registered with the kubelet, for ever: register, end the stream before, notice, register again.

A kubelet of 1.37 or later knows a plugin by its resource *and* socket path, and a second registration at a path makes it lose
the plugin, for ever even; plugins at two paths live side by side, and when one ends the other has all (kubelet contract:
A12). So each registration has a path of its own, and the stream before ends after it: at no moment has the kubelet no devices.

A kubelet until 1.36 knows a plugin by its resource alone, and the end of *any* stream makes it drop the client that came last
(A2). What that takes stands below "until 1.36", and goes when 1.36 is no longer supported.
"""

from __future__ import annotations

import asyncio
import errno
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import anyio
import structlog
from grpclib.const import Cardinality, Handler, Status

from agent.kubelet import wire
from agent.kubelet.handover_socket import End, Predecessor
from agent.kubelet.kubelet_socket import Kubelet, RegistrationError, UnreachableError
from agent.kubelet.plugin import Plugin
from agent.kubelet.server import SocketServer, refusal
from agent.runtime import limits
from agent.runtime.counts import Counts
from agent.runtime.errors import words
from agent.runtime.pacing import Backoff, Doorbell
from agent.runtime.problems import Problems

if TYPE_CHECKING:
    from grpclib.server import Stream

    from agent.kubelet.server import Connection

_STREAM_WITHIN: Final = (
    5.0  # seconds after which a registration without a stream, or a stream without a list, did not work (A2)
)
_TRAILERS_WITHIN: Final = 1.0  # seconds for an ended stream's trailers to leave; then its connection is reset
_CLOSED_WITHIN: Final = 0.5  # seconds; a kubelet that has not closed by then has forgotten us (A2)
_KEPT_AFTER: Final = (
    1.0  # seconds; one of 1.37 closes within 23 ms (A12), and one until 1.36 that has forgotten us never
)
_SEEN_BY_KUBELET: Final = 0.2  # seconds that a kubelet takes to see a stream's end, which nothing shows (A2)
_UNANSWERED_AT_MOST: Final = 4  # sockets of registrations that were given up, and may be taken up yet
_ALLOCATE_PATIENCE: Final = 0.5  # seconds for Allocates under way when we stop, before their stream ends
_LINGER: Final = 0.3  # seconds for calls that the kubelet sent us before it knew of a later registration
_STOP_PATIENCE: Final = 0.7  # seconds for running calls when we stop
_FIRST_DELAY: Final = 0.001  # seconds before the second try: a new socket may not listen yet for 3 ms (A6); doubling
_UNREACHABLE_DELAY: Final = 1.0  # seconds, at most, while no kubelet listens
_REFUSED_DELAY: Final = 5.0  # seconds, at most, while it refuses or drops us: no event tells when it is well
_SETTLED_AFTER: Final = 5.0  # seconds after which a registration counts as one that works
_TWICE: Final = "the kubelet asked for a second stream, and forgets the first as that is refused"

log = structlog.get_logger()


class _Socket(SocketServer):
    """Where a resource is served for one registration."""

    def __init__(self, plugin: Plugin, directory: Path, endpoint: str = "") -> None:
        """`endpoint` is its path in the plugin directory; by default one that was never used (A12)."""
        self._plugin = plugin
        self.endpoint = endpoint or limits.endpoint(directory, plugin.resource)
        self.used_in = 0
        """The kubelet's generation in which it was registered; 0: not yet."""
        self.is_answered = False
        """The kubelet answered that registration, so that it takes it up no more."""
        self.is_superseded = False
        """Another one is registered, and a stream that comes here now is refused."""
        self.is_left = False
        """The last connection was closed."""
        super().__init__([self], directory / self.endpoint, directly=True)

    def __mapping__(self) -> dict[str, Handler]:
        """The plugin's handlers."""
        watch = wire.PLUGIN_SERVICE + "ListAndWatch"
        handlers = self._plugin.__mapping__()
        return handlers | {watch: handlers[watch]._replace(func=self._list_and_watch)}

    def disconnected(self, connection: Connection) -> None:
        """Also tell the registrar, which may wait for a stream that comes no more."""
        super().disconnected(connection)
        self.is_left = not self._connections
        self._plugin.on_call()

    async def _list_and_watch(self, stream: Stream[wire.Encoded, wire.DeviceList]) -> None:
        await self._plugin.list_and_watch(stream, is_late=self.is_superseded)


class Registrar:
    """One resource's servers and its registration."""

    def __init__(
        self,
        plugin: Plugin,
        kubelet: Kubelet,
        directory: Path,
        counts: Counts | None = None,
        predecessor: Predecessor | None = None,
    ) -> None:
        """Prepare.

        Args:
            plugin: the resource's service.
            kubelet: the one to register with.
            directory: the plugin directory.
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
        self._directory = directory
        self._server = _Socket(self.plugin, self._directory)
        self._serving = self._server  # where the stream was opened last
        self._earlier: list[_Socket] = []  # of earlier registrations
        self._unregistered = Problems().trouble(
            "", f"{plugin.resource} is not registered", "not-registered", resource=plugin.resource
        )
        self.rival = ""
        """Which other plugin has registered the name since, if one has."""
        self._predecessor = predecessor
        self._attention = Doorbell()
        self._is_outdated = self._is_given = False
        self._attempt = anyio.CancelScope()
        self._refused = 0  # streams, before this registration
        plugin.on_call = self._attention.set

    @property
    def complaint(self) -> str:
        """Why the last registration did not work, if it was this resource's own fault; empty once one did."""
        return self._unregistered.reason

    def renew(self) -> None:
        """Register once more, as soon as no Allocate is under way.

        The kubelet reads the options only then, and takes back a resource that it has lost though the stream is open.
        """
        self._is_outdated = True
        self._attention.set()

    def give_up(self) -> None:
        """Register no more, and leave the open stream as it is: the resource is being handed over."""
        self._is_given = True
        self._attempt.cancel()

    def take_back(self) -> None:
        """Register again, whatever became of the stream: the agent that the resource was handed to is lost."""
        if self._is_given:
            self._is_given = False
            self.renew()

    async def answered(self, relayed: Callable[[], int]) -> None:
        """Wait until all Allocates are answered but those that were relayed to another agent."""
        await self._until_answered(lambda: self.plugin.allocating <= relayed())

    async def end_stream(self) -> bool:
        """End each stream, and go on answering calls over their connections; False where a client does not even read."""
        self.plugin.end_stream()
        return await self._ended((*self._earlier, self._server), lambda: not self._is_streaming)

    async def retire(self) -> End:
        """End the stream, now that the agent after us has registered; not before the disk lets us."""
        while self.plugin.streaming:
            try:
                return await self._end_after_another(self.end_stream, self._serving)
            except OSError as error:
                self._unregistered.report_once(words(error))
                await asyncio.sleep(_UNREACHABLE_DELAY)
        return End.CLOSED

    async def run(self) -> None:
        """Serve and stay registered until cancelled; then end the stream and remove the socket."""
        backoff = Backoff(_FIRST_DELAY)
        try:
            while True:
                if self._is_given:
                    await self._attention.until(lambda: not self._is_given)
                    backoff.reset()
                generation, most = self._kubelet.generation, _REFUSED_DELAY
                try:
                    if not self._kubelet.generation:
                        await self._listen()  # while no registration waits for it
                        await self._kubelet.newer_than(0)
                    self._kubelet.look()  # before connecting, so that its create event is no news afterwards
                    generation = self._kubelet.generation
                    with self._kubelet.until_restart():
                        with anyio.CancelScope() as self._attempt:
                            await self._register()
                        if self._attempt.cancelled_caught or self._is_outdated:
                            continue
                        if await self._stay() >= _SETTLED_AFTER or self._is_outdated:
                            backoff.reset()
                except UnreachableError:
                    self._count("unreachable")
                    most = _UNREACHABLE_DELAY  # the kubelet's own complaint, said once for all resources
                except (RegistrationError, OSError) as error:
                    self._count("refused")
                    if isinstance(error, OSError):
                        most = _UNREACHABLE_DELAY  # of a full disk, say: no event tells of room
                    self._unregistered.report_once(words(error))
                await self._close_earlier()
                if await self._wait_to_retry(backoff.next(most), generation):
                    backoff.reset()
        finally:
            with anyio.CancelScope(shield=True):
                # a kubelet closes the connection when the stream ends, and an Allocate under way fails its pod for good
                await self._until_answered(lambda: not self.plugin.allocating, _ALLOCATE_PATIENCE)
                is_forgotten = self._is_given and not self.plugin.streaming  # the kubelet closes no such connection
                self.plugin.end_stream()
                if await self._attention.until(lambda: not self._is_streaming, _STOP_PATIENCE) and not is_forgotten:
                    # a name that is back, or another agent, registers at once, and must not overtake this end (A2)
                    await self._serving.wait_disconnected(_CLOSED_WITHIN)
                for server in (*self._earlier, self._server):
                    await server.shut_down(_STOP_PATIENCE)

    async def _stay(self) -> float:
        """Stay registered until the stream ends or the resource must be registered again; the seconds that took."""
        began = time.monotonic()
        self._set_registered(True)
        try:
            if self._earlier:
                await self._attention.until(lambda: not self.plugin.streaming or self._must_renew, _LINGER)
            await self._close_earlier()
            await self._attention.until(lambda: not self.plugin.streaming or self._must_renew)
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
        """Whether the options have changed, or the kubelet lost the client whose stream is open.

        It took up a registration that we had given up: the stream that we then refuse makes it drop the resource, and the one
        that is open keeps us from noticing (kubelet contract: A2).
        """
        return self._is_outdated or self.plugin.refused > self._refused

    @property
    def _is_streaming(self) -> bool:
        return self.plugin.streaming or bool(self.plugin.earlier_streams)

    # --- one registration ---

    async def _register(self) -> None:
        """Register at a path of its own; then end the stream before, ours or that of the agent before us."""
        if not (streamed := self._is_streaming):
            await self._see_end_seen()
        await self._listen()
        predecessor = self._predecessor if self._predecessor is not None and self._predecessor.gives else None
        if predecessor is not None:
            self.plugin.assume_told()
        before, ends = self._serving, set[End]()
        await self._announce()
        if self.plugin.earlier_streams or predecessor is not None:
            await self._see_listed()
        # a kubelet that ended took its streams along, though this loop may have seen its successor's socket first
        if streamed and (self.plugin.earlier_streams or before.used_in == self._kubelet.generation):
            ends.add(await self._end_after_another(self._end_earlier, before))
        if predecessor is not None:
            if predecessor.has_fixed_paths:
                await self._serve_at_fixed_path()
            ends.add(await predecessor.end(self.plugin.resource, self._server.endpoint))
            self._predecessor = None
        if End.UNKNOWN in ends:  # the kubelet may have forgotten our client: register after this one, as ever
            await asyncio.sleep(_SEEN_BY_KUBELET)
            self._is_outdated = True
        elif End.KEPT in ends:
            await self._register_alone()

    async def _listen(self) -> None:
        """Make a socket at a path that was never used, unless there is one (A12)."""
        if self._server.is_reachable() and not self._server.used_in:
            return
        self._server.is_superseded = True
        self._earlier.append(self._server)
        self._server = _Socket(self.plugin, self._directory)
        ours = self._server.path.parent
        ours.mkdir(mode=0o750, exist_ok=True)
        if ours.is_symlink():
            raise OSError(errno.ELOOP, "It is a symbolic link", str(ours))
        await self._open(self._server)

    async def _open(self, server: SocketServer) -> None:
        try:
            await server.open()
        except OSError as error:
            error.filename = str(server.path.parent)  # the socket has another name each time
            raise

    async def _announce(self) -> None:
        """Register our socket, and see the kubelet open the stream."""
        server, plugin = self._server, self.plugin
        plugin.reopen()
        self._is_outdated, self._refused = False, plugin.refused
        before = plugin.streams
        server.used_in = self._kubelet.generation
        try:
            await self._kubelet.register(plugin.resource, self._server.endpoint, plugin.options)
        except UnreachableError as error:
            if error.is_unasked:
                server.used_in = 0
            raise
        except RegistrationError:
            server.is_answered = True
            raise
        server.is_answered = True
        # a connection that the kubelet has closed meanwhile (A2) brings no stream
        await self._attention.until(lambda: plugin.streams > before or server.is_left, _STREAM_WITHIN)
        if plugin.streams <= before:
            raise RegistrationError(f"the kubelet accepted {plugin.resource} but opened no ListAndWatch")
        self._serving = server

    async def _see_listed(self) -> None:
        """Send the first list: the stream before, which has one, is ended only then."""
        await self._until_answered(lambda: self.plugin.began > 0 or not self.plugin.streaming, _STREAM_WITHIN)
        if not self.plugin.streaming:
            raise RegistrationError(f"the kubelet ended the stream of {self.plugin.resource} before its first list")

    async def _end_after_another(self, end: Callable[[], Awaitable[bool]], server: _Socket) -> End:
        """End the stream at this socket, after another was registered."""
        # a kubelet closes the connection when the stream ends, and an Allocate under way fails its pod for good
        await self._until_answered(lambda: not self.plugin.allocating)
        await self._detach()
        if not await end():
            return End.UNKNOWN
        await server.wait_read(_STREAM_WITHIN)  # a busy one closes later, and has not kept it
        return End.CLOSED if await server.wait_disconnected(_KEPT_AFTER) else End.KEPT

    async def _end_earlier(self) -> bool:
        """End each stream but the last, and go on answering calls over their connections; as `_ended`.

        Also False where they ended by themselves while we registered, as that end may have cost the new client (A2).
        """
        if not self.plugin.earlier_streams:
            return False
        self.plugin.end_earlier_streams()
        return await self._ended(self._earlier, lambda: not self.plugin.earlier_streams)

    async def _ended(self, servers: Iterable[_Socket], reached: Callable[[], bool]) -> bool:
        """Wait until streams have ended; False where we had to break their connections, as the client does not read."""
        if await self._attention.until(reached, _TRAILERS_WITHIN):
            return True
        for server in servers:
            server.reset_connections()  # a stream that ends later would make the kubelet drop the next one (A2)
        await self._attention.until(reached, _TRAILERS_WITHIN)
        return False

    async def _close_earlier(self) -> None:
        """Close the sockets of earlier registrations.

        Some of a kubelet that gave no answer are left open: it stood still and may take the registration up yet, which makes
        it lose the one after (A2). The stream that we refuse then tells us.
        """
        if self.plugin.earlier_streams:
            return
        generation = self._kubelet.generation
        unanswered = [it for it in self._earlier if it.used_in and it.used_in == generation and not it.is_answered]
        left = {self._serving, *unanswered[-_UNANSWERED_AT_MOST:]}
        for server in [it for it in self._earlier if it not in left]:
            self._earlier.remove(server)
            await server.shut_down(_STOP_PATIENCE)

    # --- what kubelets until 1.36 need, and nothing else does (A2) ---

    async def _see_end_seen(self) -> None:
        """Where a stream ended, see the kubelet close its connection: a registration before would lose the new client."""
        for server in (*self._earlier, self._server):
            if not await server.wait_disconnected(_CLOSED_WITHIN):
                server.reset_connections()

    async def _detach(self) -> None:
        """Make the kubelet forget our client, but neither its endpoint nor its streams: a stream's end costs nothing then.

        A registration whose options call fails does that, at whatever path; from 1.37 on it does nothing at a path of its own.
        """
        endpoint = limits.endpoint(self._directory, self.plugin.resource)
        server = SocketServer([_Refusing(self.plugin.resource)], self._directory / endpoint)
        await self._open(server)
        try:
            await self._kubelet.register(self.plugin.resource, endpoint, self.plugin.options)
        except RegistrationError:
            pass  # as is meant; where none listens, nothing has a client any more
        finally:
            server.reset_connections()
            await server.shut_down(_STOP_PATIENCE)

    async def _register_alone(self) -> None:
        """End our stream, which the kubelet does not miss, and register for good: it knows no client by now.

        It must have dealt with that end before. Nothing shows that; but where the machine is busy it may not even have read it.
        """
        await self.end_stream()
        await self._server.wait_read(_STREAM_WITHIN)
        await asyncio.sleep(_SEEN_BY_KUBELET)
        await self._listen()
        await self._announce()

    # --- what agents need that register at fixed paths (`agent.kubelet.handover_socket`) ---

    async def _serve_at_fixed_path(self) -> None:
        """Serve what the agent before us passes on, and make the kubelet forget its client, as it leaves that to us."""
        endpoint = limits.endpoint(self._directory, self.plugin.resource, fixed=True)
        server = _Socket(self.plugin, self._directory, endpoint)
        server.used_in, server.is_superseded = self._kubelet.generation, True
        await self._open(server)
        self._earlier.append(server)
        await self._detach()

    # --- waiting ---

    async def _until_answered(self, reached: Callable[[], bool], at_most: float = math.inf) -> bool:
        """`_attention.until`, looking also whenever an Allocate is answered, or a stream's first list is sent."""
        self.plugin.awaited += 1
        try:
            return await self._attention.until(reached, at_most)
        finally:
            self.plugin.awaited -= 1

    async def _wait_to_retry(self, delay: float, generation: int) -> bool:
        """Wait for so long, or until a new kubelet starts; returns whether one has started."""
        with anyio.move_on_after(delay):
            await self._kubelet.newer_than(generation)
            return True
        return False

    def _set_registered(self, registered: bool) -> None:
        self.registered, self.rival = registered, ""
        if registered:
            self._unregistered.healed()
            self._count("registered")
            log.info("registered", resource=self.plugin.resource)
        self.on_change()

    def _count(self, result: str) -> None:
        self._counts.registrations[self.plugin.resource, result] += 1


class _Refusing:
    """A plugin whose options call fails."""

    def __init__(self, resource: str) -> None:
        self._resource = resource

    def __mapping__(self) -> dict[str, Handler]:
        handler = Handler(self._options, Cardinality.UNARY_UNARY, wire.EmptyCall, wire.Encoded)
        return {wire.PLUGIN_SERVICE + "GetDevicePluginOptions": handler}

    async def _options(self, stream: Stream[wire.EmptyCall, wire.Encoded]) -> None:
        await stream.recv_message()
        raise refusal(
            Status.UNAVAILABLE, f"{self._resource} is about to be served by another registration of Fairlead's"
        )
