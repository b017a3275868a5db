"""The device manager of one kubelet process: what it believes, and how events change that.

It ends with its process; a restarted kubelet makes a new one, which knows what the checkpoint says.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import anyio
from msgspec import Struct, field
from msgspec.structs import replace

from agent.kubelet.api.v1beta1 import DevicePluginOptions
from agent.kubelet.wire import HEALTHY, DeviceList
from agent.simulation import checkpoint
from agent.simulation.checkpoint import Allocation, PodDevices
from agent.simulation.clock import Clock
from agent.simulation.model import Change, Container, Feed, Kind, ResourceView, Version
from agent.simulation.plugin_client import Arrival, PluginClient, PluginError

_LOOKED_UP: Final = 0.25  # seconds after a plugin's answer in which the devices are looked up again, at the latest
GRACE_PERIOD: Final = 300.0  # seconds from a plugin's end until its endpoint is removed (kubelet contract: A3)


class AdmissionError(Exception):
    """A container cannot have its devices; the sentence ends up in the pod's status."""


class KubeletPanicError(Exception):
    """A real kubelet would have crashed here (kubelet contract: A7)."""


class _Endpoint(Struct, frozen=True):
    client: PluginClient | None  # None: known from the checkpoint alone
    options: DevicePluginOptions
    stopped: bool = False


class _InFlight(Struct, eq=False):
    resource: str
    ids: frozenset[str]
    vanished: dict[str, float] = field(default_factory=dict)
    """Those that left a list meanwhile, with when they came back; infinity: they have not."""


