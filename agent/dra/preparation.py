"""Prepares ResourceClaims: reads them from the API server, gives their devices, makes hardware ready, writes their CDI files.

All of it can be done again at any time: the kubelet repeats calls after errors, after its own restart and after a boot. What
was prepared in this boot is not prepared twice, since a pod may run with it. The record is the ledger: it outlives restarts
of ours, and what it says of a claim is enough to unprepare it without the API server.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol

import anyio
import structlog
from msgspec import Struct, field

from agent.cdi.directory import UID, ClaimFiles
from agent.cdi.on_demand import Cdi
from agent.cdi.spec import claim_driver
from agent.claims.ledger import Ledger, names_of
from agent.discovery.sources import boot_id
from agent.dra import claims
from agent.dra.claims import AGAIN, Allocated, Candidate, Given, grouped
from agent.dra.names import pool_name
from agent.dra.slices import Named, Offer, entries
from agent.hardware.jobs import HardwareQueue
from agent.inventory.inventory import Inventory
from agent.inventory.ownership import is_meant_for_one, is_same
from agent.inventory.selection import Found
from agent.kubelet.allocation import Allocator, Starter
from agent.kubelet.wire import PreparedDevice
from agent.kubelet.witnesses import PodResourcesError, list_pods
from agent.kubernetes.api import ApiError
from agent.model import HEALTHY, Held, ResourceClaim
from agent.runtime import pacing
from agent.runtime.counts import Counts
from agent.runtime.errors import words
from agent.runtime.problems import Problems, Troubles
from agent.runtime.workers import NoWorkerError, OneAtATime
from backends.base import AllocationRefused, Backend, ContainerEdits, Device, Host, Mount

_WRITE_DEADLINE: Final = 10.0  # seconds that the disk may take; the kubelet waits 45 for all of it (D3)
_LIST_DEADLINE: Final = 5.0  # seconds
_FIRST_COLLECTION: Final = 2.0  # seconds that the start waits for the kubelet, the API server and the disk
_COLLECT_AGAIN: Final = (
    10.0  # seconds before a kubelet or an API server that did not answer is asked again, and between looks
)
_METADATA: Final = "dra-device-metadata"  # as the helper of Go drivers calls it (kubeletplugin/metadata.go)

log = structlog.get_logger()

ReadClaim = Callable[[str, str], Awaitable[Mapping[str, Any]]]
"""The ResourceClaim of this namespace and name, as the API server has it; raises ApiError, of status 404 if there is none."""


class GrantSink(Protocol):
    """The part of the daemon that hears of claims."""

    async def allocated(self, given: Sequence[Held]) -> None:
        """Put what is about to be given into the ledger; returns when that is kept."""

    async def unprepared(self, ended: Sequence[Held]) -> None:
        """Undo what was done for these, which the ledger has dropped; returns when that is kept."""


class House(Struct, frozen=True):
    """The parts of the daemon that a driver needs."""

    host: Host
    node: GrantSink
    ledger: Ledger
    inventory: Inventory
    backends: Mapping[str, Backend[Any]]
    """Those in force, by their kinds."""
    allocator: Allocator
    starter: Starter
    cdi: Cdi
    pod_resources: Path
    """The kubelet's podresources socket."""
    counts: Counts
    """Has the preparations."""
    giving: set[tuple[str, str]] = field(default_factory=set)
    """Slots that are being given by a driver of ours, and perhaps not in the ledger yet."""
    others: frozenset[str] = frozenset()
    """The names of drivers that serve, beside this one, what pods have by an earlier configuration."""


class Called(Struct, frozen=True):
    """A ResourceClaim, as the kubelet names it."""

    uid: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"ResourceClaim {self.namespace}/{self.name}"


