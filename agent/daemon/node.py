"""Owns what is offered: inventory, health and claims; every change of them is one call here, and ends in one commit.

A commit hands the lists that changed to their plugins, and then to those who read `unreported`. It wakes `run`, which waits for
health's next deadline and has health written, where either is another. Changing an owner in any other way leaves one of these
out of date.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Final

from agent.cdi.on_demand import Cdi
from agent.claims.ledger import Ledger
from agent.config import Config
from agent.console.views import ENDED, ENDS
from agent.daemon.state_file import StateFile, StateKeeper
from agent.discovery.discoverer import Discoverer
from agent.discovery.reading import Changes
from agent.discovery.sources import boot_id
from agent.hardware.adoption import Resumer
from agent.hardware.jobs import HardwareQueue
from agent.hardware.reconciler import Reconciler
from agent.hardware.releases import Releaser
from agent.health import HealthBook
from agent.health.causes import Latch
from agent.health.drains import moment
from agent.history.recorder import Recorder
from agent.history.timeline import Note
from agent.inventory.inventory import Inventory
from agent.inventory.lookup import find, unselected
from agent.inventory.shortfall import Shortfall
from agent.kubelet.pod_claims import PodClaims
from agent.model import FORGOTTEN, Health, Held, Snapshot
from agent.runtime.pacing import SYSTEM, Clock, Doorbell
from agent.runtime.problems import Problems
from agent.runtime.workers import BATCH, in_batches
from backends.base import Backend, Clears, Device, Record, Signal, Verdict

if TYPE_CHECKING:
    from agent.kubelet.plugin import Plugin


_NOTED: Final = frozenset({Verdict.NOTE, Verdict.INFO})
"""What of a record no list shows."""


class Node:
    """What is there, how it is, who holds it."""

    def __init__(
        self, config: Config, backends: Mapping[str, Backend[Any]], problems: Problems, clock: Clock = SYSTEM
    ) -> None:
        """Prepare; `backends` are those in force at any time, by their kinds."""
        host, settings = config.host, config.agent
        self._clock, self._wall = clock.now, clock.wall

        # what is offered
        self.plugins: dict[str, Plugin] = {}
        """The service of each resource that the kubelet may ask now; `serving.py` starts and ends them."""
        self.lists: dict[str, Snapshot] = {}
        """The list of each resource that was published last."""
        self.unreported: deque[tuple[Snapshot | None, Snapshot]] = deque()
        """What was published, each with the list before, and was told only to the kubelet so far."""
        self.ended: set[str] = set()
        """The resources of which claims have ended, as above."""
        self.news = Doorbell()
        """Set at each change of these three, and of the devices and names that there are."""

        # what is there, how it is, who holds it
        self.discoverers: dict[str, Discoverer] = {}
        """Those in force, by their backends."""
        self.inventory = inventory = Inventory(config.resources, backends)
        self.health, self.ledger = HealthBook(boot_id(host)), Ledger()
        self.shortfall = Shortfall(inventory, clock)
        self.pod_claims = PodClaims(
            self.ledger, inventory, self, settings.pod_resources, settings.plugin_dir,
            sys=host.sys, clock=clock.now, problems=problems,
        )  # fmt: skip
        pods = self.pod_claims.pods

        # what is done to it
        self.turns = HardwareQueue(clock.now)
        self.reconciler = Reconciler(self.turns, problems)
        self.releaser = Releaser(host, backends, self.ledger, self.reconciler, self.keep_claims)
        self.resumer = Resumer(backends, inventory, self.ledger, self.reconciler, self.look_at, pods)
        self.cdi = Cdi(host, settings.state_dir, inventory, backends, problems)

        # what outlives this process
        self.history = Recorder(
            inventory, self.lists.get, pods, self.shortfall,
            uids=self.pod_claims.uids_of, proc=host.proc, clock=clock,
        )  # fmt: skip
        self.keeper = StateKeeper(
            StateFile(settings.state_dir), self.ledger, self.releaser, inventory, self.health, self.shortfall, self.history,
            clock=clock,
        )  # fmt: skip
        self._changed = Doorbell()
        self._judgements = -1  # of health, as many as `run` knows of
        self._moments: dict[str, float] = {}  # backend → the time of its scan whose parts are coming

    def _commit(self, since: float | None = None) -> None:
        """Hand on what changed; `since` is when the event came that was the cause, if one was."""
        for snapshot in self.inventory.take(self._clock()):
            self.unreported.append((self.lists.get(snapshot.resource), snapshot))
            self.lists[snapshot.resource] = snapshot
            if (plugin := self.plugins.get(snapshot.resource)) is not None:
                plugin.publish(snapshot, since)
        self.news.set()
        while self.health.ended:
            self._note_end(*self.health.ended.popleft())
        if self.health.judgements != self._judgements:
            asyncio.get_running_loop().call_soon(self._changed.set)  # a turn later: the streams send first

    def _note_end(self, latch: Latch, by: Clears) -> None:
        """Note what ended a fault that a record told of: with it gone, nothing else tells of it."""
        said, wall = latch.signal, self._wall()
        if said.verdict not in _NOTED:
            message = f"{ENDED} {ENDS[by.value]}; since {moment(wall - self._clock() + latch.since)}: {said.message}"
            self.history.notes.add(Note(said.hardware, said.reason, message, wall))

    async def find(self, name: str) -> frozenset[str]:
        """The hardware of this name, which what is there has, or had while it was offered; every face resolves names here.

        Raises:
            FairleadError: nothing is called that, or several devices are.
        """
        return await find(name, self.inventory.places(), unselected(self.selectable()), self.shortfall.former)

    def selectable(self) -> Iterator[tuple[str, Device]]:
        """Every device that a selector can name, with its backend, also those that no resource selects."""
        return ((kind, device) for kind, it in self.discoverers.items() for device in it.selectable())

    def looking(self) -> set[str]:
        """The backends whose first look has not ended."""
        return {kind for kind, it in self.discoverers.items() if not it.first_scan.is_set()}

    async def looked(self) -> None:
        """Wait until every backend has had its first scan."""
        while waiting := [it for it in self.discoverers.values() if not it.first_scan.is_set()]:
            await waiting[0].first_scan.wait()

    async def look_at(self, kind: str, units: Set[str]) -> None:
        """Have these units of a backend looked at now; returns once what was found is published.

        Raises:
            LookError: one of them cannot be read, or hangs.
        """
        while (discoverer := self.discoverers.get(kind)) is not None:  # None: the backend is not configured
            await discoverer.look_at(units)
            if self.discoverers.get(kind) is discoverer:
                return  # else a reload has put another into its place, which has to look

    # --- the kernel and the backends ---

    def scanned(self, changes: Changes) -> None:
        """Discovery found something different."""
        self.inventory.update(changes.backend, changes.units, changes.links)
        self.judge(changes)
        if not changes.more:  # the lists that change show all that one look has found
            self._commit(changes.since)

    def judge(self, changes: Changes) -> None:
        """Judge the health of what was found; the caller commits."""
        # one time for all parts of a scan: hardware that has moved from one unit to another was never away
        now = self._moments.pop(changes.backend, None) or self._clock()
        if changes.more:
            self._moments[changes.backend] = now
        found = self.health.found(
            changes.backend,
            changes.units,
            now,
            beside=changes.beside,
            by_another=changes.by_reload,
            ours=self.turns.have_effects,
        )
        if health := found | self.health.probed(changes.backend, changes.signals, now):
            self.inventory.set_health(health)

    def recorded(self, signals: Sequence[Signal], record: Record) -> None:
        """The kernel told a fact that means this."""
        for signal in signals:
            if signal.verdict in _NOTED:
                self.history.notes.take(signal, record.time)
        self.inventory.set_health(self.health.recorded(signals, record, self._clock()))
        self._commit()

    def last_word(self, hardware: Iterable[str]) -> str:
        """What the kernel said last of hardware that has gone, as the end of a sentence; empty if nothing."""
        now = self._clock()
        told = [one for name in hardware for one in self.health.signals_of(name, now) if one.source == "record"]
        last = max(told, key=lambda one: one.since, default=None)
        return f"; the kernel's last word of it: {last.message.rstrip('.')}" if last else ""

    def health_for_pod(self, hardware: str, *, reset: bool) -> Health:
        """The health of this hardware for the pod that has it, now or after a reset of ours."""
        return self.health.for_pod(hardware, self._clock(), Clears.OUR_RESET if reset else None)

    def was_reset(self, hardware: Set[str]) -> None:
        """We have reset this hardware."""
        self.inventory.set_health(self.health.cleared(Clears.OUR_RESET, hardware, self._clock()))
        self._commit()

    # --- time ---

    async def run(self, until: Callable[[float | None, Doorbell, Callable[[], float]], Awaitable[None]]) -> None:
        """Let time pass for what is delayed, drained or quarantined; have health written whenever it changed.

        Args:
            until: waits until a time, or for a ring.
        """
        while True:
            now = self._clock()
            self.inventory.set_health(self.health.ripen(now, self._wall(), BATCH))
            deadline = self.health.next_deadline()
            if deadline is not None and deadline <= now:
                await asyncio.sleep(0)  # there is more
                continue
            self._judgements = self.health.judgements
            self._commit()
            self.keeper.write_soon()
            await until(deadline, self._changed, self._clock)

    # --- pods ---

    async def allocated(self, given: Sequence[Held]) -> None:
        """An Allocate is about to give these; returns when they are kept."""
        is_new = changes_lists = False
        try:
            async for batch in in_batches(given):
                is_new |= self.ledger.allocate(batch, self._clock())
                changes_lists |= self.inventory.claim(batch)
            if is_new:
                await self.keeper.write_claims()
        finally:  # also where the kubelet does not wait for the reply
            self.pod_claims.allocated()
            if changes_lists:
                asyncio.get_running_loop().call_soon(self._commit)  # a turn later: the reply is made first

    def adopted(self, held: Sequence[Held]) -> None:
        """The kubelet remembers these, and the ledger has them now; `claims_settled` follows."""
        self.inventory.claim(held)

    def released(self, ended: Sequence[Held]) -> None:
        """No pod has these any more, and the ledger has dropped them; `claims_settled` follows."""
        self.inventory.unclaim(ended)
        self.releaser.add(ended)
        self.resumer.over(ended)
        names = {held.resource for held in ended}
        self.cdi.changed(names)
        self.ended |= names

    async def unprepared(self, ended: Sequence[Held]) -> None:
        """The kubelet has unprepared a ResourceClaim, and the ledger has dropped what it had; returns when that is kept."""
        self.released(ended)
        self._commit()
        await self.keeper.write_claims()

    def claims_settled(self) -> None:
        """All changes of one answer of the kubelet have been told: commit them."""
        self._commit()
        self.keep_claims()

    def claims_asked(self) -> None:
        """The kubelet was asked who has what, as it is every minute: names that are no longer needed may go."""
        self._commit()
        self.history.claims_changed()

    def keep_claims(self) -> None:
        """Have the claims written, and what is to be undone of those that ended."""
        self.keeper.write_soon(claims=True)

    # --- operators ---

    async def drain(self, hardware: Iterable[str], reason: str, until: float | None = None) -> None:
        """Offer this hardware to no new pod, until then (seconds since the epoch) or until it is undrained.

        Raises:
            FairleadError: the time is past, or none.
        """
        self.inventory.set_health(self.keeper.drain(hardware, reason, until))
        self._commit()
        await self.keeper.write_health()

    async def undrain(self, hardware: Iterable[str]) -> tuple[str, ...]:
        """Put this hardware back into service; the reasons that ended: `drained`, `flapping`, `xid-79`."""
        changes, ended = self.keeper.undrain(hardware)
        self.inventory.set_health(changes)
        self._commit()
        await self.keeper.write_health()
        return ended

    def believe(self, hardware: Iterable[str]) -> tuple[str, ...]:
        """A person says that no pod has this hardware that the kubelet has forgotten; the reason that ended, if it was one."""
        believed = self.ledger.believe(frozenset(hardware))
        if believed:
            self.adopted(believed)
            self.claims_settled()
        return (FORGOTTEN,) if believed else ()

    # --- starts, and other configurations ---

    async def restore(self) -> None:
        """Take in what the agent before us learnt while we waited for it to go."""
        await self.keeper.restore()
        self._commit()

    def ready(self, kinds: Iterable[str]) -> None:
        """These backends have scanned, or had their time: list what is known of them."""
        for kind in kinds:
            self.inventory.ready(kind)
        self._commit()

    def is_left_alone(self, hardware: str, by: str) -> bool:
        """Whether an operator has drained this, or a resource of another backend than `by` has it."""
        others = (it for it in self.inventory.on([hardware]) if it.backend != by)
        return bool(self.health.drains_of([hardware])) or any(it.placed is not None for it in others)

    def note_looks(self) -> None:
        """A backend has begun to look at all its units, or has looked at them."""
        self.inventory.set_health(self.health.looked(self.looking(), self._clock()))
        self._commit()

    def serve_others(self) -> None:
        """Other resources are to be served by device plugin than before, though the configuration is the same."""
        self.inventory.names_revision += 1
        self.news.set()

    def resend(self, resource: str) -> None:
        """Send this resource's list again, though nothing changed: the kubelet writes its checkpoint then, of all resources.

        One that is not served by device plugin any more has no list: another's does as well.
        """
        is_by_plugin = self.inventory.selection.is_by_plugin
        if not is_by_plugin(resource):
            resource = next(filter(is_by_plugin, self.inventory.names()), resource)
        self.inventory.touch(resource)
        self._commit()
