"""Drives a plugin beside the simulated kubelet, and notes all that both do; scenarios are written with it.

It waits for events, `patience` seconds at most. How long it watches for what must not come is `quiet`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import anyio
from grpclib.client import Channel
from msgspec import Struct, field
from msgspec.structs import replace

from agent.kubelet.api.v1beta1 import (
    Device,
    DevicePluginBase,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    RegisterRequest,
    RegistrationStub,
)
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import HEALTHY, Codec
from agent.simulation.clock import Background, Clock
from agent.simulation.conformance.process import Plugin
from agent.simulation.conformance.timeline import Asked, Called, Did, Ended, Event, Skipped, Timeline
from agent.simulation.device_manager import KubeletPanicError
from agent.simulation.kubelet import Kubelet, unhindered
from agent.simulation.model import Change, Container, Kind, Pod, PodStatus, Version
from agent.simulation.plugin_client import PluginClient, PluginError
from agent.simulation.pod_workers import KubeletStoppedError
from agent.simulation.registration import join

_RESPAWN: Final = (
    1.0  # seconds until a container that ended is started again: the first back-off of a kubelet is shorter
)
_RIVAL: Final = "rival-"
_SETTLES: Final = 10  # looks whether more resources come
PRE_START: Final = "pre_start_required"
PREFERRED: Final = "get_preferred_allocation_available"


class Terms(Struct):
    """How plugins are tried: the same for all scenarios of one run.

    Args:
        launch: makes a process of the plugin, not started, which sees this directory as the kubelet's root.
        root: the kubelet's root; its directory `device-plugins` is emptied after each scenario.
        version: the kubelet.
        patience: seconds for what must come.
        quiet: seconds to watch for what must not come.
        rounds: restarts of the kubelet in the scenario of many restarts.
        hooks: `unplug` and `plug`, which take a device away and give it back.
        state: directories where the plugin keeps what it remembers; they are emptied before each scenario, whose pods are others.
        respawn: start the plugin again when it ends by itself, as a DaemonSet does.
        known: the resources that the plugin has; the first scenario that starts it finds them.
        is_tried: whether a scenario has started the plugin.
        heading: is told which scenario a process is started for, before it is.
    """

    launch: Callable[[Path], Plugin]
    root: Path
    version: Version = "1.36"
    patience: float = 20.0
    quiet: float = 0.5
    rounds: int = 200
    hooks: Mapping[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    state: tuple[Path, ...] = ()
    respawn: bool = False
    known: set[str] = field(default_factory=set)
    is_tried: bool = False
    heading: Callable[[str], None] = lambda _: None


class Stage:
    """One scenario's kubelet and plugins; a context that ends all of them."""

    def __init__(self, terms: Terms, title: str) -> None:
        self.terms = terms
        self._title = title
        self.kubelet = Kubelet(terms.root, version=terms.version)
        self.kubelet.gate = self._note_register
        self.plugin: Plugin
        self.before_register: Callable[[], Awaitable[None]] = unhindered
        """Is awaited before each Register is looked at; a PluginError refuses it."""
        self._events: list[Event] = []
        self._changed = asyncio.Event()
        self._listed: set[str] = set()  # resources whose open stream has brought a list
        self._endpoints: dict[str, str] = {}
        self._told: set[Plugin] = set()  # those that were told to end
        self._pods = itertools.count()
        self._subject = ""
        self._background = Background()
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self.kubelet.plugin_dir.mkdir(parents=True, exist_ok=True)
        for directory in self.terms.state:
            _empty(directory)
        self._stack.push_async_callback(self._background.stop)
        self._stack.push_async_callback(self.kubelet.stop)
        self.kubelet.subscribe(self._note_change)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self._stack.aclose()
            _empty(self.kubelet.plugin_dir)

    # --- the record ---

    def timeline(self) -> Timeline:
        """What has happened so far."""
        return Timeline(tuple(self._events), self.subject)

    def note(self, event: Event) -> None:
        """Put an event on record."""
        self._events.append(event)
        self._changed.set()

    def did(self, what: str, text: str = "") -> None:
        """Put on record what the suite does now."""
        self.note(Did(_now(), what, text))

    def _note_change(self, change: Change) -> None:
        if change.kind is Kind.LIST:
            self._listed.add(change.resource)
        elif change.kind is Kind.STREAM_OPENED:
            self._listed.discard(change.resource)
        if change.kind is not Kind.CHECKPOINT:
            self.note(replace(change, at=_now()))

    async def _note_register(self, request: RegisterRequest, deadline: float | None) -> None:
        if request.endpoint.startswith(_RIVAL):
            return
        path = join(self.kubelet.plugin_dir, request.endpoint)
        asked = Asked(
            _now(),
            request.resource_name,
            request.version,
            request.endpoint,
            deadline,
            _flags(request.options),
            _unreachable(path),
        )
        self._endpoints[request.resource_name] = request.endpoint
        self.note(asked)
        await self.before_register()

    @property
    def subject(self) -> str:
        """The resource that pods ask for: the one with most devices, of several the first."""
        if self._subject:
            return self._subject
        views = self.kubelet.resources.values()
        best = min(views, key=lambda view: (-view.allocatable, -view.capacity, view.name), default=None)
        return best.name if best else ""

    # --- the plugin ---

    async def launch(self) -> Plugin:
        """Start an instance of the plugin.

        Raises:
            OSError: it cannot be started.
        """
        self.terms.is_tried = True
        self.terms.heading(self._title)
        plugin = self.terms.launch(self.terms.root)
        await plugin.start()
        self._stack.push_async_callback(self._close, plugin)
        self._background.spawn(self._watch(plugin))
        return plugin

    async def _close(self, plugin: Plugin) -> None:
        self._told.add(plugin)
        await plugin.close()

    async def _watch(self, plugin: Plugin) -> None:
        code = await plugin.ended()
        asked = plugin in self._told
        self.note(Ended(_now(), code, asked, plugin.last_words()))
        if not asked and self.terms.respawn:
            await anyio.sleep(_RESPAWN)
            again = await self.launch()
            if self.plugin is plugin:
                self.plugin = again

    def tell(self, plugin: Plugin, number: int) -> None:
        """Send a signal that ends it."""
        self.did(signal.Signals(number).name)
        self._told.add(plugin)
        plugin.signal(number)

    async def ended(self, plugin: Plugin, seconds: float) -> bool:
        """Wait until it has ended; False if it does not within these seconds."""
        with anyio.move_on_after(seconds):
            await plugin.ended()
            return True
        return False

    def use(self, label: str) -> None:
        """Put on record what the plugin's process has used so far."""
        used = self.plugin.usage(label, _now())
        if used is not None:
            self.note(used)

    # --- waiting ---

    async def until(self, holds: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until it holds; false if it does not in time, or if the plugin has ended by itself and stays away."""
        with anyio.move_on_after(self.terms.patience if seconds is None else seconds):
            while not holds():
                if not self.terms.respawn and any(isinstance(it, Ended) and not it.asked for it in self._events):
                    return False
                self._changed.clear()
                await self._changed.wait()
            return True
        return holds()

    async def rest(self, times: float = 1.0) -> None:
        """Watch for what must not come."""
        await anyio.sleep(self.terms.quiet * times)

    def missing(self) -> str:
        """Which resource the kubelet has no stream of, or no list on it."""
        resources = sorted(self.terms.known) or self.timeline().resources
        without = [name for name in resources if not self.kubelet.streams(name)]
        if without or not resources:
            return f"{', '.join(without) or 'nothing'} was not registered"
        return f"{', '.join(name for name in resources if name not in self._listed)} was registered, and no list came"

    async def offered(self, seconds: float | None = None) -> bool:
        """Wait until the kubelet has a stream of each resource, and has taken in a list; False if not in time."""
        if known := self.terms.known:
            return await self.until(
                lambda: all(self.kubelet.streams(it) and it in self._listed for it in known), seconds
            )
        if not await self.until(lambda: bool(self._listed), seconds):
            return False
        for _ in range(_SETTLES):
            before = len(self._events)
            await self.rest()
            if before == len(self._events):
                break
        self.terms.known |= self._listed
        return True

    async def begin(self) -> None:
        """Start the kubelet and the plugin, and wait until there are devices.

        Raises:
            Skipped: none came.
        """
        await self.kubelet.start()
        self.plugin = await self.launch()
        if not await self.offered():
            why = self.timeline().ended() or f"it had {self.terms.patience:g} s"
            see = "list-arrives" if self.timeline().of(Asked) else "registration-arrives"
            raise Skipped(f"the plugin offered nothing: {why}" + (f": see {see}" if not self.terms.known else ""))
        if not await self.until(lambda: bool(self.healthy())):
            raise Skipped("the plugin lists no healthy device; give it one, real or made up")
        self._subject = self.subject

    # --- devices ---

    def healthy(self) -> tuple[str, ...]:
        """The devices of the subject that the kubelet could give."""
        view = self.kubelet.resources.get(self.subject)
        return tuple(sorted(view.healthy)) if view else ()

    def need_hooks(self) -> None:
        """Raise Skipped where devices cannot go and come."""
        for name in ("unplug", "plug"):
            if name not in self.terms.hooks:
                raise Skipped(f"it takes a device that goes and comes: give --on {name} COMMAND")

    async def hook(self, name: str) -> None:
        """Have a person's command, which `need_hooks` has seen, take a device away or give it back."""
        self.did(name)
        await self.terms.hooks[name]()

    async def unplug(self) -> str:
        """Take a device away, and wait until the kubelet knows; which one that was, or nothing."""
        before = set(self.healthy())
        await self.hook("unplug")
        await self.until(lambda: before - set(self.healthy()) != set())
        return min(before - set(self.healthy()), default="")

    # --- pods and calls ---

    def pod(self, number: int) -> Pod:
        """A pod that asks for so many devices of the subject."""
        return Pod(f"pod-{next(self._pods)}", (Container("main", {self.subject: number}),))

    async def admit(self, pod: Pod) -> PodStatus | None:
        """Have the kubelet admit it; None if the kubelet ended, or would have crashed, or was not answered."""
        with anyio.move_on_after(self.terms.patience), suppress(KubeletPanicError, KubeletStoppedError):
            return await self.kubelet.admit(pod)
        return None

    async def options(self, resource: str = "") -> Called:
        """Ask for the plugin's options, by default for those of the subject."""

        async def ask(client: PluginClient) -> Called:
            return Called(0, "options", 0, chosen=_flags(await client.options()))

        return await self._call("options", ask, resource=resource)

    async def allocate(self, label: str, *ids: str) -> Called:
        """Ask for these devices, for one container."""

        async def ask(client: PluginClient) -> Called:
            return Called(0, label, 0, ids=ids, containers=(await client.allocate(ids)).containers)

        return await self._call(label, ask, ids)

    async def prefer(self, label: str, available: Sequence[str], must: Sequence[str], size: int) -> Called:
        """Ask which of these devices a container should get."""
        ids, must = tuple(available), tuple(must)

        async def ask(client: PluginClient) -> Called:
            chosen = await client.preferred(ids, must, size)
            return Called(0, label, 0, ids=ids, must=must, size=size, chosen=chosen)

        return await self._call(label, ask, ids)

    async def pre_start(self, label: str, *ids: str) -> Called:
        """Say that a container with these devices is about to start."""

        async def ask(client: PluginClient) -> Called:
            await client.pre_start(ids)
            return Called(0, label, 0, ids=ids)

        return await self._call(label, ask, ids)

    async def _call(
        self, label: str, ask: Callable[[PluginClient], Awaitable[Called]], ids: Sequence[str] = (), resource: str = ""
    ) -> Called:
        resource = resource or self.subject
        began = _now()
        called = Called(0, label, 0, ids=tuple(ids), error=f"there was no answer within {self.terms.patience:g} s")
        with anyio.move_on_after(self.terms.patience):
            try:
                async with self._client(resource) as client:
                    called = await ask(client)
            except PluginError as error:
                called = Called(0, label, 0, ids=tuple(ids), error=str(error))
        self.note(called := replace(called, at=_now(), seconds=_now() - began, resource=resource))
        return called

    @asynccontextmanager
    async def _client(self, resource: str) -> AsyncIterator[PluginClient]:
        """A connection of our own to a resource's plugin, for calls that a kubelet makes at other moments."""
        client = PluginClient(resource, join(self.kubelet.plugin_dir, self._endpoints.get(resource, "")), Clock())
        await client.dial()
        try:
            yield client
        finally:
            client.close()

    # --- another plugin of the same name ---

    @asynccontextmanager
    async def rival(self, resource: str) -> AsyncIterator[None]:
        """Another plugin that has registered this resource, with one device; it ends with the context."""
        name = f"{_RIVAL}{os.urandom(2).hex()}.sock"
        rival = _Rival()
        server = SocketServer([rival], self.kubelet.plugin_dir / name)
        await server.open()
        try:
            async with Channel(path=str(self.kubelet.socket), codec=Codec()) as channel:
                request = RegisterRequest(version="v1beta1", endpoint=name, resource_name=resource)
                await RegistrationStub(channel).register(request)
            yield
        finally:
            rival.over.set()
            await server.shut_down()


class _Rival(DevicePluginBase):
    """The least that a kubelet takes for a plugin."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    async def get_device_plugin_options(self, empty: Empty) -> DevicePluginOptions:  # noqa: ARG002
        return DevicePluginOptions()

    async def list_and_watch(self, empty: Empty) -> AsyncIterator[ListAndWatchResponse]:  # noqa: ARG002
        yield ListAndWatchResponse([Device(id="rival", health=HEALTHY)])
        await self.over.wait()


def _now() -> float:
    return asyncio.get_running_loop().time()


def _empty(directory: Path) -> None:
    """Remove all that is in it."""
    for path in directory.iterdir() if directory.exists() else ():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _flags(options: DevicePluginOptions) -> tuple[str, ...]:
    """The names of the options that are on."""
    flags = {PRE_START: options.pre_start_required, PREFERRED: options.get_preferred_allocation_available}
    return tuple(name for name, on in flags.items() if on)


def _unreachable(path: Path) -> str:
    """Why nothing can be connected to there; empty if something listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(str(path))
        except BlockingIOError:
            return ""  # it listens, and has much to do
        except OSError as error:
            return os.strerror(error.errno).lower() if error.errno else str(error)
    return ""
