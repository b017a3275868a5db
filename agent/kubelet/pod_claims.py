"""Asks the kubelet who holds what, podresources first and then its checkpoint, and lets the ledger judge.

Asked after an Allocate, while a claim may be ending, else every `IDLE` seconds. A witness that cannot be
reached ends nothing (design, "claims"). Where a list of ours makes the kubelet write no checkpoint, it is asked less and
less often.

Before each list the checkpoint is read, and before the first of a resource both are asked: a list that lacks an ID which
the checkpoint says a pod holds may put the next kubelet into a crash loop, an ID of ours or not (kubelet contract: A7.2).

A kubelet forgets IDs that are in use: all of them where its checkpoint is lost (A11.1), those of an Allocate under way where a
List meets it (A11.8, kubernetes 137534). Then the cgroups say which pods run.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, Protocol

import structlog

from agent.claims.ledger import Answer, Containers, Ledger, Pods, Trace, Tracer, Witnessed, names_of
from agent.inventory.inventory import Inventory
from agent.kubelet import witnesses
from agent.kubelet.wire import PodDevices
from agent.kubelet.witnesses import (
    Checkpoint,
    CheckpointEntry,
    CheckpointError,
    CheckpointReader,
    DamagedError,
    PodResourcesError,
    Version,
    list_pods,
    read_at_once,
)
from agent.model import Held, SlotKey
from agent.runtime import pacing
from agent.runtime.pacing import Backoff, Doorbell
from agent.runtime.problems import Problems, Trouble
from agent.runtime.workers import NoWorkerError, Workers, in_batches, in_slices

IDLE: Final = 60.0
"""Seconds between two questions while nothing happens."""

_AFTER_ALLOCATE: Final = 1.0  # seconds: the kubelet knows the pod by then
_WHILE_ENDING: Final = 2.0  # seconds between looks for the second witness; doubling where none comes
_LIST_DEADLINE: Final = 5.0  # seconds
_LIST_WAITS: Final = 1.0  # seconds at most that a list waits for the checkpoint
_FIRST_LIST_WAITS: Final = 2.0  # seconds at most that a resource's first list waits for both witnesses
_WHILE_FORGOTTEN: Final = 5.0  # seconds between looks whether the pods that the kubelet has forgotten run
_ENDS_WITHIN: Final = 2.0  # seconds; of a pod that was deleted by force, containers run for 1.6 s more (A11.2)
_LOOKS: Final = 8  # in that time, while an Allocate waits

_CHECKPOINT, _PODRESOURCES = "checkpoint", "podresources"

log = structlog.get_logger()


class ClaimSink(Protocol):
    """The part of the daemon that hears of claims."""

    def adopted(self, held: Sequence[Held]) -> None:
        """The ledger took these claims from the kubelet; `claims_settled` follows."""

    def released(self, ended: Sequence[Held]) -> None:
        """The ledger dropped these claims, which neither witness has; `claims_settled` follows."""

    def claims_settled(self) -> None:
        """`adopted` and `released` were called for all that an answer changed."""

    def claims_asked(self) -> None:
        """Podresources and the checkpoint were asked."""

    def resend(self, resource: str) -> None:
        """Send this resource's list again: the kubelet writes its checkpoint then."""