class DeviceManager:
    """Resources, endpoints and allocations; `node` holds the views that the node's status shows."""

    def __init__(
        self,
        directory: Path,
        node: dict[str, ResourceView],
        feed: Feed,
        clock: Clock,
        rng: random.Random,
        version: Version,
    ) -> None:
        self._directory = directory
        self._node = node
        self._feed = feed
        self._clock = clock
        self._rng = rng
        self._resources: dict[str, Resource] = {}
        self._goes_by_path = version == "1.37"
        self._endpoints: dict[str, tuple[_Endpoint, ...]] = {}
        """Resource → its endpoints; the last is in force. Until 1.36 there is one (kubelet contract: A2, A12)."""
        self._graces: dict[str, Callable[[], None]] = {}
        self._in_flight: set[_InFlight] = set()
        self._unlisted: dict[str, frozenset[str]] = {}
        self._writing = asyncio.Lock()
        self._stopped = False
        self.held = PodDevices()

    # --- start and stop ---

    def load(self) -> None:
        """Start from the checkpoint: allocations survive, resources have no devices until they register (A6)."""
        for view in list(self._node.values()):
            self._show(ResourceView(view.name))
        try:
            entries, resources = checkpoint.decode((self._directory / checkpoint.NAME).read_bytes())
        except FileNotFoundError:
            return
        except checkpoint.CorruptError as error:
            # A real kubelet logs this and goes on with nothing.
            self._feed.publish(Change(Kind.CHECKPOINT, text=f"{error}; allocations are forgotten"))
            return
        self.held = PodDevices(entries)
        for name in resources:
            self._resources[name] = Resource(ResourceView(name))
            self._endpoints[name] = (_Endpoint(None, DevicePluginOptions(), stopped=True),)
            self._await_return(name)
            self._show(ResourceView(name))
        self._unlisted = {name: self.held.in_use(name) for name in {key[2] for key in entries}}

    async def stop(self) -> None:
        """Forget the timers; write nothing more."""
        for call_off in self._graces.values():
            call_off()
        self._stopped = True
        async with self._writing:
            pass

    # --- what the clients say ---

    def connected(self, client: PluginClient, options: DevicePluginOptions) -> None:
        """A plugin has answered: it is the resource's endpoint now.

        Raises:
            PluginError: its path is that of an endpoint.
        """
        before = self._living(client.resource) if self._goes_by_path else ()
        if any(it.client.path == client.path for it in before if it.client):
            raise PluginError(f"device plugin already connected: {client.path}")
        if call_off := self._graces.pop(client.resource, None):
            call_off()
        self._endpoints[client.resource] = (*before, _Endpoint(client, options))

    def stream_opened(self, resource: str) -> None:
        """ListAndWatch has been sent."""
        self._feed.publish(Change(Kind.STREAM_OPENED, resource))

    async def received(self, resource: str, arrival: Arrival) -> None:
        """A list: full replacement, then the checkpoint is rewritten (A3)."""
        if self._stopped:
            return  # this process stands still, and its connections are open
        new = listed(resource, DeviceList.parse(arrival.data).devices)
        self._resources[resource] = new
        for allocation in self._in_flight:
            if allocation.resource == resource:
                back = {one: self._clock.now() for one, at in allocation.vanished.items() if at == math.inf}
                allocation.vanished |= back | dict.fromkeys(allocation.ids - new.nodes.keys(), math.inf)
        self._show(new.view, Kind.LIST, arrival)
        held = self._unlisted.pop(resource, frozenset()) & self.held.in_use(resource)
        if (missing := new.crashes_restart(held)) is not None:
            self._panic(
                f"the first list of {resource} after a restart lacks {missing}, which a pod holds, "
                "and has devices with NUMA nodes (kubelet contract: A7.2)",
                resource,
            )
        await self.write_checkpoint()

    def stream_ended(self, resource: str, reason: str) -> None:
        """A stream's end has been seen."""
        self._feed.publish(Change(Kind.STREAM_ENDED, resource, reason))

    def disconnected(self, client: PluginClient) -> None:
        """The plugin is gone: every device unhealthy at once, and a grace period for its return (A3).

        From 1.37 on only the end of the last plugin does that: until then another one is the endpoint (A12).
        """
        resource = client.resource
        if resource not in self._endpoints:
            return
        before = self._living(resource)
        left = tuple(it for it in before if it.client and it.client.path != client.path)
        if self._goes_by_path and left:
            self._endpoints[resource] = left
            self._feed.publish(Change(Kind.PROMOTED, resource))
            return
        self._endpoints[resource] = tuple(replace(it, stopped=True) for it in self._endpoints[resource][-1:])
        self._await_return(resource)
        known = self._resources.get(resource)
        if known is None:
            self._feed.publish(Change(Kind.DISCONNECTED, resource))
            return
        self._resources[resource] = lost(known)
        self._show(self._resources[resource].view, Kind.DISCONNECTED)

    def _living(self, resource: str) -> tuple[_Endpoint, ...]:
        return tuple(it for it in self._endpoints.get(resource, ()) if not it.stopped)

    def views(self) -> list[ResourceView]:
        """What is known of every resource."""
        return [resource.view for resource in self._resources.values()]

    def _await_return(self, resource: str) -> None:
        if call_off := self._graces.pop(resource, None):
            call_off()
        self._graces[resource] = self._clock.call_later(GRACE_PERIOD, lambda: self._expire(resource))

    def _expire(self, resource: str) -> None:
        # The node goes on listing it, with 0, for ever (A3).
        del self._graces[resource]
        self._endpoints.pop(resource, None)
        self._resources.pop(resource, None)
        self._show(ResourceView(resource), Kind.EXPIRED)

    # --- pods ---

    async def allocate(
        self, uid: str, container: Container, reusable: Mapping[str, Collection[str]]
    ) -> dict[str, frozenset[str]]:
        """Give one container what it asks for: resource → IDs; `reusable` is what init containers of the pod left.

        Raises:
            AdmissionError: it cannot have that, or a plugin refused.
            KubeletPanicError: a device left the list while its Allocate was in flight (A7.1).
        """
        given = {}
        for resource, count in self._rng.sample(sorted(container.resources.items()), len(container.resources)):
            ids = await self._choose(resource, count, reusable.get(resource, ()))
            allocation = await self._ask(resource, ids)
            self.held.entries[uid, container.name, resource] = allocation
            given[resource] = ids
        if given:
            await self.write_checkpoint()
        return given

    async def _choose(self, resource: str, count: int, reusable: Collection[str]) -> frozenset[str]:
        known = self._resources.get(resource)
        if known is None:
            raise AdmissionError(f"cannot allocate unregistered device {resource}")
        choice = begin(
            resource,
            count,
            healthy=known.view.healthy,
            in_use=self.held.in_use(resource),
            reusable=reusable,
            rng=self._rng,
        )
        if choice.complete:
            return choice.chosen
        return choice.finish(await self._preferred(resource, choice), self._rng)

    async def _preferred(self, resource: str, choice: Choice) -> Collection[str]:
        endpoint = self._endpoints[resource][-1]
        if not endpoint.options.get_preferred_allocation_available or endpoint.client is None:
            return ()
        try:
            return await endpoint.client.preferred(
                self._in_random_order(choice.free | choice.chosen), self._in_random_order(choice.chosen), choice.count
            )
        except PluginError as error:
            raise AdmissionError(f"device plugin GetPreferredAllocation rpc failed with err: {error}") from None

    async def _ask(self, resource: str, ids: frozenset[str]) -> Allocation:
        endpoint = self._endpoints[resource][-1]
        if endpoint.client is None or endpoint.stopped:
            raise AdmissionError(f"endpoint of {resource} has been stopped")
        in_flight = _InFlight(resource, ids)
        self._in_flight.add(in_flight)
        try:
            reply = await endpoint.client.allocate(self._in_random_order(ids))
        except PluginError as error:
            self.held.overlooked.clear()  # it counts again what is in use
            raise AdmissionError(str(error)) from None
        finally:
            self._in_flight.discard(in_flight)
        # It looks the devices up again now; one that left and has just come back may have been away at that moment.
        lately = {one for one, at in in_flight.vanished.items() if not self._clock.now() - at >= _LOOKED_UP}
        if missing := lately | (ids - self._resources[resource].nodes.keys()):
            text = f"{min(missing)} left the list of {resource} while its Allocate was in flight"
            self._panic(f"{text} (kubelet contract: A7.1)", resource)
            raise KubeletPanicError(text)
        if not reply.containers:
            raise AdmissionError("no containers return in allocation response")
        return Allocation(self._resources[resource].by_node(sorted(ids)), reply.containers[0])

    async def pre_start(self, uid: str, container: str) -> None:
        """Before every start of a container: ask the plugins that want to be asked (A4).

        Raises:
            PluginError: one of them objects.
        """
        for resource, allocation in self.held.of(uid, container).items():
            if resource not in self._endpoints:
                raise PluginError(f"endpoint not found in cache for a registered resource: {resource}")
            endpoint = self._endpoints[resource][-1]
            if endpoint.client is None or not endpoint.options.pre_start_required:
                continue
            try:
                await endpoint.client.pre_start(self._in_random_order(allocation.ids))
            except PluginError as error:
                raise PluginError(f"device plugin PreStartContainer rpc failed with err: {error}") from None

    # --- the checkpoint and the node's status ---

    async def write_checkpoint(self) -> None:
        """Replace the file by what is believed now."""
        async with self._writing:
            if self._stopped:
                return
            healthy = {name: resource.view.healthy for name, resource in self._resources.items()}
            content = checkpoint.encode(self.held.entries, healthy)
            writing = asyncio.ensure_future(anyio.to_thread.run_sync(checkpoint.write, self._directory, content))
            try:
                await asyncio.shield(writing)
            finally:
                await asyncio.wait({writing})  # also where this is cancelled, the next kubelet finds no writer at work
        self._feed.publish(Change(Kind.CHECKPOINT))

    def _show(self, view: ResourceView, kind: Kind = Kind.STARTED, arrival: Arrival | None = None) -> None:
        before = self._node.get(view.name)
        self._node[view.name] = view
        change = Change(kind, view.name, before=before, after=view)
        self._feed.publish(change if arrival is None else replace(change, at=arrival.at, message=arrival.data))

    def _panic(self, text: str, resource: str) -> None:
        self._feed.publish(Change(Kind.PANIC, resource, text))

    def _in_random_order(self, ids: Collection[str]) -> list[str]:
        return self._rng.sample(sorted(ids), len(ids))


