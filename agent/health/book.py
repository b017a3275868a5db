"""Judges and keeps the health of all hardware, by probes, records, drains and quarantine, and knows when time will change it.

Pure: `now` is seconds on the monotonic clock, `wall` seconds since the epoch, both handed in. Each method returns the
hardware whose health changed, with its new health. What happens at one moment may be told in one call or in several.

Monotonic seconds are kept for the next run as they are, beside the boot they belong to: on Linux they count from the machine's
start for every process, so that they go on meaning the same until the next boot, whatever is done to the wall clock. After a
boot they mean nothing, and nothing that is kept in them is needed any more. Drains, which outlive boots, have wall clock times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Final

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agent.health.causes import Latch, Latches, Presence, Probes, Said, Sighting, counts, worst
from agent.health.drains import LONGEST, Drain, Drains, Flapping, Quarantine
from agent.model import HEALTHY, Health, State
from backends.base import Clears, Device, Record, Signal, Verdict

DRAINED: Final = "drained"
FLAPPING: Final = "flapping"


# --- what outlives a restart ---


class Handled(Struct, frozen=True):
    """How far a source's records have been read."""

    boot: str
    sequence: int

    def includes(self, boot: str, sequence: int) -> bool:
        """Whether this record was among them."""
        return boot == self.boot and sequence <= self.sequence


class KeptHealth(msgspec.Struct, frozen=True):
    """What a HealthBook knows that no look at the hardware would tell it again, or not at once: since when it is so."""

    boot: str = ""
    """The boot that its monotonic times belong to."""
    drains: tuple[Drain, ...] = ()
    latches: tuple[Latch, ...] = ()
    quarantines: tuple[Quarantine, ...] = ()
    handled: Mapping[str, Handled] = {}
    """By the record's source: `kmsg`, `uevent`."""
    sightings: tuple[Sighting, ...] = ()
    """What probes saw last."""


