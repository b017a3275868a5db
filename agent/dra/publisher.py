"""Keeps the ResourceSlices of this node as the inventory is: lists and watches ours, compares, writes what differs.

It is level-triggered. Whatever changes, in the inventory or at the API server, leads to one comparison of what should be
there with what is there; so nothing is lost by a write that failed, a watch that broke off, or a kubelet that deletes all
slices of its node, which it does 2 ms after it has registered us (DRA contract: D5).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

import anyio
import msgspec
from msgspec import Struct

from agent.dra import slices
from agent.dra.names import Entry, pool_name
from agent.dra.slices import Eviction, Made, Offer, Seen, Wanted, Write
from agent.inventory.inventory import Inventory
from agent.kubernetes.api import WATCH, Api, ApiError, backoff, read
from agent.runtime.counts import Counts
from agent.runtime.pacing import Backoff, Doorbell
from agent.runtime.problems import Problems
from backends.base import Backend

API: Final = "/apis/resource.k8s.io/v1"

_SLICES: Final = f"{API}/resourceslices"
_OUTDATED: Final = (HTTPStatus.CONFLICT, HTTPStatus.NOT_FOUND)  # another wrote or deleted it meanwhile
_PAGE: Final = 50  # slices of an answer to a list; one with 64 devices has up to 200 KB
_TOGETHER: Final = (
    0.02  # seconds for which changes at the API server are gathered: a kubelet deletes one slice after another
)
_BURST: Final = 5  # updates that are sent as soon as something has changed
_SPACED, _MOST_SPACED = 1.0, 5.0  # seconds between two updates after that; doubled while it goes on
_LONGEST_PAUSE: Final = (
    10.0  # seconds after a failure: a pod that waits for a device waits for the kubelet's next try, too
)
_ROUNDS: Final = 5  # lists, one after the other, that the watch may overtake
_RECORD_AGAIN: Final = 30.0  # seconds before the record is tried again that could not be kept, though nothing changes


class Rate:
    """Says how long to wait for the next update: not at all, but in a storm ever longer; new slices do not count.

    A device that flaps a thousand times in a minute makes fewer than 20 updates of its slice.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._room, self._at, self._space = float(_BURST), clock(), Backoff(_SPACED, _MOST_SPACED)

    def wait(self) -> float:
        """Seconds until the next update may be sent."""
        now = self._clock()
        self._room = min(float(_BURST), self._room + (now - self._at) / self._space.delay)
        self._at = now
        if self._room >= _BURST:
            self._space.reset()
        return max(0.0, (1 - self._room) * self._space.delay)

    def spent(self) -> None:
        """An update was sent; many at once, of pools with many slices, cost no more than the longest wait."""
        self.wait()  # takes in what time has earned
        self._room = max(0.0, self._room - 1)
        if self._room < 1:
            self._space.next()


class _Metadata(Struct, rename="camel"):
    name: str = ""
    uid: str = ""
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _Pool(Struct, rename="camel"):
    name: str = ""
    generation: int = 0
    resource_slice_count: int = 0


class _Spec(Struct, rename="camel"):
    pool: _Pool = msgspec.field(default_factory=_Pool)
    devices: list[dict[str, Any]] = []
    shared_counters: list[dict[str, Any]] = []