class Preparer:
    """Prepares and unprepares the claims of one driver."""

    def __init__(
        self,
        driver: str,
        node: str,
        house: House,
        claim: ReadClaim,
        serves: Callable[[], Iterable[str]],
        directory: Path,
        problems: Problems,
    ) -> None:
        """Prepare.

        Args:
            driver: its name.
            node: the Node's name, as the pools have it.
            house: the daemon's parts.
            claim: asks the API server for a claim.
            serves: names the resources that are served by dynamic resource allocation now.
            directory: of files of ours, which the kubelet and container runtimes see at the same path.
            problems: is told which claims that pods have cannot be recorded.
        """
        self._driver, self._node, self._house, self._claim, self._serves = driver, node, house, claim, serves
        self._files = ClaimFiles(house.host, driver, directory / _METADATA)
        self._disk = OneAtATime("CDI of claims")
        self._boot = boot_id(house.host)
        self._prepared: set[str] = set()
        """UIDs of the claims that are ready since this boot."""
        self._touched: set[str] = set()
        """UIDs of the claims that the kubelet has called us for."""
        self._turns = HardwareQueue()  # for a claim, by its UID: one thing at a time is done about it
        self._is_recalled = self._is_collected = False
        self.adopted = asyncio.Event()
        """Set once all claims that pods have are in the ledger, as far as the kubelet lists them."""
        self._unadopted = Troubles(
            lambda claim: problems.trouble(
                "dra", f"ResourceClaim {claim}, which a pod has, is not recorded", "claim-not-adopted", claim=claim,
                then="trying again; until then no resource changes from DRA to the device plugin API",
            )
        )  # fmt: skip
        self._unwritten = Troubles(
            lambda claim: problems.trouble(
                "dra", f"the CDI specification of {claim} was removed", "claim-not-written", claim=claim,
                then="writing it again is tried; until then a container of its pods that starts again fails",
            )
        )  # fmt: skip
        self._named = Named(house.inventory)

    def close(self) -> None:
        """End the idle thread, and what was reported."""
        self._disk.close()
        self._unadopted.tell({})
        self._unwritten.tell({})

    def pools(self, claim: str = "") -> dict[str, str]:
        """Pool → its resource, of what is served now; of what this claim has (its UID), it may have another API since."""
        names = self._house.inventory.names() if claim in self._prepared else self._serves()
        return {pool_name(self._node, name): name for name in names}

    def devices(self, resource: str) -> Mapping[str, Found]:
        """The devices of a resource by their names in its pool."""
        return self._named.of(resource)

    # --- prepare ---

    async def prepare(self, called: Called) -> list[PreparedDevice]:
        """Make the devices of a claim ready for its pods.

        Raises:
            AllocationRefused: with a sentence for the pod's owner; the kubelet asks again.
        """
        began, result, resources = time.monotonic(), "refused", {""}
        try:
            _check_uid(called)
            async with self._turn(called.uid):
                self._touched.add(called.uid)
                allocated = await self._read(called)
                pools = self.pools()
                resources = {pools.get(it.pool, "") for it in allocated.results}
                ready = await self._prepare(allocated)
            result = "prepared"
            return ready
        finally:
            self._house.counts.prepares.update((resource, result) for resource in resources)
            self._house.counts.preparing.observe(time.monotonic() - began)

    async def _read(self, called: Called) -> Allocated:
        try:
            return claims.read(
                await self._claim(called.namespace, called.name),
                called.uid, called.namespace, called.name, self._driver,
            )  # fmt: skip
        except ApiError as error:
            raise AllocationRefused(f"{called} cannot be read: {error.sentence.rstrip('.')}. {AGAIN}.") from error

    async def _prepare(self, claim: Allocated) -> list[PreparedDevice]:
        if any(it.claim is not None and it.claim.boot == self._boot for it in self._house.ledger.prepared(claim.uid)):
            try:
                await self._recall()  # else what a pod runs with would be made ready again
            except (PodResourcesError, OSError, NoWorkerError) as error:
                raise AllocationRefused(
                    f"Whether ResourceClaim {claim.namespace}/{claim.name} is prepared is not known: {words(error)}. {AGAIN}."
                ) from error
        given = await self._give(claim)
        if claim.uid not in self._prepared:
            for resource, those in grouped(given, lambda it: it.resource).items():
                if using := [
                    it for it in those if it.held
                ]:  # others are an admin's, for whom nothing is done to hardware
                    await self._make_ready(resource, using)
            given = self._still(claim, given)
        files, metadata, ready = await self._edits(claim, given)
        try:
            async with pacing.running_timeout(_WRITE_DEADLINE):
                await self._disk.run(partial(self._files.write, claim.uid, files, metadata))
        except (OSError, NoWorkerError, TimeoutError) as error:
            why = words(error) if str(error) else f"not done within {_WRITE_DEADLINE:g} s"
            raise AllocationRefused(
                f"The CDI specification of ResourceClaim {claim.namespace}/{claim.name}, by which the container runtime knows "
                f"its devices, cannot be written: {why}. {AGAIN}; this node's administrator must let Fairlead write there."
            ) from error
        self._prepared.add(claim.uid)
        return ready

    async def _give(self, claim: Allocated) -> tuple[Given, ...]:
        """Choose IDs and put them into the ledger; what was given for an earlier allocation of the claim ends."""
        given = self._choose(claim)
        held = [it for one in given for it in one.held]
        slots = {it.slot for it in held}
        self._house.giving.update(slots)
        try:
            before = self._house.ledger.prepared(claim.uid)
            if any(claims.is_stale(it, claim) for it in before):
                self._prepared.discard(claim.uid)
                await self._house.node.unprepared(self._house.ledger.unprepared(claim.uid))
            if held and held != before:
                await self._house.node.allocated(held)
        finally:
            self._house.giving.difference_update(slots)
        return given

    def _choose(self, claim: Allocated) -> tuple[Given, ...]:
        pools = self.pools(claim.uid)
        wanted = {(it.pool, it.device) for it in claim.results}
        candidates = {it: self._candidate(pools.get(it[0]), it[1]) for it in wanted}
        return claims.give(claim, candidates, self._boot, self._house.giving, is_prepared=claim.uid in self._prepared)

    def _candidate(self, resource: str | None, device: str) -> Candidate | None:
        if resource is None or (found := self.devices(resource).get(device)) is None or found.placed is None:
            return None
        inventory = self._house.inventory
        slots = (inventory.slot(resource, device_id) for device_id in found.placed.ids)
        return Candidate(
            resource,
            found.backend,
            tuple(it for it in slots if it is not None and it.device is not None),
            inventory.claims(resource),
            tuple(self._in_the_way(resource, found.device)),
            is_meant_for_one(found.device, found.placed),
        )

    def _in_the_way(self, resource: str, device: Device) -> Iterable[Held]:
        """The claims because of which no other pod can have this device.

        They are of its hardware: all that another resource or plugin gave, and what its own resource gave if that is exclusive
        or is the device itself under another ID.
        """
        if not any(map(self._house.ledger.holds, device.hardware)):
            return ()
        held = (it for it in self._house.ledger.held() if not device.hardware.isdisjoint(it.hardware))
        return (
            it
            for it in held
            if it.resource != resource
            or not device.exclusive.isdisjoint(it.hardware)
            or (is_same(it, device) and not self._is_there(it))
        )

    def _is_there(self, held: Held) -> bool:
        """Whether the ID that is held still has the device that was given."""
        device = self._house.inventory.device(held.slot)
        return device is not None and is_same(held, device)

    async def _make_ready(self, resource: str, given: Sequence[Given]) -> None:
        grants = sorted((grant for it in given for grant in it.grants), key=lambda it: it.id)
        held = [held for it in given for held in it.held]
        await self._house.allocator.make_ready(resource, grants, held, is_asked_again=True)
        wanted = [grant.id for it in given if it.result.resets for grant in it.grants]
        as_ever = [grant.id for it in given if not it.result.resets for grant in it.grants]
        if (check := self._house.starter.of(resource)) is not None and as_ever:
            await check(resource, as_ever)
        if wanted:
            await self._house.starter.start(resource, wanted, resets=True)

    def _still(self, claim: Allocated, before: Sequence[Given]) -> tuple[Given, ...]:
        """The devices as they are after we waited; making them ready may have changed them (their driver, their nodes).

        Raises:
            AllocationRefused: one is gone, not well, or another by now.
        """
        now = self._choose(claim)
        for was, it in zip(before, now, strict=True):
            if (was.device.hardware, was.device.identity) != (it.device.hardware, it.device.identity):
                raise AllocationRefused(
                    f"Device {it.result.device} of pool {it.result.pool} was exchanged for another while it was made ready. "
                    f"{AGAIN}."
                )
        return now

    async def _edits(
        self, claim: Allocated, given: Sequence[Given]
    ) -> tuple[dict[str, ContainerEdits], dict[str, bytes], list[PreparedDevice]]:
        """What the claim's specification says, by the names of its devices; its metadata, by request; the kubelet's answer."""
        files, ready = dict[str, ContainerEdits](), list[PreparedDevice]()
        by_request = grouped(given, lambda it: it.result.request)
        metadata = {request: self._metadata(claim, those) for request, those in by_request.items()}
        unmounted = set(metadata)
        # a container gets all devices of a request and a resource, or none
        for group in grouped(given, lambda it: (it.result.request, it.resource)).values():
            if (resource := self._house.inventory.resource(group[0].resource)) is None:
                raise AllocationRefused(f"{group[0].resource} is no longer offered on this node. {AGAIN}.")
            ask = partial(self._house.allocator.edits, resource)
            whole = ask(sorted((grant for it in group for grant in it.grants), key=lambda it: it.id))
            others = sorted(await self._house.cdi.named(resource, whole))
            for it, every in zip(group, claims.spread(whole, [ask(one.grants) for one in group]), strict=True):
                name, edits = f"{claim.uid}-{it.result.cdi_name}", claims.narrowed(every, it)
                if (request := it.result.request) in unmounted:
                    unmounted.discard(request)
                    inside = claims.metadata_path(claim, request, self._driver)
                    edits = edits.merge(
                        ContainerEdits(
                            mounts=(Mount(self._files.metadata(claim.uid, request), inside, read_only=True),)
                        )
                    )
                if edits.nodes or edits.mounts or edits.env:
                    files[name] = edits
                ours = [self._files.name(name)] if name in files else []
                ready.append(
                    PreparedDevice(request, it.result.pool, it.result.device, it.result.share, (*ours, *others))
                )
                others = []
        return files, metadata, ready

    def _metadata(self, claim: Allocated, given: Sequence[Given]) -> bytes:
        attributes = dict[tuple[str, str], Any]()
        for it in given:
            kind = self._house.inventory.kind(it.resource)
            known = self._house.backends[kind].attributes if kind is not None else None
            offer = Offer(it.result.device, it.device, HEALTHY, 0, is_held=True)
            (made,) = entries([offer], it.resource, known, self._driver, (), 0.0, {}).values()
            attributes[it.result.pool, it.result.device] = made.entry["attributes"]
        return claims.metadata(claim, self._driver, given, attributes)

    # --- unprepare ---

    async def unprepare(self, called: Called) -> None:
        """Undo what was done for a claim, if anything was: by this process of ours or an earlier one.

        Raises:
            AllocationRefused: with a sentence for the pod's owner; the kubelet asks again.
        """
        _check_uid(called)
        async with self._turn(called.uid):
            self._touched.add(called.uid)
            try:
                await self._end(called.uid)
            except (OSError, NoWorkerError) as error:
                raise AllocationRefused(
                    f"The CDI specification of {called} cannot be removed: {words(error)}."
                ) from error

    async def _end(self, uid: str) -> None:
        """Remove a claim's specification and what it has; the caller has its turn.

        Raises:
            OSError: the specification cannot be removed.
            NoWorkerError: an earlier call hangs.
        """
        await self._disk.run(partial(self._files.remove, uid))
        self._prepared.discard(uid)
        if ended := self._house.ledger.unprepared(uid):
            await self._house.node.unprepared(ended)

    # --- starts ---

    async def begin(self) -> None:
        """Find what an earlier process of ours has prepared, before anything is; what takes too long is left to `collect`."""
        with anyio.move_on_after(_FIRST_COLLECTION):
            self._is_collected = await self._collect()

    async def _recall(self) -> None:
        """Find which claims are ready since this boot, once: those that have their specifications, or that pods run with.

        Raises:
            PodResourcesError: the kubelet does not say with which pods run.
            OSError: the directory of specifications cannot be read.
            NoWorkerError: an earlier call hangs.
        """
        if self._is_recalled:
            return
        there = await self._disk.run(self._files.uids)
        recorded = self._recorded()
        self._prepared |= recorded & there
        if recorded - there:  # another program may have removed their specifications
            pods = await list_pods(self._house.pod_resources, _LIST_DEADLINE)
            named = [one for it in pods for one in it.cdi_devices if claim_driver(one)]
            left = self._recorded() - there  # some may have ended meanwhile
            self._prepared |= {uid for uid in left if any(f"/claim={uid}-" in one for one in named)}
        self._is_recalled = True

    def _recorded(self) -> set[str]:
        """UIDs of the claims of this driver that the ledger has from this boot."""
        held = (it.claim for it in self._house.ledger.held() if it.claim is not None)
        return {it.uid for it in held if it.boot == self._boot and it.driver not in self._house.others}

    async def collect(self) -> None:
        """End the claims that ended while no process of ours ran, and adopt those that are not recorded, until it is done.

        What another program removes of /run/cdi is written again, always.
        """
        while True:
            await asyncio.sleep(_COLLECT_AGAIN)
            self._is_collected = self._is_collected or await self._collect()
            await self._write_removed()

    async def _write_removed(self) -> None:
        """Write the specifications of prepared claims that are not there: containers that start again are made from them."""
        refused = dict[str, str]()
        with suppress(OSError, NoWorkerError):  # if it lasts, what is prepared is refused with the reason
            there = await self._disk.run(self._files.uids) if self._prepared else set()
            for uid in sorted(self._prepared - there):
                called = uid
                try:
                    if (named := await self._disk.run(partial(self._files.named, uid))) is None:
                        continue  # a driver of another name has prepared it
                    claim = Called(uid, *named)
                    called = str(claim)
                    async with self._turn(uid):
                        if uid in self._prepared:
                            await self._prepare(await self._read(claim))
                            log.info("claim-written-again", claim=called, uid=uid)
                except AllocationRefused as error:
                    refused[called] = error.sentence.removesuffix(f". {AGAIN}.")
                except Exception as error:  # noqa: BLE001  # whatever it is, it is told, and the others are written
                    refused[called] = words(error)
        self._unwritten.tell(refused)

    async def _collect(self) -> bool:
        """Try it once; False if not all could be asked.

        A claim is over where the kubelet does not list it, and it is gone, or is reserved for no pod: of a pod that was
        removed by force, containers may still run.
        """
        try:
            await self._recall()
            pods = await list_pods(self._house.pod_resources, _LIST_DEADLINE)
            there = await self._disk.run(self._files.left)
        except (PodResourcesError, OSError, NoWorkerError):
            return False
        listed = {(it.namespace, it.claim): it.cdi_devices for it in pods if it.claim}
        recorded = {it.claim.uid: it.claim for it in self._house.ledger.held() if it.claim is not None}
        others = self._house.others  # which do the same for theirs
        missing = [it for it in recorded.values() if (it.namespace, it.name) not in listed and it.driver not in others]
        known = {(it.namespace, it.name) for it in recorded.values()}
        prefix = self._files.name("")
        of_ours = {it: next(filter(None, map(claim_driver, cdi)), "") for it, cdi in listed.items() if it not in known}
        theirs = {it: driver for it, driver in of_ours.items() if driver and driver not in others}
        lost = [(*it, driver) for it, driver in theirs.items()]  # which may have had another name
        done = [await self._collect_one(it) for it in missing]
        refused = dict[str, str]()
        adopted = [await self._adopt(*it, refused) for it in lost]
        in_use = {one.removeprefix(prefix) for cdi in listed.values() for one in cdi if one.startswith(prefix)}
        left = (it for it in there - recorded.keys() if not any(one.startswith(f"{it}-") for one in in_use))
        adopted += [await self._collect_unrecorded(uid, refused) for uid in left]
        self._unadopted.tell(refused)
        if all(adopted):
            self.adopted.set()
        return all(done + adopted)

    async def _collect_one(self, claim: ResourceClaim) -> bool:
        try:
            had = [it.claim for it in self._house.ledger.prepared(claim.uid) if it.claim is not None]
            if not await self._is_over(claim.uid, claim.namespace, claim.name, had):
                return True
        except ApiError:
            return False
        return await self._end_untouched(claim.uid)

    async def _collect_unrecorded(self, uid: str, refused: dict[str, str]) -> bool:
        """End a claim of which there are files alone, or adopt it while a pod has it; False if it is to be tried again.

        An admin's access is never recorded, and of others our state may be lost. That the kubelet does not list it proves
        nothing: one that has begun lists the pods known so far (kubelet contract: A5).
        """
        try:
            if uid in await self._disk.run(self._files.uids):  # else only metadata is left, by a boot
                if (named := await self._disk.run(partial(self._files.named, uid))) is None:
                    return True  # whether a container is yet to be made from it is unknown; a boot removes it
                if not await self._is_over(uid, *named):
                    return await self._adopt(*named, self._driver, refused)
        except (ApiError, OSError, NoWorkerError):
            return False
        return await self._end_untouched(uid)

    async def _is_over(self, uid: str, namespace: str, name: str, had: Iterable[ResourceClaim] = ()) -> bool:
        """Whether a claim that the kubelet does not list, and that `had` this, has ended.

        Raises:
            ApiError: the API server does not say.
        """
        try:
            return claims.is_over(await self._claim(namespace, name), uid, self._driver, self._node, had)
        except ApiError as error:
            if error.status == HTTPStatus.NOT_FOUND:
                return True
            raise

    async def _end_untouched(self, uid: str) -> bool:
        """End a claim, unless the kubelet has called us for it meanwhile; False if it could not be ended."""
        async with self._turn(uid):
            if uid not in self._touched:
                try:
                    await self._end(uid)
                except (OSError, NoWorkerError):
                    return False
                log.info("claim-collected", uid=uid)
        return True

    async def _adopt(self, namespace: str, name: str, driver: str, refused: dict[str, str]) -> bool:
        """Take in a claim that a pod has and our state has lost; False: try again. Notes why it is `refused`."""
        try:
            found = await self._claim(namespace, name)
            uid = str(found["metadata"]["uid"])
            claim = claims.read(found, uid, namespace, name, driver)
            async with self._turn(uid):
                if uid not in self._touched:
                    self._prepared.add(uid)  # a pod runs with it
                    given = await self._give(claim)
                    log.info(
                        "claims-adopted", count=len(given), slots=names_of(h.slot for it in given for h in it.held)
                    )
        except ApiError as error:
            return error.status == HTTPStatus.NOT_FOUND
        except AllocationRefused as error:  # its device may be away at the moment
            refused[f"{namespace}/{name}"] = error.sentence.removesuffix(f". {AGAIN}.")
            return False
        return True

    def _turn(self, uid: str) -> AbstractAsyncContextManager[object]:
        """Nothing else is done about this claim meanwhile."""
        return self._turns.take({uid}, moves=False)


def _check_uid(called: Called) -> None:
    if UID.fullmatch(called.uid) is None:
        raise AllocationRefused(f"{called} has {called.uid[:100]!r} for a UID, which is none.")
