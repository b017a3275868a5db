"""A plugin that does all that the suite asks for, in this process; each of its faults is one that a check is there for.

A fault's name is that of the check which must find it; one that is no check's name is a way of its own, which none may find.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from grpclib.client import Channel
from grpclib.const import Handler, Status
from grpclib.exceptions import GRPCError, StreamTerminatedError

from agent.discovery.paths import CREATE, DELETE, Inotify
from agent.kubelet.api.v1beta1 import (
    AllocateRequest,
    AllocateResponse,
    CdiDevice,
    ContainerAllocateResponse,
    ContainerPreferredAllocationResponse,
    Device,
    DevicePluginBase,
    DevicePluginOptions,
    DeviceSpec,
    Empty,
    ListAndWatchResponse,
    NumaNode,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
    RegisterRequest,
    RegistrationStub,
    TopologyInfo,
)
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import HEALTHY, UNHEALTHY, Codec
from agent.simulation.conformance.timeline import Used

TOY: Final = "example.com/toy"
OTHER: Final = "example.com/other"
_LIST_AND_WATCH: Final = "/v1beta1.DevicePlugin/ListAndWatch"
_START: Final = 0.05  # seconds that a process takes until it runs
_FLAGS: Final = DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True)
_PADDING: Final = tuple(f"{n:0131072}" for n in range(8))
"""IDs of a list of a mebibyte."""


@dataclass
class World:
    """What is there whatever process runs: hardware, and how often the plugin was started."""

    faults: frozenset[str] = frozenset()
    there: set[str] = field(default_factory=lambda: {"a", "b", "c", "d"})
    lives: int = 0
    living: list[Example] = field(default_factory=list)

    def launch(self, root: Path) -> Example:
        return Example(self, root / "device-plugins")

    async def unplug(self) -> None:
        self._change(self.there.discard)

    async def plug(self) -> None:
        self._change(self.there.add)

    def _change(self, change: Callable[[str], None]) -> None:
        change("b")
        for plugin in self.living:
            plugin.changed()


class Example:
    """One process of it, with two resources."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world, self.directory = world, directory
        self.life = 0
        self.stopping = False
        self.has_kubelet = False
        self._services: list[Service] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._inotify: Inotify | None = None

    def has(self, fault: str) -> bool:
        return fault in self.world.faults

    # --- what the suite does with it ---

    async def start(self) -> None:
        self.world.lives += 1
        self.life = self.world.lives
        if self.has("it cannot start twice") and self.life > 1:
            self._over.set_result(1)
            return
        self.world.living.append(self)
        ids = {TOY: None, OTHER: ["a" if self.has("list-ids-of-one-resource") else "z"]}
        self._services = [Service(self, resource, fixed) for resource, fixed in ids.items()]
        self._inotify = Inotify()
        self._inotify.add_watch(str(self.directory), CREATE | DELETE)
        asyncio.get_running_loop().add_reader(self._inotify.fileno(), self._look)
        self._tasks = [asyncio.create_task(service.run()) for service in self._services]

    def _look(self) -> None:
        assert self._inotify is not None
        for _, mask, name in self._inotify.read()[0]:
            if name != "kubelet.sock":
                continue
            self.has_kubelet = bool(mask & CREATE)
            if mask & CREATE:
                for service in self._services:
                    service.kubelet_came()

    def signal(self, number: int) -> None:
        if self._over.done() or (self.has("sigterm-ends") and number == signal.SIGTERM):
            return
        if (
            number == signal.SIGTERM
            and self.has("sigterm-without-kubelet")
            and not any(service.streams for service in self._services)
        ):
            return
        self.stopping = True
        self._tasks.append(asyncio.create_task(self._end(number)))

    async def _end(self, number: int) -> None:
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify.fileno())
            self._inotify.close()
            self._inotify = None
        for service in self._services:
            await service.end(kill=number == signal.SIGKILL)
        if self in self.world.living:
            self.world.living.remove(self)
        if not self._over.done():
            self._over.set_result(-number if number == signal.SIGKILL else 0)

    async def ended(self) -> int:
        return await asyncio.shield(self._over)

    async def close(self) -> None:
        self.stopping = True
        await self._end(signal.SIGKILL)
        for service in self._services:
            await service.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def last_words(self) -> str:
        return "bind: address in use"

    def usage(self, label: str, at: float) -> Used | None:
        busy = self.has("idle-processor") or self.has("away-processor")
        restarts = max(service.registrations for service in self._services)
        memory = (64 << 20) + (restarts << 23 if self.has("restarts-memory") else 0)
        files = 20 + (restarts if self.has("restarts-descriptors") else 0)
        return Used(at, label, at * 0.5 if busy else 0.0, memory, files)

    # --- hardware ---

    def devices(self, registrations: int) -> dict[str, str]:
        """ID → health."""
        renamed = self.has("restart-same-devices") and registrations > 1
        suffix = f"-{registrations}" if renamed else f"-{self.life}" if self.has("killed-same-devices") else ""
        found = {one + suffix: HEALTHY if one in self.world.there else UNHEALTHY for one in "abcd"}
        if self.has("its devices go together") and UNHEALTHY in found.values():
            found = dict.fromkeys(found, UNHEALTHY)
        if self.has("plug-brings-back") and "b" not in self.world.there:
            self.world.there.add("e")
        if "e" in self.world.there:
            del found["b"]
            found |= {"e": HEALTHY} if "b" in self.world.there else {}
        dropped = self.has("unplug-keeps-held") and registrations == 1
        dropped = dropped or (self.has("unplug-keeps-held-for-restart") and registrations > 1)
        return {one: health for one, health in found.items() if health == HEALTHY or not dropped}

    def changed(self) -> None:
        if not self.has("unplug-is-told"):
            for service in self._services:
                service.changed()