class _Slice(Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    spec: _Spec = msgspec.field(default_factory=_Spec)
    message: str = ""
    """Of an error."""
    code: int = 0


class _List(Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    items: list[_Slice] = []


class _Change(Struct):
    """A line of a watch (meta/v1 WatchEvent)."""

    type: str
    object: _Slice


class _Node(Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class Settings(Struct, frozen=True):
    """Who we are."""

    driver: str
    node: str
    no_execute: frozenset[str]
    """Resources and templates of which an unhealthy device has its pods evicted."""
    eviction: Eviction


class Publisher:
    """The ResourceSlices of this node."""

    def __init__(
        self,
        settings: Settings,
        inventory: Inventory,
        backends: Mapping[str, Backend[Any]],
        problems: Problems,
        counts: Counts,
        offered: Iterable[str] = (),
        record: Callable[[frozenset[str]], Awaitable[bool]] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Prepare.

        Args:
            settings: who we are.
            inventory: what there is.
            backends: those in force at any time, by their kinds.
            problems: is told what fails.
            counts: has the slices that were written.
            offered: the resources of which the API server may have devices, by an earlier run.
            record: keeps these, before the API server has another and after it has one no more: what it has is not to be
                given out by device plugin, whatever is configured later. Returns whether it could.
            clock: monotonic seconds.
            wall: seconds since the epoch.
        """
        self._settings, self._inventory, self._backends = settings, inventory, backends
        self._named = slices.Named(inventory)
        self._counts, self._clock, self._wall = counts, clock, wall
        self._changed = Doorbell()
        self._seen: dict[str, Seen] = {}
        self._is_seen = self._is_told = False
        self._updates = 0
        """Changes that the watch and lists have made to `_seen`."""
        self._recorded, self._record = frozenset(offered), record
        self._version = ""
        """Of the list or the last line of the watch; empty: it has to be listed."""
        self._heard: set[str] = set()
        """The versions, and the uids of what was deleted, of which the watch has told since a write was sent."""
        self._own: set[str] = set()
        """The versions that we wrote, until the watch has told of each."""
        self._latest: dict[str, int] = {}
        self._returned: dict[str, tuple[bytes, bytes]] = {}
        """Slice → what the API server made of what we wrote, and what that was: it may know fewer fields than we do."""
        self._stale: set[str] | None = None
        """Resources of which anything has changed since `_pools` were made; None: all."""
        self._offered: dict[str, list[Offer]] = {}
        self._made: dict[str, Mapping[str, Made]] = {}
        self._pools: dict[str, list[Wanted]] = {}
        """By their resources."""
        self._evicted: frozenset[tuple[str, str]] = frozenset()
        self._owner: dict[str, Any] = {}
        self._knows_taints = True
        self._where = f"spec.nodeName%3D{settings.node},spec.driver%3D{settings.driver}"
        self._unwritten = problems.trouble(
            "dra", "the devices of this node are not told to the API server", "dra-slices-unwritten",
            "dra-slices-written", then="trying again; pods keep what they have",
        )  # fmt: skip
        self._unread = problems.trouble(
            "dra", "the ResourceSlices of this node cannot be read", "dra-slices-unread", then="trying again"
        )
        self._untainted = problems.trouble(
            "dra", "the API server knows no taints of devices", "dra-taints-unknown",
            then="devices that are not healthy are left out; the feature gate DRADeviceTaints, on since 1.36, has them",
        )  # fmt: skip
        self.troubles = (self._unwritten, self._unread, self._untainted)
        """What may not work."""

    def changed(self, resources: Iterable[str] | None = None) -> None:
        """Lists of these resources have changed, or claims on them; None: any may have."""
        if resources is None:
            self._stale = None
        elif self._stale is not None:
            self._stale.update(resources)
        self._changed.set()

    def has(self, resource: str) -> bool:
        """Whether the API server may have anything of this resource: it does, or was not asked yet."""
        pool = pool_name(self._settings.node, resource)
        return not self._is_seen or any(it.pool == pool for it in self._seen.values())

    def is_offered(self, resource: str) -> bool:
        """Whether the API server has the devices of a resource."""
        return self._is_seen and resource in self._pools and self.has(resource)

    # --- what the API server has ---

    async def watch(self, api: Api) -> None:
        """Follow our slices, until cancelled."""
        tries, self._version, is_gone = backoff(_LONGEST_PAUSE), "", False
        while True:
            try:
                if not self._version:
                    await self._list(api)
                query = f"fieldSelector={self._where}&watch=true&allowWatchBookmarks=true&timeoutSeconds={WATCH}"
                before = self._version
                await api.watch(f"{_SLICES}?{query}&resourceVersion={self._version}", "application/json", self._take)
                self._unread.healed()
                is_gone = False
                if self._version == before:
                    await anyio.sleep(tries.next())
                else:
                    tries.reset()
            except ApiError as error:
                self._version = ""
                was_gone, is_gone = is_gone, error.status == HTTPStatus.GONE
                if is_gone and not was_gone:
                    continue
                if error.status:
                    self._unread.report_once(error.sentence)
                await anyio.sleep(tries.next())

    async def _list(self, api: Api) -> None:
        """Take in all slices of ours.

        A watch that goes on meanwhile may be ahead of the answer, and tells nothing twice: then they are listed again.

        Raises:
            ApiError: the API server does not tell.
        """
        self._own.clear()
        for _ in range(_ROUNDS):
            found, more, updates = dict[str, Seen](), "", self._updates
            while True:
                path = f"{_SLICES}?fieldSelector={self._where}&limit={_PAGE}{f'&continue={more}' if more else ''}"
                part = read(await api.call("GET", path), _List)
                found.update((it.metadata.name, self._noted(it)) for it in part.items)
                more = part.metadata.continue_
                if not more or updates != self._updates:
                    break
            if updates == self._updates:
                break
        else:
            raise ApiError("the ResourceSlices of this node change faster than they can be listed", HTTPStatus.CONFLICT)
        self._seen, self._is_seen, self._version = found, True, part.metadata.resource_version
        self._updates += 1
        self._unread.healed()
        self._changed.set()

    def _take(self, line: bytes) -> None:
        """A line of the watch.

        Raises:
            ApiError: it tells of an error, as that what we saw last is too long ago.
        """
        if not line:
            return
        change = read(line, _Change)
        it = change.object
        if change.type == "ERROR":
            raise ApiError(f"the API server ends the watch: {it.message}", it.code or HTTPStatus.INTERNAL_SERVER_ERROR)
        self._version = it.metadata.resource_version or self._version
        if change.type == "BOOKMARK":
            return
        known = self._seen.get(it.metadata.name)
        self._heard.add(it.metadata.uid if change.type == "DELETED" else it.metadata.resource_version)
        if change.type == "DELETED":
            if known is not None and known.uid == it.metadata.uid:  # else it was made again meanwhile
                del self._seen[it.metadata.name]
        elif it.metadata.resource_version in self._own:
            self._own.discard(it.metadata.resource_version)  # its answer told, and perhaps that of a later one
            return
        else:
            self._seen[it.metadata.name] = self._noted(it)
        self._is_told = True
        self._updates += 1
        self._changed.set()

    def _noted(self, it: _Slice) -> Seen:
        pool, name = it.spec.pool, it.metadata.name
        self._latest[pool.name] = max(self._latest.get(pool.name, 0), pool.generation)
        content = slices.digest_of(it.spec.devices, it.spec.shared_counters)
        returned, ours = self._returned.get(name, (b"", b""))
        content = ours if content == returned else content
        told = it.metadata.uid, it.metadata.resource_version
        return Seen(name, pool.name, *told, pool.generation, pool.resource_slice_count, content)

    # --- what should be there ---

    async def _decide(self) -> float | None:
        """Make the pools that may be others by now; returns when (monotonic) they may be so by time alone."""
        stale, self._stale = self._stale, set()
        resources, ready = self._inventory.selection.resources, self._inventory.ready_kinds
        served = {name: it for name, it in resources.items() if it.spec.serve == "dra" and it.spec.backend in ready}
        for name in self._offered.keys() - served.keys():
            for made in (self._offered, self._made, self._pools):  # after a mistake of ours, not all may have it
                made.pop(name, None)
        fresh = {name for name in served if stale is None or name in stale or name not in self._pools}
        for name in fresh:
            listed = self._inventory.slots(name), self._inventory.claims(name)
            last = self._offered.get(name, ())
            self._offered[name] = slices.offers(self._named.of(name), *listed, last, self._settings.driver)
        evicting = {
            name: of for name, of in self._offered.items() if served[name].configured in self._settings.no_execute
        }
        now, before = self._clock(), self._evicted
        self._evicted, later = slices.evicting(evicting, self._settings.eviction, before, now)
        fresh |= {resource for resource, _ in before ^ self._evicted if resource in served}
        node, driver, offset = self._settings.node, self._settings.driver, self._wall() - now
        for name in sorted(fresh):
            offered = [it for it in self._offered[name] if self._knows_taints or it.health.offered]
            known = self._backends[served[name].spec.backend].attributes
            evicted = {device for resource, device in self._evicted if resource == name}
            counters, takes = slices.exclusions(offered)
            before_it = self._made.get(name, {})
            self._made[name] = slices.entries(offered, name, known, driver, evicted, offset, before_it, takes)
            devices = [it.entry for it in self._made[name].values()]
            self._pools[name] = slices.wanted(node, driver, pool_name(node, name), devices, counters)
            await asyncio.sleep(0)  # each takes a millisecond for 64 devices
        return later

    def _plan(self) -> list[Write]:
        """What is to be written. Pools that no resource has stay while a backend has more to tell: one may be its."""
        pools = {of[0].pool: of for of in self._pools.values()}
        written = self._inventory.selection.written.values()
        kinds = {it.spec.backend for it in written if it.spec.serve == "dra"}
        unknown = kinds - self._inventory.ready_kinds
        return slices.plan(pools, self._seen, self._latest, keep_others=bool(unknown))

    async def run(self, api: Api) -> None:
        """Write what differs, until cancelled."""
        rate, tries, is_outdated, until = Rate(self._clock), backoff(_LONGEST_PAUSE), False, None
        self._owner = {}
        self.changed()  # a run before this one may have ended by a mistake, half way
        while True:
            await self._changed.rung(math.inf if until is None else max(0.0, until - self._clock()))
            if self._is_told:
                await anyio.sleep(_TOGETHER)
            await anyio.sleep(rate.wait())
            self._changed.clear()
            self._is_told, until = False, None
            if not self._is_seen:
                continue
            try:
                until = await self._reconcile(api, rate)
                self._unwritten.healed()
                tries.reset()
                is_outdated = False
            except ApiError as error:
                if error.status in _OUTDATED and not is_outdated:
                    is_outdated = True
                    with suppress(ApiError):
                        await self._list(api)
                        continue
                is_outdated = False
                if error.status:
                    self._unwritten.report_once(error.sentence)
                until = self._clock() + tries.next()
                if not error.is_final:  # of no use before that
                    await anyio.sleep(max(0.0, until - self._clock()))
                    self._changed.set()

    async def _reconcile(self, api: Api, rate: Rate) -> float | None:
        """Write what differs now; returns when (monotonic) it may do so by time alone.

        A pool that the API server refuses is left as it is, and holds up no other.

        Raises:
            ApiError: something could not be written.
        """
        until = await self._decide()
        offered = self._recorded | self._pools.keys()
        await self._keep(offered)
        refused: dict[str, ApiError] = {}
        for it in self._plan():
            if it.pool in refused:
                continue
            if it.slice and it.version:
                rate.spent()
            try:
                await self._write(api, it)
            except ApiError as error:
                if not error.is_final or error.status in _OUTDATED:
                    raise
                refused[it.pool] = error
        if not await self._keep(frozenset(it for it in offered if it in self._pools or self.has(it))):
            until = min(self._clock() + _RECORD_AGAIN, math.inf if until is None else until)
        if refused:
            raise next(iter(refused.values()))
        return until

    async def _keep(self, offered: frozenset[str]) -> bool:
        """Have it kept of which resources the API server may have devices; returns whether it is."""
        if offered != self._recorded and (self._record is None or await self._record(offered)):
            self._recorded = offered
        return offered == self._recorded

    async def _write(self, api: Api, it: Write) -> None:
        """Make, replace or delete one slice.

        Raises:
            ApiError: that did not happen, or it is not known whether it did.
        """
        settings, path = self._settings, f"{_SLICES}/{it.name}"
        if it.slice is None:
            try:
                await self._send(api, "DELETE", path)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
            self._seen.pop(it.name, None)
            return
        if not (self._owner and it.version):  # the Node may have been made again, and all that it owns is gone then
            self._owner = await self._node(api)
        self._heard.clear()
        document = slices.body(it, settings.node, settings.driver, self._owner)
        said = read(await self._send(api, *(("PUT", path) if it.version else ("POST", _SLICES)), document), _Slice)
        self._returned[it.name] = slices.digest_of(said.spec.devices, said.spec.shared_counters), it.slice.content
        version, now = said.metadata.resource_version, self._seen.get(it.name)
        if self._heard.isdisjoint((version, said.metadata.uid)):
            self._seen[it.name] = self._noted(said)
            if version != it.version:
                self._own.add(version)
        elif now is not None and now.version == version:
            self._seen[it.name] = self._noted(said)
        else:  # the watch is ahead of this answer: it was deleted or changed since
            self._changed.set()
        if any("taints" in one for one in it.slice.spec.get("devices", ())):
            self._taints_come_back(are_there=any("taints" in one for one in said.spec.devices))

    async def _send(self, api: Api, method: str, path: str, document: Entry | None = None) -> bytes:
        """Make a request that changes something, and count it.

        Raises:
            ApiError: it is refused, or no answer comes.
        """
        result = "failed"
        try:
            answer = await api.call(method, path, document)
            result = "written"
            return answer
        finally:
            self._counts.slice_writes[result] += 1

    def _taints_come_back(self, *, are_there: bool) -> None:
        """Leave out what is not healthy where the API server drops the taints that would keep pods away from it."""
        if are_there or not self._knows_taints:
            return
        self._knows_taints = False
        self._untainted.report_once(f"it has dropped those of {self._settings.driver}")
        self.changed()

    async def _node(self, api: Api) -> dict[str, Any]:
        """The Node, as the owner of what goes with it.

        Raises:
            ApiError: there is none of that name, or it cannot be read.
        """
        name = self._settings.node
        node = read(await api.call("GET", f"/api/v1/nodes/{name}"), _Node)
        return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": node.metadata.uid, "controller": True}

    async def withdraw(self, api: Api) -> None:
        """Delete all slices of ours.

        Raises:
            ApiError: that cannot be done.
        """
        await self._list(api)
        for it in list(self._seen.values()):
            await self._write(api, Write(it.name, it.pool, it.version, None))
        await self._keep(frozenset())