class PodClaims:
    """Keeps the ledger in step with podresources and the checkpoint."""

    def __init__(
        self,
        ledger: Ledger,
        inventory: Inventory,
        node: ClaimSink,
        pod_resources: Path,
        plugin_dir: Path,
        *,
        sys: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        problems: Problems | None = None,
    ) -> None:
        """Prepare.

        Args:
            ledger: is told who holds what.
            inventory: what is ours.
            node: is told of claims that begin and end, some at a time.
            pod_resources: the podresources socket.
            plugin_dir: where the checkpoint lies.
            sys: where the host's /sys is seen, with the pods' cgroups.
            clock: monotonic seconds.
            problems: is told which of them does not answer.
        """
        self._ledger, self._inventory, self._node = ledger, inventory, node
        self._socket = pod_resources
        self._tracer = Tracer(inventory)
        self._traces: dict[SlotKey, Answer] = {}  # of claims whose hardware is not known
        self._traced_at = -1  # the inventory's revision
        self._seen: tuple[Checkpoint | None, int] = (
            None,
            -1,
        )  # what a list was held against, and the inventory's revision
        # of resources that are not ours: the last answer for these IDs, and what the container got
        self._foreign: dict[tuple[str, tuple[str, ...]], tuple[bytes, Trace]] = {}
        self._clock = clock
        self._plugin_dir, self._sys = plugin_dir, sys
        self._workers = Workers("cgroups", limit=2)
        self._checkpoint = CheckpointReader(plugin_dir)
        self._given: Mapping[SlotKey, Containers] = {}  # who has what, by the checkpoint that was indexed last
        self._indexed: Checkpoint | None = None
        self._compared: Checkpoint | None = None  # the checkpoint that the claims were held against
        self._record: tuple[object, frozenset[str]] = (None, frozenset())  # which kubelet, and pods in its checkpoint
        self._lost = Pods()  # whom the record before had, where a kubelet has begun with one that was not compared
        self._asked_about: frozenset[str] = frozenset()  # the resources that were ours when both had been asked
        self._unrecorded = ""  # of what a pod holds what the checkpoint lacks: the next kubelet gives that away (A11.1)
        self._had_written: tuple[Version | None] | None = None  # the checkpoint that lay there when that was seen
        self._resent_at: tuple[Version | None] | None = None  # the checkpoint that lay there when lists were sent again
        self._pause = Backoff(_WHILE_ENDING, IDLE)
        self._asking, self._adopting = asyncio.Lock(), asyncio.Lock()
        self._allocated = Doorbell()
        self._silent = {name: _silence_of(name, problems or Problems()) for name in (_CHECKPOINT, _PODRESOURCES)}
        self.being_given: set[SlotKey] = set()
        """What an Allocate is giving to one pod at this moment, as the allocator notes it."""
        self.holders: Mapping[SlotKey, tuple[PodDevices, ...]] = {}
        """Which containers have what, as the kubelet said last; of what it has forgotten, as it said before."""

    def pods(self, slot: SlotKey) -> list[str]:
        """The pods that have this slot, as `namespace/name`, by the kubelet's last answer."""
        return [f"{it.namespace}/{it.pod}" for it in self.holders.get(slot, ())]

    def uids_of(self, slot: SlotKey) -> dict[str, str]:
        """The same pods, each with its UID, by the checkpoint; empty where that does not say."""
        uids = self.uids(slot[0])
        return {f"{it.namespace}/{it.pod}": uids.get((it.container, slot[1]), "") for it in self.holders.get(slot, ())}

    def uids(self, resource: str) -> Mapping[tuple[str, str], str]:
        """(Container, device ID) → the UID of its pod, from the checkpoint; empty where several pods have it."""
        checkpoint = self._checkpoint.last
        uids: dict[tuple[str, str], str] = {}
        for it in checkpoint.entries if checkpoint else ():
            for device_id in it.ids if it.resource == resource else ():
                at = it.container, device_id
                uids[at] = it.pod_uid if uids.setdefault(at, it.pod_uid) == it.pod_uid else ""
        return uids

    def unnamed(self, slot: SlotKey) -> dict[str, str]:
        """UID → container of the pods that have this slot by the checkpoint or by their cgroups, and that no List names."""
        named, uids = self.holders.get(slot, ()), {uid: it[0] for uid, it in self._given.get(slot, {}).items()}
        if len({(it.namespace, it.pod) for it in named}) >= len(uids):
            uids.clear()
        if not named and (claim := self._ledger.of(slot)) is not None:
            uids = dict.fromkeys(claim.pods, "") | uids
        return uids

    async def two_pods(self, slots: Iterable[SlotKey]) -> list[SlotKey]:
        """Those of these slots that two pods hold, by the checkpoint of this moment."""
        await self._index_now()
        return [slot for slot in slots if len(self._given.get(slot, ())) > 1]

    async def holder(self, slots: Sequence[SlotKey]) -> tuple[SlotKey, str] | None:
        """Which of these claimed slots a pod has for certain, and in words which pod; None: all may be given to the next.

        The kubelet's checkpoint is no proof: it may be from before the pod's end, and gives an init container's devices to the
        later containers of the same pod (A4), of which nothing runs then. It names the pods whose cgroups are looked at. A
        List is asked where those are not to be seen: it tells what the kubelet knows now, without init containers. Asked
        more often, it would be what makes the kubelet forget the ID that it is about to give (A11.8).
        """
        await self._index_now()
        claimed = {slot: claim.pods if (claim := self._ledger.of(slot)) else Pods() for slot in slots}
        uids = {slot: pods | self._given.get(slot, {}).keys() for slot, pods in claimed.items()}
        for _ in range(_LOOKS):
            running = await self._running() if any(uids.values()) else None
            found = next(((slot, it & running) for slot, it in uids.items() if running and it & running), None)
            if found is None:
                break
            await asyncio.sleep(_ENDS_WITHIN / _LOOKS)
        else:
            if found is not None:
                named = self.pods(found[0]) or [f"the pod with the UID {uid}" for uid in sorted(found[1])]
                return found[0], f"{named[0]}, of which processes run,"
        unseen = {slot for slot, pods in claimed.items() if running is None or not pods}
        if unseen:
            with suppress(PodResourcesError):
                for it in await list_pods(self._socket, _LIST_WAITS):
                    for slot in ((it.resource, device_id) for device_id in it.ids):
                        if slot in unseen:
                            return slot, f"{it.namespace}/{it.pod} ({it.container})"
        return None

    def allocated(self) -> None:
        """Ask soon: an Allocate was answered."""
        self._allocated.set()

    def close(self) -> None:
        """End the idle threads; more are made where there is more to ask."""
        self._checkpoint.close()
        self._workers.close()

    async def run(self) -> None:
        """Ask for ever."""
        try:
            while True:
                # a List would make a kubelet until 1.37 forget what is being given, if a pod has ended (A11.8)
                while self.being_given:  # noqa: ASYNC110
                    await asyncio.sleep(_AFTER_ALLOCATE / 10)
                self._allocated.clear()
                await self.ask()
                await self._wait()
        finally:
            self.close()

    async def _wait(self) -> None:
        wait = self._pause.delay if self._ledger.ending() else IDLE
        if (judgement := self._ledger.next_judgement(self._clock())) is not None:
            wait = min(wait, judgement + _AFTER_ALLOCATE)
        if self._ledger.runs_forgotten():
            wait = min(wait, _WHILE_FORGOTTEN)
        await self._allocated.rung(wait, gather=_AFTER_ALLOCATE)

    async def ask(self) -> None:
        """One round: List, then the checkpoint that lay there after it."""
        async with self._asking:
            await self._round()

    async def _round(self) -> None:
        try:
            await self._ask()
        finally:  # a witness that does not answer is not asked again by each first list
            self._asked_about = frozenset(self._inventory.names())
            self._node.claims_asked()

    async def _ask(self) -> None:
        asked = self._clock()
        if self._kubelet() != self._record[0]:  # a List would have it drop from its record the pods that have ended
            with suppress(CheckpointError):
                self._note_record(await self._checkpoint.read(_LIST_WAITS))
        present = await self._ask_pod_resources()
        try:
            checkpoint = await self._checkpoint.read()
        except CheckpointError as error:
            # without knowing which checkpoint lay there, no later one can be told from it: judge nothing
            self._silent[_CHECKPOINT].report_once(str(error))
            self._unrecorded = self._lacking(frozenset(), present) if isinstance(error, DamagedError) else ""
            await self._adopt(present or set())
            if isinstance(error, DamagedError):
                await self._compare(None, present, is_asked=True)
            checkpoint = None
        else:
            self._silent[_CHECKPOINT].healed()
            await self._judge(present, asked, checkpoint)
        self._have_written(checkpoint.version if checkpoint else None)

    def _have_written(self, version: Version | None) -> None:
        """Send lists again where the end of a claim waits for a newer checkpoint than this one; one list where this lacks a pod.

        It was removed or damaged, or an older one was written last. That list goes once: the kubelet may have no room to write.
        """
        if self._unrecorded and self._had_written != (version,):
            self._had_written = (version,)
            self._node.resend(self._unrecorded)
        resources, before = self._ledger.awaiting_checkpoint(self._clock()), self._resent_at
        self._resent_at = (version,) if resources else None
        if resources and before == (version,):
            self._pause.next()
        else:
            self._pause.reset()
        for resource in resources:
            self._node.resend(resource)

    async def confirm(self, resource: str, listed: Callable[[], Set[str]]) -> frozenset[str]:
        """Adopt what pods hold of a resource by the checkpoint of this moment, before a list of it is sent.

        The list may lack such a device, or offer its hardware under another ID.

        Args:
            resource: of ours.
            listed: the IDs of the list, as it is when called.

        Returns:
            the IDs that pods hold, that we did not give and that the list lacks.
        """
        if resource not in self._asked_about:
            with suppress(TimeoutError):
                async with pacing.running_timeout(_FIRST_LIST_WAITS):
                    await self._ask_about(resource)
        if self._checkpoint.is_unchanged():
            checkpoint = self._checkpoint.last
        elif self._checkpoint.under_way and self._silent[_CHECKPOINT].lasts:
            return frozenset()  # it hangs, which was reported
        else:
            try:
                checkpoint = await self._checkpoint.read(_LIST_WAITS)
            except CheckpointError as error:
                self._silent[_CHECKPOINT].report_once(str(error))
                if isinstance(error, DamagedError):
                    await self._compare(None)
                return frozenset()
        if checkpoint is None or checkpoint is not self._compared:
            await self._compare(checkpoint)
        else:
            self._note_record(checkpoint)
        seen = checkpoint, self._inventory.revision
        if seen != self._seen:
            await self._see_foreign(checkpoint)
            if self._traced_at != self._inventory.revision and (self._foreign or self._traces):
                await self._trace_again()
            self._seen = seen
        held, listed_now = checkpoint.held.get(resource, frozenset()) if checkpoint else frozenset[str](), listed()
        unlisted = held - listed_now
        strangers = frozenset(it for it in unlisted if not self._ledger.has((resource, it)))
        if missing := unlisted | self._ledger.bare_among(resource, held):
            await self._adopt({(resource, device_id) for device_id in missing}, checkpoint)
        return strangers

    async def _ask_about(self, resource: str) -> None:
        async with self._asking:
            if resource not in self._asked_about:  # by another's first list, meanwhile
                await self._round()

    def _lacking(self, recorded: Set[SlotKey], present: Set[SlotKey] | None) -> str:
        """One of our resources of which a List shows more than was recorded; empty: there is none. The record is of all at once."""
        return min({name for name, _ in (present or set()) - recorded} & set(self._inventory.names()), default="")

    async def _judge(self, present: set[SlotKey] | None, asked: float, checkpoint: Checkpoint | None) -> None:
        held = checkpoint.held if checkpoint else {}
        slots = {(name, device_id) for name, ids in held.items() for device_id in ids}
        self._unrecorded = self._lacking(slots, present)
        await self._adopt(slots | (present or set()), checkpoint)  # a List leaves out init containers (A5)
        await self._see_foreign(checkpoint)
        await self._compare(checkpoint, present, is_asked=True)
        version = checkpoint.version if checkpoint else None
        if present is not None:
            self._ledger.listed(present, asked, self._clock(), version)
        if version is not None:
            await self._end(slots, version)

    async def _compare(
        self, checkpoint: Checkpoint | None, present: set[SlotKey] | None = None, *, is_asked: bool = False
    ) -> None:
        """Find the claims that the kubelet has forgotten, and those of two pods; with a List's answer also those that run.

        A kubelet that goes on may write an older record last: what that lacks is asked of a List before it counts as forgotten.
        """
        await self._index(checkpoint)
        sure = is_asked or self._kubelet() != self._record[0]
        self._note_record(checkpoint)
        self._compared, had, self._lost = checkpoint, self._lost, Pods()
        lost = bool(had)
        if checkpoint is None:  # a kubelet that has run all the while, or has just listed, still knows what it says
            kubelet, (before, pods) = self._kubelet(), self._record
            if not (lost := kubelet not in (None, before)):
                return
            self._record = kubelet, pods  # what it asks for from now on, it knows
        has_changed = is_done = False
        try:
            shown = {slot: Pods(self.pods(slot)) for slot in present or ()}
            slots = [held.slot for held in self._ledger.held()]
            looks = bool(slots) and (present is not None or lost or self._ledger.misses(self._given))
            running = await self._running() if looks else None
            if running and not sure:
                self._allocated.set()
            if checkpoint is not None and running is not None:
                lost = not had.isdisjoint(running)  # whom it lacks may have ended before it began, while we stood still
            served = checkpoint.served() if checkpoint and looks else {}
            seen = Witnessed(self._given, shown, running, served, is_lost=lost, is_sure=sure)
            async for batch in in_batches(slots):
                if changed := self._ledger.known(seen, batch):
                    self._node.adopted(changed)
                    has_changed = True
            is_done = True
        finally:  # a first list that stops waiting cancels this: what was done so far counts, the rest is to be done
            if not is_done:
                self._compared, self._lost = None, self._lost | had
            if has_changed:
                self._node.claims_settled()

    async def _index_now(self) -> None:
        """Have the index of the checkpoint that lies there at this moment, if it can be read."""
        with suppress(CheckpointError):
            await self._index(await self._checkpoint.read(_LIST_WAITS))

    async def _index(self, checkpoint: Checkpoint | None) -> None:
        if checkpoint is self._indexed:
            return
        given: defaultdict[SlotKey, dict[str, tuple[str, ...]]] = defaultdict(dict)
        for entry in checkpoint.entries if checkpoint else ():
            container = (entry.container,)  # one for all of its IDs
            for device_id in await in_slices(entry.ids):
                pods = given[entry.resource, device_id]
                pods[entry.pod_uid] = pods.get(entry.pod_uid, ()) + container
        self._indexed, self._given = checkpoint, dict(given)

    def _note_record(self, checkpoint: Checkpoint | None) -> None:
        """Note with which record the kubelet has begun: it reads its checkpoint at its start, and never removes it.

        One that lacks all pods of the record before has lost it, unless they had ended. Where no cgroups tell, this must be
        seen before any of them has ended: so it is looked at before the first list that a kubelet is sent, and before a List.
        """
        if checkpoint is None:
            return
        (before, had), kubelet = self._record, self._kubelet()
        self._record = kubelet, Pods(entry.pod_uid for entry in checkpoint.entries)
        if kubelet != before and had.isdisjoint(self._record[1]):
            self._lost |= had

    def stream_ended(self) -> None:
        """Note the record of a kubelet that may be gone: the pods that it has dropped since are no loss of the next one's."""
        with suppress(BlockingIOError):
            is_known = self._checkpoint.is_unchanged()
            self._note_record(self._checkpoint.last if is_known else read_at_once(self._plugin_dir))

    def _kubelet(self) -> object:
        """Tells a new kubelet by its socket: the next may have the same inode, and not the same time (A6)."""
        with suppress(OSError):
            found = (self._plugin_dir / "kubelet.sock").lstat()
            return found.st_ino, found.st_ctime_ns
        return None

    async def _running(self) -> Pods | None:
        """UIDs of the pods that have processes now; None: that is not to be seen."""
        if self._sys is None:
            return None
        try:
            async with pacing.running_timeout(_LIST_WAITS):
                return await self._workers.start(partial(witnesses.running_pods, self._sys))
        except (TimeoutError, NoWorkerError):
            return None

    async def _end(self, present: set[SlotKey], version: Version) -> None:
        """End the claims that the checkpoint leaves out as well."""
        over: list[Held] = []
        try:
            async for batch in in_batches(self._ledger.doubted()):
                if ended := self._ledger.checkpoint(present, version, batch):
                    self._node.released(ended)
                    over += ended
        finally:  # as above
            if over:
                log.info("claims-ended", count=len(over), slots=names_of(held.slot for held in over))
                self._node.claims_settled()

    async def _adopt(self, present: set[SlotKey], checkpoint: Checkpoint | None = None) -> None:
        """Adopt claims that the ledger lacks: our state was lost, or pods of another plugin are still there."""
        async with self._adopting:
            await self._note_traces(checkpoint)
            await self._take_in(present)

    async def _take_in(self, present: set[SlotKey]) -> None:
        kinds = {name: self._inventory.kind(name) for name in {name for name, _ in present}}
        news: list[Held] = []
        try:
            async for batch in in_batches(sorted(slot for slot in present if kinds[slot[0]] is not None)):
                seen = {slot: kind for slot in batch if (kind := kinds[slot[0]]) is not None}
                devices = {slot: device for slot in seen if (device := self._inventory.device(slot)) is not None}
                bare = {slot: kind for slot, kind in seen.items() if self._is_bare(slot)}
                answers = {slot: self._traces[slot] for slot in bare if slot in self._traces}
                traced = self._tracer.traced(answers, bare, self._inventory.device)
                if fresh := self._ledger.adopt(seen, devices, self._clock(), traced):
                    self._node.adopted(fresh)
                    news += fresh
        finally:  # as above
            self._settle(news)

    async def _see_foreign(self, checkpoint: Checkpoint | None) -> None:
        """Adopt what pods have of our hardware through other resources; each answer is followed once."""
        if checkpoint is None:
            return
        async with self._adopting:
            seen, fresh = {}, []
            for entry in checkpoint.entries:
                if self._inventory.kind(entry.resource) is not None:
                    continue
                known = self._foreign.get(key := (entry.resource, entry.ids))
                if known is None or known[0] != entry.response:
                    known = entry.response, await entry.trace()
                    fresh.append(key)
                seen[key] = known
            self._foreign = seen
            if fresh:
                await self._follow_foreign(fresh)

    async def _follow_foreign(self, entries: Iterable[tuple[str, tuple[str, ...]]]) -> None:
        found = (
            Held(resource, device_id, backend, hardware, foreign=True)
            for resource, ids in entries
            for backend, hardware in self._tracer.ours(self._foreign[resource, ids][1])
            for device_id in ids
        )
        news: list[Held] = []
        async for batch in in_batches(found):
            if fresh := self._ledger.adopt_foreign(batch, self._clock()):
                self._node.adopted(fresh)
                news += fresh
        self._settle(news)

    def _settle(self, adopted: Sequence[Held]) -> None:
        if adopted:
            log.info("claims-adopted", count=len(adopted), slots=names_of(held.slot for held in adopted))
            self._node.claims_settled()

    async def _note_traces(self, checkpoint: Checkpoint | None) -> None:
        """Note what pods were given under IDs whose devices are not known."""
        bare: defaultdict[SlotKey, list[CheckpointEntry]] = defaultdict(list)
        for entry in checkpoint.entries if checkpoint else ():
            if self._inventory.kind(entry.resource) is not None:
                for slot in await in_slices(filter(self._is_bare, entry.slots())):
                    bare[slot].append(entry)
        traced: dict[tuple[int, ...], Answer] = {}  # all devices of a container have one
        async for batch in in_batches(bare.items()):
            for slot, entries in batch:
                pods, key = frozenset(entry.pod_uid for entry in entries), tuple(map(id, entries))
                if slot not in self._traces or self._traces[slot].pods != pods:
                    if key not in traced:
                        traced[key] = await _answer(pods, entries)
                    self._traces[slot] = traced[key]

    def _is_bare(self, slot: SlotKey) -> bool:
        """Whether the hardware that a pod has under this ID is unknown."""
        return self._ledger.is_bare(slot) and self._inventory.device(slot) is None

    async def _trace_again(self) -> None:
        """Follow the noted answers again where devices have changed: they may lead to one that was not there."""
        async with self._adopting:
            self._traced_at = self._inventory.revision
            await self._follow_foreign(self._foreign)
            self._traces = {
                slot: trace for slot, trace in self._traces.items() if self._ledger.is_bare(slot, unknown=False)
            }
            await self._take_in(set(self._traces))

    async def _ask_pod_resources(self) -> set[SlotKey] | None:
        try:
            pods = await list_pods(self._socket, _LIST_DEADLINE)
        except PodResourcesError as error:
            self._silent[_PODRESOURCES].report_once(str(error))
            return None
        self._silent[_PODRESOURCES].healed()
        now = await witnesses.holders(pods)
        before = self.holders
        present = set(
            now
        )  # not what claims have: one that is unprepared before this is followed would be taken for a pod's
        for held, who in _claimants(pods, self._ledger.held()):
            now[held.slot] = (*now.get(held.slot, ()), who)
        forgotten = (slot for slot in self._ledger.forgotten() if slot in before and slot not in now)
        self.holders = now | {slot: before[slot] for slot in forgotten}
        return present


def _silence_of(witness: str, problems: Problems) -> Trouble:
    return problems.trouble(
        "claims",
        f"the kubelet's {witness} does not say who holds what",
        "witness-silent",
        "witness-answers",
        level="info",
        witness=witness,
        then="no claim ends until it answers",
    )


async def _answer(pods: Pods, entries: Sequence[CheckpointEntry]) -> Answer:
    trace, slots = Trace(), frozenset[SlotKey]()
    for entry in entries:
        given = await entry.trace()
        trace = Trace(trace.nodes | given.nodes, trace.names | given.names)
        slots |= entry.slots()
    return Answer(pods, trace, slots, len(entries))


def _claimants(pods: Iterable[PodDevices], held: Iterable[Held]) -> Iterator[tuple[Held, PodDevices]]:
    """What was given for ResourceClaims, with each container that has it by such a claim."""
    by_claim: defaultdict[tuple[str, str], list[PodDevices]] = defaultdict(list)
    for entry in pods:
        if entry.claim:
            by_claim[entry.namespace, entry.claim].append(entry)
    for it in held if by_claim else ():
        if it.claim is not None:
            yield from ((it, who) for who in by_claim.get((it.claim.namespace, it.claim.name), ()))
