"""How plugins come to the simulated kubelet and go: its sockets, the Registration service, and the client dialled at each Register.

Kubelet contract: A1, A2, A6, A12. Every refusal of a Register is UNKNOWN with a text.

The clients follow the order of the kubelet's own steps, so the dangers in the kubelet contract come by themselves. Until 1.36 one
client is remembered for each resource name, and looked up again when *a* stream of that name ends (A2): an old stream's
end disconnects the new client; a failed registration makes the kubelet forget a client. From 1.37 on clients are known by
resource and socket path (A12): a registration that fails makes the kubelet forget those of its path.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import grpclib.const
from grpclib.const import Status
from grpclib.server import Stream

from agent.kubelet.api.v1beta1 import Empty, RegisterRequest, RegistrationBase
from agent.kubelet.server import SocketServer, refusal
from agent.simulation import checkpoint
from agent.simulation.clock import Background, Clock
from agent.simulation.device_manager import DeviceManager
from agent.simulation.model import Change, Feed, Kind, Version
from agent.simulation.plugin_client import Arrival, PluginClient, PluginError

if TYPE_CHECKING:
    from grpclib._typing import IServable

# --- the kubelet's sockets ---

_BACKLOG: Final = 128


async def at_once() -> None:
    """Listen in the next turn of the event loop."""
    await asyncio.sleep(0)


def wipe(directory: Path, version: Version) -> None:
    """Remove what a starting kubelet of that version removes from its plugin directory."""
    for path in directory.iterdir():
        spared = path.is_dir() or path.name == checkpoint.NAME
        if not spared if version == "1.32" else path.is_socket():
            path.unlink()


class KubeletSocket(SocketServer):
    """A server whose socket can be seen before it listens, and stays behind when the kubelet ends."""

    def __init__(
        self, handlers: Collection[IServable], path: Path, before_listening: Callable[[], Awaitable[None]] = at_once
    ) -> None:
        super().__init__(handlers, path)
        self._before_listening = before_listening

    async def open(self) -> None:
        """Bind in place, wait, and listen: in between, connecting is refused.

        Raises:
            OSError: the directory is missing or not writable, or the path is longer than 107 bytes.
        """
        self.path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.bind(str(self.path))
            await self._before_listening()
            sock.listen(_BACKLOG)
            await self.start(sock=sock)
        except BaseException:
            sock.close()
            raise

    def is_reachable(self) -> bool:
        """Always False: the socket is never ours to remove, for a kubelet's stays behind when it ends."""
        return False


# --- Register ---

API_VERSION: Final = "v1beta1"
_REGISTER: Final = "/v1beta1.Registration/Register"
_QUOTA_PREFIX: Final = "requests."  # a name must also be valid with this before it
_DOMAIN_LIMIT: Final = 253
_NAME_LIMIT: Final = 63
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")


def join(directory: Path, endpoint: str) -> Path:
    """The endpoint's path as Go joins it: an absolute one lands below the directory, an empty one on it (A1)."""
    return Path(os.path.normpath(f"{directory}/{endpoint}"))


def is_extended_resource(name: str) -> bool:
    """Whether the kubelet accepts a device plugin for this name (kubelet contract: A1).

    The agent has a check of its own: each is evidence for the other.
    """
    if "kubernetes.io/" in name or name.startswith(_QUOTA_PREFIX) or name.count("/") != 1:
        return False
    domain, local = (_QUOTA_PREFIX + name).split("/")
    return (
        len(domain) <= _DOMAIN_LIMIT
        and _DOMAIN.fullmatch(domain) is not None
        and len(local) <= _NAME_LIMIT
        and _NAME.fullmatch(local) is not None
    )


Gate = Callable[[RegisterRequest, float | None], Awaitable[None]]
"""Is awaited before a Register is looked at, with the seconds that its caller waits at most; a PluginError refuses it."""


async def open_gate(_request: RegisterRequest, _deadline: float | None) -> None:
    """Let every Register in."""


class Registration(RegistrationBase):
    """Answers a Register when the plugin has been dialled and its stream started."""

    def __init__(
        self,
        directory: Path,
        clients: Clients,
        background: Background,
        feed: Feed,
        version: Version,
        gate: Gate = open_gate,
    ) -> None:
        self._directory = directory
        self._clients = clients
        self._background = background
        self._feed = feed
        self._version = version
        self._gate = gate

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        """As generated, but with the caller's deadline."""
        mapping: dict[str, grpclib.const.Handler] = super().__mapping__()
        return mapping | {_REGISTER: mapping[_REGISTER]._replace(func=self._answer)}

    async def _answer(self, stream: Stream[RegisterRequest, Empty]) -> None:
        request = await stream.recv_message()
        if request is not None:
            deadline = stream.deadline.time_remaining() if stream.deadline else None
            await stream.send_message(await self.register(request, deadline))

    async def register(self, register_request: RegisterRequest, deadline: float | None = None) -> Empty:
        """Dial back, then answer.

        Raises:
            GRPCError: the kubelet refuses.
        """
        try:
            await self._gate(register_request, deadline)
            await self._register(register_request)
        except PluginError as error:
            self._feed.publish(Change(Kind.REFUSED, register_request.resource_name, str(error)))
            raise refusal(Status.UNKNOWN, str(error)) from None
        self._feed.publish(Change(Kind.REGISTERED, register_request.resource_name))
        return Empty()

    async def _register(self, request: RegisterRequest) -> None:
        if request.version != API_VERSION:
            raise PluginError(
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{API_VERSION}"]'
            )
        if not is_extended_resource(request.resource_name):
            raise PluginError(f'the ResourceName "{request.resource_name}" is invalid')
        path = join(self._directory, request.endpoint)
        if self._version != "1.32":
            # grpclib cancels this handler at the caller's deadline, and the dial-back with it (A1).
            await self._clients.connect(request.resource_name, path)
            return
        await self._detached(request.resource_name, path)

    async def _detached(self, resource: str, path: Path) -> None:
        """Dial back whether or not the caller still waits, as kubelets before 1.36 do."""
        outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        async def connect() -> None:
            try:
                await self._clients.connect(resource, path)
                error = None
            except PluginError as failure:
                error = str(failure)
            if not outcome.done():
                outcome.set_result(error)

        self._background.spawn(connect())
        if (error := await outcome) is not None:
            raise PluginError(error)