class HealthBook:
    """The health of all hardware; the only one who decides it. What an ID says besides is `inventory/ownership.py`'s."""

    def __init__(self, boot: str = "") -> None:
        self.boot = boot
        """/proc/sys/kernel/random/boot_id."""
        self._offset = 0.0  # from the monotonic clock to the wall clock, as it was last handed in
        self._probes = Probes()
        self._latches = Latches()
        self.ended = self._latches.ended
        """The latched signals that have ended, and what ended each, until they are taken."""
        self._bound_in: dict[tuple[str, str], frozenset[str]] = {}  # the hardware with a binding in a unit
        self.handled: dict[str, Handled] = {}
        """How far the records of each source have been read, by this run or the one before."""
        self._drains = Drains()
        self._flapping = Flapping()
        self._presence = Presence()
        self._failing: set[str] = set()  # Unhealthy by what is said of it, whether a pod holds it or not
        self._health: dict[str, Health] = {}
        self._deadlines = Deadlines()
        self.judgements = 0
        """Raised whenever `next_deadline` or `revision` may be another."""
        self._moment = -1.0  # of the last judgement
        self._before: dict[str, tuple[Health, bool]] = {}  # what was judged at it: health and failing before it
        self._changed = 0

    # --- what happens ---

    def probed(self, backend: str, units: Mapping[str, Iterable[Signal]], now: float) -> dict[str, Health]:
        """These units of a backend were probed, and this is all there is to see; nothing is of a unit that is gone."""
        touched: set[str] = set()
        self._probes.look(backend, units)
        for unit, signals in units.items():
            if signals or (backend, unit) in self._probes.spoken:
                touched |= self._probes.replace((backend, unit), signals, now)
        return self._judge(touched, now) if touched else {}

    def found(
        self,
        backend: str,
        units: Mapping[str, Sequence[Device]],
        now: float,
        *,
        beside: Mapping[str, Sequence[Device]] = MappingProxyType({}),
        by_another: bool = False,
        ours: Callable[[], bool] = lambda: False,
    ) -> dict[str, Health]:
        """These units of a backend were looked at and hold exactly these devices, with these bindings.

        What was latched under another binding ends, where it waits for that. Numbers of hardware that is gone or has
        another binding are forgotten. Hardware that comes back after it had gone counts as one failure.

        Args:
            backend: which.
            units: those that differ from before.
            now: monotonic seconds.
            beside: what else is there in these units, and is not to be had: it has not gone.
            by_another: another instance of the backend looks, or none does: what it does not show has not gone.
            ours: whether we act on hardware, which may be why it goes and comes.
        """
        touched: set[str] = set()
        if by_another:
            self._presence.forget(backend)
        for unit, devices in units.items():
            source = backend, unit
            if source in self._probes.measures.numbers:
                self._probes.measures.keep(source, {h for it in devices for h in it.hardware | it.depends})
            bindings = {h: binding for it in devices for h, binding in it.bindings.items()}
            for hardware in self._bound_in.pop(source, frozenset()) | bindings.keys():
                is_another, latches_changed = self._latches.bound(backend, hardware, bindings.get(hardware, ""))
                if is_another:
                    self._probes.measures.forget([hardware])
                if latches_changed:
                    touched.add(hardware)
            if bindings:
                self._bound_in[source] = frozenset(bindings)

        def is_excused(name: str) -> bool:
            return name in self._drains or name in self._failing or ours()

        for hardware in self._presence.found(backend, units, beside, now, is_excused):
            self._flapping.count(hardware, now)
            touched.add(hardware)
        return self._judge(touched, now) if touched else {}

    def recorded(self, signals: Iterable[Signal], record: Record, now: float) -> dict[str, Health]:
        """A record said this: it holds until cleared. A FINE signal says that what it `clears_on` has happened."""
        touched = {signal.hardware for signal in signals if self._latches.take(signal, record, now)}
        self._note(record.source, Handled(record.boot, record.sequence))
        return self._judge(touched, now)

    def _note(self, source: str, read: Handled) -> None:
        known = self.handled.get(source)
        if known is None or not known.includes(read.boot, read.sequence):
            self.handled[source] = read

    def cleared(self, by: Clears, hardware: Iterable[str], now: float) -> dict[str, Health]:
        """Something happened to this hardware that ends the latched signals that wait for it.

        Where it is an operator's word, quarantine ends too, and the numbers of its probes are taken as they are.
        """
        names = list(hardware)
        touched = {name for name in names if self._latches.clear({by}, name)}
        if by is Clears.OPERATOR:
            touched.update(name for name in names if self._forget_flapping(name))
            self._probes.measures.forget(names)
        return self._judge(touched, now)

    def _forget_flapping(self, hardware: str) -> bool:
        forgotten = self._flapping.forget(hardware)
        self._changed += forgotten
        return forgotten

    def drain(
        self, hardware: Iterable[str], reason: str, until: float | None, now: float, wall: float
    ) -> dict[str, Health]:
        """An operator takes this hardware out of service, until a time of the wall clock, or until it is undrained."""
        self._offset = wall - now
        names = list(hardware)
        self._drains.drain(names, reason, until, wall)
        return self._judge(names, now)

    def drains_of(self, hardware: Iterable[str]) -> list[Drain]:
        """The drains that this hardware is under."""
        return list(filter(None, map(self._drains.of, hardware)))

    def drains(self) -> tuple[Drain, ...]:
        """Every drain that there is."""
        return self._drains.all()

    def undrain(self, hardware: Iterable[str], now: float) -> dict[str, Health]:
        """An operator puts this hardware back into service: what waits for an operator's word ends with the drain."""
        names = list(hardware)
        drained = self._drains.undrain(names)
        return self.cleared(Clears.OPERATOR, names, now) | self._judge(drained, now)

    # --- time ---

    def next_deadline(self) -> float | None:
        """When time alone will next change something; None if it will not."""
        return self._deadlines.next()

    def ripen(self, now: float, wall: float, most: int | None = None) -> dict[str, Health]:
        """Time has passed: delayed signals that lasted count, recovered ones, drains and quarantines end.

        Of `most` pieces of hardware at a time; of the others `next_deadline` is past.
        """
        self._offset = wall - now
        return self._judge(self._deadlines.pop(now, most), now)

    # --- what is known ---

    def of(self, hardware: str) -> Health:
        """The health of this hardware; healthy if nothing is said of it."""
        return self._health.get(hardware, HEALTHY)

    def for_pod(self, hardware: str, now: float, once: Clears | None = None) -> Health:
        """How this hardware is to the pod that has it, or would be once this has happened to it.

        Drains and quarantine are not for it: they keep other pods away.
        """
        said = self._causes(hardware, now).said
        return worst((it for it in said if not it.signal.unless_held and once not in it.waits_for), now)

    def signals_of(self, hardware: str, now: float) -> tuple[Statement, ...]:
        """Everything that is said of this hardware, what counts and what does not."""
        return statements(self._causes(hardware, now), now, self._offset)

    @property
    def revision(self) -> int:
        """Raised whenever what must outlive a restart changes."""
        return self._changed + self._drains.revision + self._latches.revision + self._probes.revision

    def kept(self) -> KeptHealth:
        """What must outlive a restart."""
        return KeptHealth(
            boot=self.boot,
            drains=self.drains(),
            latches=tuple(self._latches.all()),
            quarantines=tuple(self._flapping.all()),
            handled=dict(self.handled),
            sightings=self._probes.kept(),
        )

    def restore(self, kept: KeptHealth, now: float, wall: float) -> dict[str, Health]:
        """Take in what an earlier run of ours knew, or an agent beside us that is gone; it knew better.

        Of what we were told ourselves, only what later records said is more than it knew.
        """
        self._offset = wall - now
        same_boot = kept.boot == self.boot
        before = self._kept_hardware()
        ours = [
            latch
            for latch in self._latches.all()
            if (read := kept.handled.get(latch.source)) is None or not read.includes(latch.boot, latch.sequence)
        ]
        theirs = [
            replace(latch, since=min(latch.since, now) if same_boot else now)
            for latch in kept.latches
            if not latch.outlived(self.boot)
        ]
        self._latches.replace_all([*theirs, *ours])
        self._drains.replace_all(kept.drains)
        quarantines = kept.quarantines if same_boot else ()
        self._flapping.replace_all(replace(it, until=min(it.until, now + LONGEST)) for it in quarantines)
        for source, read in kept.handled.items():
            if read.boot == self.boot:
                self._note(source, read)
        sighted = self._probes.restore(kept.sightings if same_boot else (), now)
        names = before | self._kept_hardware() | sighted
        self._failing |= {it for it in names if self._causes(it, now).while_held(now).state is State.UNHEALTHY}
        changes = self._judge(names, now)
        restored = {name: self._backdate(name, now) for name in changes}
        self._moment = -1.0  # what happens in the same moment comes after this, and is dated from it
        return restored

    def looked(self, looking: Set[str], now: float) -> dict[str, Health]:
        """Every backend but these has looked at all its units: what an earlier run saw in others is not there any more."""
        return self._judge(self._probes.looked(looking, now), now)

    def _kept_hardware(self) -> set[str]:
        """The hardware of which something must outlive a restart."""
        latched = {latch.signal.hardware for latch in self._latches.all()}
        return latched | {it.hardware for it in self._drains.all()} | {it.hardware for it in self._flapping.all()}

    def _backdate(self, hardware: str, now: float) -> Health:
        """It is as it is since the first of what counts, not since we know."""
        if (health := self.of(hardware)) is not HEALTHY:
            since = counts_since(self._causes(hardware, now), now, self._offset)
            health = self._health[hardware] = replace(health, since=min(since, now))
        return health

    # --- judgement ---

    def _causes(self, hardware: str, now: float) -> Causes:
        """All that makes the hardware's health at this time."""
        quarantine = self._flapping.of(hardware)
        return Causes(
            (*self._probes.of(hardware), *self._latches.of(hardware)),
            self._drains.of(hardware),
            quarantine if quarantine and quarantine.lasts(now) else None,
        )

    def _judge(self, hardware: Iterable[str], now: float) -> dict[str, Health]:
        self.judgements += 1
        if now != self._moment:
            self._moment, self._before = now, {}
        changes = {}
        for name in hardware:
            known = self.of(name)
            before, failed = self._before.setdefault(name, (known, name in self._failing))
            after = self._judge_one(name, before, now, failed=failed)
            if known.says_same(after):
                continue
            changes[name] = after
            if after is HEALTHY:
                del self._health[name]
            else:
                self._health[name] = after
        return changes

    def _judge_one(self, hardware: str, before: Health, now: float, *, failed: bool) -> Health:
        self._probes.settle(hardware, now)
        self._drains.let_end(hardware, now + self._offset)
        causes = self._causes(hardware, now)
        own = causes.while_held(now)
        if own.state is not State.UNHEALTHY:
            self._failing.discard(hardware)
        else:
            self._failing.add(hardware)
            if not failed and causes.drain is None:  # an operator who works on it pulls its cables
                self._flapping.count(hardware, now, own)
        if self._flapping.judge(hardware, now, now + self._offset):
            self._changed += 1
            causes = self._causes(hardware, now)
        self._deadlines.set(hardware, self._deadline(hardware, causes, now))
        return compose(causes, before, now, self._offset)

    def _deadline(self, hardware: str, causes: Causes, now: float) -> float | None:
        """When time alone will next change what is known of this hardware; later than now."""
        last = self._flapping.of(hardware)
        drain = causes.drain.deadline(now, now + self._offset) if causes.drain else None
        deadlines = [drain, last.deadline(now) if last else None, *(it.deadline() for it in causes.said)]
        return min((due for due in deadlines if due is not None and due > now), default=None)