class Service(DevicePluginBase):
    """One resource: a socket at a fresh path for each registration."""

    def __init__(self, plugin: Example, resource: str, ids: Sequence[str] | None) -> None:
        self.plugin, self.resource, self._ids = plugin, resource, ids
        self.registrations = 0
        self.streams: list[asyncio.Queue[list[ListAndWatchResponse] | None]] = []
        self._server: SocketServer | None = None
        self._old: list[SocketServer] = []
        self._needed = asyncio.Event()
        self._needed.set()
        self._paths = itertools.count()
        self._kubelet = (0, 0)  # inode and time of the socket of which the registration is
        self._allocated: set[str] = set()
        self._gave_up = False
        self._kubelets = 0  # that came while it ran
        self._poisoned = False
        self._running = 0
        self._starts = 0
        self._lock = asyncio.Lock()

    def has(self, fault: str) -> bool:
        """Only the first resource has faults, but for the one that is about all."""
        return (self.resource == TOY or fault == "registration-arrives") and self.plugin.has(fault)

    # --- registration ---

    async def run(self) -> None:
        if not self.has("registration-serves-first"):
            await asyncio.sleep(_START)
        if self.has("restart-wipes-files"):
            (self.plugin.directory / "lock").touch()
        while True:
            await self._needed.wait()
            self._needed.clear()
            if self._never():
                return
            await self._register_for_ever()
            if self.has("registration-once") or (self.has("restart-once") and self.registrations == 2):
                await asyncio.sleep(0.1)
                await self._register(self._server_path.name)

    def _never(self) -> bool:
        return (
            self._gave_up
            or self.has("registration-arrives")
            or (self.has("restart-registers") and self.registrations > 0)
            or (self.has("restart-wipes-files") and not (self.plugin.directory / "lock").exists())
            or (self.has("restart-twice") and self._kubelets > 1)
            or (self.has("restarts-register") and self.registrations > 12)
            or (self.has("killed-returns") and self.plugin.life > 1)
        )

    async def _register_for_ever(self) -> None:
        pause = 30.0 if self.has("it tries again each 30 s") else 0.02
        if self.has("restart-in-time") and self.registrations:
            await asyncio.sleep(3)
        while not self.plugin.stopping and not self._never():
            try:
                self._needed.clear()
                self._kubelet = self._kubelet_now()
                await self._listen()
                if self._kubelet != self._kubelet_now():
                    continue  # a kubelet that starts may have removed the socket
                await self._register(self._server_path.name)
            except (GRPCError, StreamTerminatedError, OSError) as error:
                if self._gives_up(error):
                    return
                pause = max(pause, min(pause * 2, 5.0))
                await asyncio.sleep(pause)
            else:
                return

    def _gives_up(self, error: Exception) -> bool:
        self._gave_up = (
            (self.has("registration-retries") and getattr(error, "status", None) is Status.UNKNOWN)
            or (self.has("registration-waits") and isinstance(error, FileNotFoundError))
            or (self.has("registration-connection-refused") and isinstance(error, ConnectionRefusedError))
            or (self.has("registration-kubelet-dies") and not isinstance(error, OSError))
            or (self.has("restart-after-a-while") and self.registrations > 0)
        )
        return self._gave_up

    @property
    def _server_path(self) -> Path:
        name = f"{self.resource.rpartition('/')[2]}-{self.plugin.life}-{next(self._paths)}.sock"
        return self._server.path if self._server else self.plugin.directory / name

    async def _listen(self) -> None:
        """End what was open, then listen at a path that was never used."""
        before, self._server = self._server, None
        if before is not None:
            for stream in self.streams:
                stream.put_nowait(None)
            if self.has("restart-then-unplug"):
                self._old.append(before)
            else:
                await before.shut_down(0.1)
        server = SocketServer([self], self._server_path)
        if self.has("registration-serves-first"):
            self._server = server
            asyncio.get_running_loop().call_later(
                0.1, lambda: self.plugin._tasks.append(asyncio.create_task(server.open()))
            )
            return
        await server.open()
        self._server = server

    async def _register(self, endpoint: str) -> None:
        options = DevicePluginOptions() if self.has("no options") else _FLAGS
        request = RegisterRequest(
            version="v1beta2" if self.has("registration-version") else "v1beta1",
            endpoint=str(self.plugin.directory / endpoint) if self.has("registration-endpoint") else endpoint,
            resource_name="toy" if self.has("registration-resource-name") else self.resource,
            options=options,
        )
        async with Channel(path=str(self.plugin.directory / "kubelet.sock"), codec=Codec()) as channel:
            await RegistrationStub(channel).register(request, timeout=5 if self.has("registration-deadline") else None)

    def kubelet_came(self) -> None:
        self._kubelets += 1
        part = slice(1) if self.has("restart-same-inode") else slice(2)
        if not self.has("restart-half-open") and self._kubelet[part] != self._kubelet_now()[part]:
            self._needed.set()

    def _kubelet_now(self) -> tuple[int, int]:
        found = (self.plugin.directory / "kubelet.sock").stat()
        return found.st_ino, found.st_ctime_ns

    async def _stream_ended(self, server: SocketServer | None) -> None:
        ignored = ("list-size", "stream-ended", "restart-same-inode", "update-returns")
        if (self.plugin.stopping and not self.has("sigterm-registers-no-more")) or any(map(self.has, ignored)):
            return
        if self.plugin.stopping:
            await self._register(self._server_path.name)
        elif server is not None:
            await server.wait_disconnected()
            if self._server is server:
                self._needed.set()

    async def end(self, *, kill: bool) -> None:
        keeps = self.plugin.life > 1 and (self.has("killed-is-noticed") or self.has("update-is-noticed"))
        if self._server is None or (kill and keeps):
            return  # a child that it has started keeps the connection
        if self.has("sigterm-registers-no-more") and not kill:
            await self._register(self._server_path.name)
        if kill:
            self._server.reset_connections()
        for stream in self.streams:
            stream.put_nowait(None)
        await self._server.shut_down(0.0 if kill else 0.2)

    async def close(self) -> None:
        for server in (self._server, *self._old):
            if server is not None:
                server.reset_connections()
                with suppress(OSError):
                    await server.shut_down(0.0)

    # --- lists ---

    def _list(self) -> list[ListAndWatchResponse]:
        """The messages that say what there is."""
        health = self.plugin.devices(self.registrations) if self._ids is None else dict.fromkeys(self._ids, HEALTHY)
        devices = [Device(one, word, TopologyInfo([NumaNode(0)])) for one, word in health.items()]
        if self.has("list-ids-unique"):
            devices.append(devices[0])
        if self.has("list-ids-say-something"):
            devices.append(Device("", HEALTHY))
        if self.has("list-health"):
            devices.append(Device("y", "healthy"))
        if self.has("list-topology"):
            devices.append(Device("y", HEALTHY, TopologyInfo.FromString(b"")))
        if self.has("list-numa-nodes"):
            devices.append(Device("y", HEALTHY, TopologyInfo([NumaNode(-1)])))
        if self.has("list-size"):
            devices += [Device(f"{n}{one}", HEALTHY) for one in _PADDING for n in range(5)]
        if self.has("unplug-leaves-others") and any(word == UNHEALTHY for word in health.values()):
            return [
                ListAndWatchResponse([it for it in devices if it.health == UNHEALTHY]),
                ListAndWatchResponse(devices),
            ]
        return [ListAndWatchResponse(devices)]

    def changed(self) -> None:
        for queue in self.streams[:1] if self.has("restart-then-unplug") else self.streams:
            queue.put_nowait(self._list())

    async def _list_and_watch(self, stream: Any) -> None:
        await stream.recv_message()
        self.registrations += 1
        server = self._server
        queue: asyncio.Queue[list[ListAndWatchResponse] | None] = asyncio.Queue()
        if self.has("update-keeps-offering") and self.plugin.life > 1 and self.registrations == 1:
            queue.put_nowait([ListAndWatchResponse()])
            asyncio.get_running_loop().call_later(2, lambda: queue.put_nowait(self._list()))
        elif not self.has("list-arrives"):
            queue.put_nowait(self._list())
        self.streams.append(queue)
        try:
            if self.has("registration-keeps-stream"):
                asyncio.get_running_loop().call_later(0.3, queue.put_nowait, None)
            while (messages := await queue.get()) is not None:
                for message in messages:
                    await stream.send_message(message)
                if self.has("idle-lists"):
                    asyncio.get_running_loop().call_later(0.4, queue.put_nowait, messages)
        finally:
            if not self.has("restart-then-unplug"):
                self.streams.remove(queue)
            if not self.plugin.stopping:
                self.plugin._tasks.append(asyncio.create_task(self._stream_ended(server)))

    def __mapping__(self) -> dict[str, Handler]:
        mapping: dict[str, Handler] = super().__mapping__()
        return mapping | {_LIST_AND_WATCH: mapping[_LIST_AND_WATCH]._replace(func=self._list_and_watch)}

    # --- calls ---

    async def get_device_plugin_options(self, empty: Empty) -> DevicePluginOptions:
        if self.has("registration-options"):
            raise GRPCError(Status.UNIMPLEMENTED, "no options here")
        return DevicePluginOptions() if self.has("registration-options-agree") else _FLAGS

    async def allocate(self, allocate_request: AllocateRequest) -> AllocateResponse:
        (container,) = allocate_request.container_requests
        if self.has("restart-under-load"):
            await self._lock.acquire()
            await asyncio.sleep(0.05)
            self._lock.release()
        self._running += 1
        try:
            return await self._allocate(container.device_ids)
        except asyncio.CancelledError:
            self._poisoned = self.has("allocate-after-cancelled")
            raise
        finally:
            self._running -= 1

    async def _allocate(self, ids: list[str]) -> AllocateResponse:
        if self.has("allocate-answers") or self._poisoned or (self.has("allocate-at-once") and self._running > 1):
            self._poisoned = self.has("allocate-after-cancelled")
            raise GRPCError(Status.INTERNAL, "not now")
        health = self.plugin.devices(self.registrations)
        if not self.has("allocate-stranger") and (strangers := set(ids) - health.keys()):
            self._poisoned = self.has("allocate-after-refusal")
            raise GRPCError(Status.NOT_FOUND, f"there is no {min(strangers)}")
        if not self.has("unplug-refuses") and any(health.get(one) == UNHEALTHY for one in ids):
            raise GRPCError(Status.FAILED_PRECONDITION, f"{ids} is not healthy")
        if self.has("allocate-again") and set(ids) & self._allocated:
            raise GRPCError(Status.ALREADY_EXISTS, "it was handed out")
        if self.has("allocate-any-order") and ids != sorted(ids):
            raise GRPCError(Status.INVALID_ARGUMENT, "in order, please")
        self._allocated.update(ids)
        await asyncio.sleep(
            2 if self.has("allocate-in-time") else 0.2 if self.has("allocate-after-cancelled") else 0.005
        )
        if self.has("unplug-in-flight"):
            (whole,) = self._list()
            for queue in self.streams:
                queue.put_nowait([ListAndWatchResponse([it for it in whole.devices if it.id not in ids]), whole])
            await asyncio.sleep(0.01)
        if self.has("list-reader-stalls"):
            padded = ListAndWatchResponse([*self._list()[0].devices, *(Device(one, UNHEALTHY) for one in _PADDING)])
            for queue in self.streams:
                queue.put_nowait([padded])
            while any(queue.qsize() > 1 for queue in self.streams):
                await asyncio.sleep(0.5)
        return AllocateResponse([self._reply()] * (2 if self.has("allocate-one-container") else 1))

    def _reply(self) -> ContainerAllocateResponse:
        path = "dev/null" if self.has("allocate-absolute-paths") else "/dev/null"
        node = DeviceSpec(
            container_path="/dev/toy",
            host_path="/dev/no-such-node" if self.has("allocate-paths-exist") else path,
            permissions="rx" if self.has("allocate-permissions") else "rw",
        )
        name = "toy" if self.has("allocate-cdi-names") else "example.com/toy=a"
        return ContainerAllocateResponse(envs={"TOY": "yes"}, devices=[node], cdi_devices=[CdiDevice(name)])

    async def get_preferred_allocation(
        self, preferred_allocation_request: PreferredAllocationRequest
    ) -> PreferredAllocationResponse:
        (wish,) = preferred_allocation_request.container_requests
        known = [one for one in wish.available_ids if one in self.plugin.devices(self.registrations)]
        if self.has("preferred-answers") or (self.has("preferred-stranger") and known != wish.available_ids):
            raise GRPCError(Status.INTERNAL, "no preference today")
        if self.has("preferred-in-time"):
            await asyncio.sleep(2)
        must = [] if self.has("preferred-must-include") else wish.must_include_ids
        size = wish.allocation_size + self.has("preferred-size")
        chosen = [*must, *(one for one in known if one not in must)][:size]
        if self.has("preferred-available") and not must:
            chosen[-1] = "somebody-elses"
        return PreferredAllocationResponse([ContainerPreferredAllocationResponse(chosen)])

    async def pre_start_container(
        self, pre_start_container_request: PreStartContainerRequest
    ) -> PreStartContainerResponse:
        self._starts += 1
        if self.has("prestart-answers") or (self.has("prestart-again") and self._starts > 1):
            raise GRPCError(Status.INTERNAL, "not ready")
        return PreStartContainerResponse()