# --- the clients of plugins ---

Handler = Literal["all", "first", "dedup"]
"""What a kubelet of 1.37 does with a Register at a path that has a client (kubelet contract: A12). Copies of its sources differ:

`all` refuses it and forgets all clients of the path, `first` refuses it and forgets the first of them, `dedup` answers that
all is well and does nothing.
"""


class Clients:
    """Dials plugins, watches their streams, closes connections."""

    def __init__(
        self,
        manager: DeviceManager,
        background: Background,
        clock: Clock,
        disconnect_delay: float,
        version: Version,
        handler: Handler,
        before_list: Callable[[], Awaitable[None]],
    ) -> None:
        self._manager = manager
        self._background = background
        self._clock = clock
        self._delay = disconnect_delay
        self._goes_by_path = version == "1.37"
        self._handler = handler
        self._before_list = before_list
        self._remembered: dict[str, list[PluginClient]] = {}
        self._made: set[PluginClient] = set()
        self._connecting: Counter[str] = Counter()
        self._ends: dict[str, list[asyncio.TimerHandle]] = {}
        self._stopped = False
        self.streams: Counter[str] = Counter()

    async def connect(self, resource: str, path: Path) -> None:
        """What the kubelet does before it answers a Register (kubelet contract: A1).

        Raises:
            PluginError: the plugin cannot be reached, its options call failed, or its path is connected.
        """
        client = PluginClient(resource, path, self._clock)
        if self._goes_by_path and self._handler == "dedup" and self._first_like(client) is not None:
            return
        self._made.add(client)
        self._remember(client)
        if not self._goes_by_path:
            self._overtake(resource)
        self._connecting[resource] += 1
        try:
            await client.dial()
            if self._stopped:  # while it dialled: `stop` found no connection to close
                client.abort()
            self._manager.connected(client, await client.options())
        except BaseException:
            self._forget(client)  # an older one that is like it included; the connection is not closed (A2, A12)
            raise
        finally:
            self._connecting[resource] -= 1
        opened = asyncio.Event()
        self._background.spawn(self._watch(client, opened.set))
        await opened.wait()

    async def _watch(self, client: PluginClient, opened: Callable[[], None]) -> None:
        resource = client.resource
        was_open = False

        def on_open() -> None:
            nonlocal was_open
            was_open = True
            self.streams[resource] += 1
            self._manager.stream_opened(resource)
            opened()

        async def received(arrival: Arrival) -> None:
            await self._before_list()
            await self._manager.received(resource, arrival)

        try:
            reason = await client.watch(on_open, received)
        finally:
            self.streams[resource] -= was_open
            opened()
        if not self._stopped:  # grpclib may turn our task's cancellation into the stream's end
            self._manager.stream_ended(resource, reason)
            self._end_soon(client)

    def _remember(self, client: PluginClient) -> None:
        known = self._remembered.setdefault(client.resource, [])
        if not self._goes_by_path:
            known.clear()
        known.append(client)

    def _forget(self, client: PluginClient) -> None:
        known = self._remembered.get(client.resource, [])
        like = [one for one in known if self._is_like(one, client)]
        for one in like[:1] if self._handler == "first" else like:
            known.remove(one)

    def _first_like(self, client: PluginClient) -> PluginClient | None:
        """The client that the kubelet takes for this one."""
        return next((one for one in self._remembered.get(client.resource, ()) if self._is_like(one, client)), None)

    def _is_like(self, one: PluginClient, other: PluginClient) -> bool:
        return not self._goes_by_path or one.path == other.path

    def _end_soon(self, client: PluginClient) -> None:
        if self._connecting[client.resource] and not self._goes_by_path:
            self._end(client)  # a Register is under way: it has overtaken us
            return
        timer = asyncio.get_running_loop().call_later(self._delay, self._end_first, client)
        self._ends.setdefault(client.resource, []).append(timer)

    def _end_first(self, client: PluginClient) -> None:
        self._ends[client.resource].pop(0)
        self._end(client)

    def _overtake(self, resource: str) -> None:
        """A Register came before an ended stream was dealt with.

        The end is dealt with now, at the worst moment: it disconnects the new client, which has no connection
        yet and goes on to make one, is forgotten, and will not be missed when it dies (A2).
        """
        for timer in self._ends.pop(resource, ()):
            timer.cancel()
            if known := self._remembered[resource]:
                self._end(known[0])

    def _end(self, ended: PluginClient) -> None:
        client = self._first_like(ended)
        if client is None:
            return  # forgotten: its end changes nothing (A2, A12)
        self._forget(client)
        client.close()
        self._manager.disconnected(client)

    def stand_still(self) -> None:
        """Act on nothing more, with every connection open."""
        self._stopped = True
        for timer in (timer for timers in self._ends.values() for timer in timers):
            timer.cancel()

    def stop(self, *, kill: bool) -> None:
        """Close every connection, as the end of the process does."""
        self.stand_still()
        for client in self._made:
            client.abort() if kill else client.close()