# --- one deadline for each name, and the earliest of all at once ---


class Deadlines:
    """A heap whose entries are outdated by newer ones, and thrown out when they come up."""

    def __init__(self) -> None:
        self._due: dict[str, float] = {}
        self._heap: list[tuple[float, str]] = []

    def set(self, name: str, due: float | None) -> None:
        """The name's deadline is this from now on; None: it has none."""
        if due is None:
            self._due.pop(name, None)
        elif self._due.get(name) != due:
            self._due[name] = due
            heapq.heappush(self._heap, (due, name))
            if len(self._heap) > 2 * len(self._due) + 64:  # most are outdated
                self._heap = sorted((due, name) for name, due in self._due.items())

    def next(self) -> float | None:
        """The first deadline; None if there is none."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float, most: int | None = None) -> list[str]:
        """The names whose deadlines have come, the earliest first, and so many at most; they have none any more."""
        names: list[str] = []
        while (due := self.next()) is not None and due <= now and len(names) != most:
            name = heapq.heappop(self._heap)[1]
            del self._due[name]
            names.append(name)
        return names


# --- judgement ---
#
# The worst that is said counts. A drain comes first, since a person decided it, and its sentence says what else is the
# matter; then quarantine, since what is said of flapping hardware is true for moments only.


class Statement(Struct, frozen=True):
    """One thing that is said of a piece of hardware, for a person: who says it, and what will end it."""

    source: str
    """`probe`, `record`, `operator` (a drain) or `quarantine`."""
    verdict: Verdict
    reason: str
    message: str
    since: float
    """Seconds on the agent's monotonic clock."""
    counts: bool
    """Whether it makes the hardware Unhealthy or Degraded now."""
    changes: float | None = None
    """When time alone will change what it means, on the same clock; None if it will not."""
    waits_for: frozenset[Clears] = frozenset()
    """Any of these ends it. What a probe says ends when the probe no longer says it."""
    unless_held: bool = False
    """It does not count while a pod holds the hardware."""