# --- what the device manager believes of one resource after each event; pure ---
#
# Kubelet contract: A3.

NO_NODE = -1  # the key under which the checkpoint keeps devices without topology


class Resource(Struct, frozen=True):
    """A resource's view, and the NUMA nodes of every device in its last list."""

    view: ResourceView
    nodes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def by_node(self, ids: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """The devices sorted by NUMA node, as the checkpoint keeps them; one with two nodes stands twice.

        Raises:
            KeyError: a device is not in the last list.
        """
        sorted_out: dict[int, tuple[str, ...]] = {}
        for device in ids:
            for node in self.nodes[device] or (NO_NODE,):
                sorted_out[node] = (*sorted_out.get(node, ()), device)
        return sorted_out

    def crashes_restart(self, held: Collection[str]) -> str | None:
        """The held ID whose absence crashes a restarted kubelet, if one does.

        An allocated ID missing from the list, together with any device that has NUMA information, is a nil
        pointer to every topology manager policy but "none"; that worst case is assumed (kubelet contract: A7.2).
        """
        missing = sorted(set(held) - self.nodes.keys())
        return missing[0] if missing and any(self.nodes.values()) else None


def listed(name: str, devices: Iterable[tuple[str, str, tuple[int, ...]]]) -> Resource:
    """The resource after a list: full replacement, a duplicate counted twice, only "Healthy" healthy (A3)."""
    nodes: dict[str, tuple[int, ...]] = {}
    healthy: list[str] = []
    unhealthy: list[str] = []
    for device, health, where in devices:
        nodes[device] = where
        (healthy if health == HEALTHY else unhealthy).append(device)
    view = ResourceView(name, len(healthy) + len(unhealthy), len(healthy), frozenset(healthy), frozenset(unhealthy))
    return Resource(view, nodes)


def lost(resource: Resource) -> Resource:
    """The resource after its plugin's end: every device unhealthy, capacity kept (A3)."""
    view = resource.view
    return replace(
        resource,
        view=replace(view, allocatable=0, healthy=frozenset(), unhealthy=view.unhealthy | view.healthy),
    )


# --- which devices a container is given; pure ---
#
# Kubelet contract: A4.


class Choice(Struct, frozen=True):
    """An allocation half made: what is reused, and what the rest may be taken from."""

    count: int
    chosen: frozenset[str]
    free: frozenset[str]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to choose."""
        return len(self.chosen) == self.count

    def finish(self, preferred: Collection[str], rng: random.Random) -> frozenset[str]:
        """Fill up with preferred devices that are free, then with any; in random order, as Go's maps do."""
        wanted = _shuffled(self.free & frozenset(preferred), rng)
        others = _shuffled(self.free - frozenset(preferred), rng)
        return self.chosen | frozenset((wanted + others)[: self.count - len(self.chosen)])


def begin(
    resource: str,
    count: int,
    *,
    healthy: frozenset[str],
    in_use: frozenset[str],
    reusable: Collection[str],
    rng: random.Random,
) -> Choice:
    """Reuse what init containers left, and see what is free for the rest.

    Raises:
        AdmissionError: too few healthy devices are free.
    """
    if not healthy:
        raise AdmissionError(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
    chosen = frozenset(_shuffled(reusable, rng)[:count])
    free = healthy - in_use - chosen
    needed = count - len(chosen)
    if len(free) < needed:
        raise AdmissionError(
            f"requested number of devices unavailable for {resource}. Requested: {needed}, Available: {len(free)}"
        )
    return Choice(count, chosen, free)


def _shuffled(ids: Collection[str], rng: random.Random) -> list[str]:
    return rng.sample(sorted(ids), len(ids))