class Causes(Struct, frozen=True):
    """All that makes the health of one piece of hardware."""

    said: tuple[Said, ...]
    drain: Drain | None
    quarantine: Quarantine | None
    """One that lasts."""

    def own(self, now: float) -> Health:
        """The worst of what probes and records say."""
        return worst(self.said, now)

    def while_held(self, now: float) -> Health:
        """The worst of it that counts while a pod holds the hardware."""
        return worst((it for it in self.said if not it.signal.unless_held), now)


def compose(causes: Causes, before: Health, now: float, offset: float) -> Health:
    """The health that these causes make; it is dated from when the hardware came to be in its state, or was drained.

    `offset` is from monotonic to wall clock seconds.
    """
    drains = causes.drain is not None or before.reason == DRAINED
    ours = counts_since(causes, now, offset) if drains else None
    health = _dated(_overruled(causes, causes.own(now)), before, now, ours)
    if not any(it.signal.unless_held for it in causes.said):
        return health
    held = _dated(_overruled(causes, causes.while_held(now)), before.to_holder, now, ours)
    return health if health.says_same(held) else replace(health, while_held=held)


def _overruled(causes: Causes, own: Health) -> Health:
    """What an operator, and then quarantine, make of what is said."""
    if causes.quarantine is not None:
        own = Health(State.UNHEALTHY, FLAPPING, causes.quarantine.message)
    if causes.drain is not None:
        own = Health(State.UNHEALTHY, DRAINED, causes.drain.sentence(besides=own))
    return own


def _dated(health: Health, before: Health, now: float, otherwise: float | None) -> Health:
    """With its date: from before, where only the reason is another and no drain begins, lasts or ends."""
    if health is HEALTHY:
        return health
    if otherwise is not None:
        return replace(health, since=min(otherwise, now))
    return replace(health, since=before.since if before.state is health.state else now)


def statements(causes: Causes, now: float, offset: float) -> tuple[Statement, ...]:
    """Everything that is said, what overrules the rest first; `offset` is from monotonic to wall clock seconds."""
    return (*_overruling(causes, offset), *(_statement(it, now) for it in sorted(causes.said, key=lambda it: it.since)))


def counts_since(causes: Causes, now: float, offset: float) -> float:
    """Since when a drain lasts, else the first of what counts does, on the monotonic clock; `offset` as above."""
    if causes.drain is not None:
        return causes.drain.since - offset
    said = (it.begins for it in causes.said if counts(it.verdict(now)))
    return min((*said, *(it.since for it in _overruling(causes, offset))), default=now)


def _overruling(causes: Causes, offset: float) -> Iterator[Statement]:
    operator = frozenset({Clears.OPERATOR})
    if (drain := causes.drain) is not None:
        until = None if drain.until is None else drain.until - offset
        words = drain.sentence(besides=HEALTHY)
        yield Statement("operator", Verdict.NOW, DRAINED, words, drain.since - offset, True, until, operator)
    if (it := causes.quarantine) is not None:
        yield Statement("quarantine", Verdict.NOW, FLAPPING, it.message, it.since, True, it.until, operator)


def _statement(it: Said, now: float) -> Statement:
    signal, deadline = it.signal, it.deadline()
    return Statement(
        source="record" if isinstance(it, Latch) else "probe",
        verdict=signal.verdict,
        reason=signal.reason,
        message=signal.message,
        since=it.since,
        counts=counts(it.verdict(now)),
        changes=deadline if deadline is not None and deadline > now else None,
        waits_for=it.waits_for,
        unless_held=signal.unless_held,
    )
