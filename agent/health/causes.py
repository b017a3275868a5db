"""Remembers what makes health: what probes and records said of hardware, and that it went away and came back.

- What a probe said lasts until its unit is probed again: what one look at a unit said is the whole truth that its probes
  know, and replaces what they said before. Where it recovers only after a while, it lasts so much longer. A unit that is not
  looked at (its read hangs) keeps its signals: none ends, and delays go on. So do those that an earlier run of ours saw, until
  its unit is looked at: a restart is no look.
- What a record said lasts until something clears it, however old the record is.
- Which hardware is there is remembered to tell that it went away and came back: a loose card does that over and over. Only
  what can be pulled out is minded, by the names that backends give it: what a driver makes of it (`rdma:`, `mig:`, `node:`)
  goes and comes with the driver. It has gone when no device of any backend has it any more, usable or not, so that rebinding
  a driver makes no difference; it is back when a device that can be used has it again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Final, Protocol

from msgspec import Struct, field
from msgspec.structs import replace

from agent.model import HEALTHY, Health, State
from backends.base import Clears, Device, Measure, Record, Signal, Trend, Verdict

# --- numbers, which probes do not remember ---


_Number = tuple[str, str, Trend]
"""Hardware, the number's name, what it is watched for."""

Source = tuple[str, str]
"""Backend and unit."""


class Measures:
    """Every number as it was last seen, or its best; forgotten with the unit it was read in."""

    def __init__(self) -> None:
        self.numbers: dict[Source, dict[_Number, int]] = {}
        """By the units they were read in."""

    def counts(self, source: Source, hardware: str, measure: Measure) -> bool:
        """Whether the number does what its trend says. The first sight of it is a baseline and says nothing.

        A counter that falls was reset, or wrapped: a new baseline. One that is saturated stands still.
        """
        memory = self.numbers.setdefault(source, {})
        key = (hardware, measure.name, measure.trend)
        before = memory.get(key, measure.value)
        if measure.trend is Trend.RISES:
            memory[key] = measure.value
            return measure.value > before
        memory[key] = max(measure.value, before)
        return measure.value < before

    def keep(self, source: Source, hardware: Set[str]) -> None:
        """Only this hardware is left in the unit, of which some number is known."""
        self.numbers[source] = {key: value for key, value in self.numbers[source].items() if key[0] in hardware}
        if not self.numbers[source]:
            del self.numbers[source]

    def forget(self, hardware: Iterable[str]) -> None:
        """Forget this hardware's numbers: another driver counts, or an operator said that all is well."""
        names = set(hardware)
        for source in list(self.numbers):
            self.keep(source, {key[0] for key in self.numbers[source]} - names)


# --- what a signal means at a time ---


_STATES: Final = {Verdict.NOW: State.UNHEALTHY, Verdict.DEGRADED: State.DEGRADED}


class Said(Protocol):
    """A signal, and what time makes of it."""

    @property
    def signal(self) -> Signal:
        """What was said."""

    @property
    def since(self) -> float:
        """Since when it is said."""

    @property
    def begins(self) -> float:
        """When it begins to count, or began."""

    @property
    def waits_for(self) -> frozenset[Clears]:
        """What ends it, where it is not a probe that no longer says so."""

    def verdict(self, now: float) -> Verdict:
        """What it means at this time; INFO if it does not count."""

    def deadline(self) -> float | None:
        """When time alone will change what it means; it may have passed."""


def matured(signal: Signal, since: float, now: float) -> Verdict:
    """What a signal means that is still there: a DELAYED one is NOW once it has lasted."""
    if signal.verdict is not Verdict.DELAYED:
        return signal.verdict
    return Verdict.NOW if since + signal.after <= now else Verdict.INFO


def counts(verdict: Verdict) -> bool:
    """Whether a verdict makes hardware Unhealthy or Degraded."""
    return verdict in _STATES


def worst(said: Iterable[Said], now: float) -> Health:
    """The worst that is said, without its date; of two equals the first, and rather one that counts while held too."""
    every = [(it.verdict(now), it) for it in said]
    for verdict, state in _STATES.items():
        if equals := [it for is_now, it in every if is_now is verdict]:
            first = min(equals, key=lambda it: (it.signal.unless_held, it.since, it.signal.reason, it.signal.message))
            return Health(state, first.signal.reason, first.signal.message)
    return HEALTHY


_KEPT: Final = frozenset({Verdict.NOW, Verdict.DELAYED, Verdict.DEGRADED})

_Kind = tuple[Source, str, Verdict, str]
"""Source, reason, verdict, and the name of the number behind it."""

_Key = tuple[_Kind, str]
"""Tells signals about one piece of hardware apart: kind and message."""


class Active(Struct, frozen=True):
    """A signal of a probe, since when it is seen, and since when it is no longer seen."""

    signal: Signal
    since: float
    unseen_since: float | None = field(default=None, name="gone_since")  # as the state file has it
    at_once: bool = False
    """It is delayed and does not wait: it goes on from another that counted."""

    @property
    def waits_for(self) -> frozenset[Clears]:
        """It ends when it is no longer seen."""
        return frozenset()

    def verdict(self, now: float) -> Verdict:
        """What it means at this time."""
        if self.is_over(now):
            return Verdict.INFO
        return Verdict.NOW if self.at_once else matured(self.signal, self.since, now)

    def is_over(self, now: float) -> bool:
        """Whether it has been absent for long enough."""
        return self.unseen_since is not None and self.unseen_since + self.signal.recover_after <= now

    @property
    def _waits(self) -> bool:
        return self.signal.verdict is Verdict.DELAYED and not self.at_once

    @property
    def begins(self) -> float:
        """When it begins to count, or began."""
        return self.since + self.signal.after if self._waits else self.since

    def deadline(self) -> float | None:
        """When time alone will change what it means; the same sums as above, so that none is missed by a rounding."""
        if self.unseen_since is not None:
            return self.unseen_since + self.signal.recover_after
        return self.begins if self._waits else None

    def leads_to(self, signal: Signal, now: float) -> bool:
        """Whether this delayed fault counted when the other appeared, which then counts at once, without a delay of its own.

        The hardware has not been well in between: a port that was down for a minute has a link now and no subnet manager,
        which by itself may last for half a minute. Hardware has recovered when none of it is seen any more.
        """
        lasted = self.signal.verdict is signal.verdict is Verdict.DELAYED and counts(self.verdict(now))
        return lasted and self.signal.unless_held <= signal.unless_held


class Sighting(Struct, frozen=True):
    """A signal and where it was seen, for the next run."""

    backend: str
    unit: str
    active: Active


class Probes:
    """The signals of all probes, by hardware."""

    def __init__(self) -> None:
        self._active: defaultdict[str, dict[_Key, Active]] = defaultdict(dict)
        self.spoken: dict[Source, frozenset[str]] = {}
        """The units whose signals are remembered, each with the hardware that these are about."""
        self.measures = Measures()
        self.revision = 0
        """Raised whenever what is kept changes."""
        self._looking: Set[str] | None = None  # the backends that have not looked at all their units yet; None: all
        self._looked: set[Source] = set()  # their units that they have looked at
        self._unseen: set[Source] = set()  # their units of which another run's signals count until they do

    def of(self, hardware: str) -> Iterable[Active]:
        """The signals about this hardware that count, or may yet."""
        return self._active[hardware].values() if hardware in self._active else ()

    def replace(self, source: Source, signals: Iterable[Signal], now: float) -> Set[str]:
        """Take what a unit's probes say for what they said before; the hardware concerned."""
        self._unseen.discard(source)
        seen: defaultdict[str, dict[_Key, Signal]] = defaultdict(dict)
        for signal in signals:
            if signal.measure is None or self.measures.counts(source, signal.hardware, signal.measure):
                seen[signal.hardware].setdefault(_key(source, signal), signal)
        touched = self.spoken.pop(source, frozenset()) | seen.keys()
        for hardware in touched:
            self._update(hardware, source, seen[hardware], now)
        if left := frozenset(h for h in touched if any(key[0][0] == source for key in self._active.get(h, ()))):
            self.spoken[source] = left
        return touched

    def _update(self, hardware: str, source: Source, seen: dict[_Key, Signal], now: float) -> None:
        active = self._active[hardware]
        known_before = _kept(active)
        before = [it for key, it in active.items() if key[0][0] == source]
        unseen = [key for key in active if key[0][0] == source and key not in seen]
        for key, signal in seen.items():
            known = active.get(key)
            if known is None and (renamed := next((old for old in unseen if old[0] == key[0]), None)):
                unseen.remove(renamed)  # the same signal, said with other words
                known = active.pop(renamed)
            known = None if known is None or known.is_over(now) else known
            at_once = any(it.leads_to(signal, now) for it in before if it is not known)
            active[key] = Active(
                signal, known.since if known else now, at_once=at_once or bool(known and known.at_once)
            )
        for key in unseen:
            self._fade(active, key, now)
        self.revision += _kept(active) != known_before
        self.settle(hardware, now)

    def _fade(self, active: dict[_Key, Active], key: _Key, now: float) -> None:
        """A signal is no longer seen: forget it, or see whether it stays away."""
        old = active[key]
        if not counts(old.verdict(now)):
            del active[key]
        elif old.unseen_since is None:
            active[key] = replace(old, unseen_since=now)

    def settle(self, hardware: str, now: float) -> None:
        """Forget what has been absent for long enough."""
        if (active := self._active.get(hardware)) is None:
            return
        for key in [key for key, it in active.items() if it.is_over(now)]:
            del active[key]
            self.revision += 1
        if not active:
            del self._active[hardware]

    # --- what outlives a restart ---

    def kept(self) -> tuple[Sighting, ...]:
        """Every signal that makes hardware Unhealthy or Degraded, now or later."""
        every = (item for active in self._active.values() for item in _kept(active).items())
        return tuple(Sighting(*key[0][0], it) for key, it in every)

    def restore(self, kept: Iterable[Sighting], now: float) -> Set[str]:
        """Take in what another run saw last; the hardware concerned. Our own looks know better what is there, not since when."""
        touched: set[str] = set()
        for it in kept:
            source, hardware = (it.backend, it.unit), it.active.signal.hardware
            theirs, active = replace(it.active, since=min(it.active.since, now)), self._active[hardware]
            if (ours := active.get(key := _key(source, theirs.signal))) is not None:
                at_once = ours.at_once or theirs.at_once
                active[key] = replace(ours, since=min(ours.since, theirs.since), at_once=at_once)
            else:
                active[key] = theirs
                if source in self._looked or (self._looking is not None and it.backend not in self._looking):
                    self._fade(active, key, now)
                else:
                    self._unseen.add(source)
            self.spoken[source] = self.spoken.get(source, frozenset()) | {hardware}
            touched.add(hardware)
        return touched

    def look(self, backend: str, units: Iterable[str]) -> None:
        """Note that these units are being looked at."""
        if self._looking is None or backend in self._looking:
            self._looked.update((backend, unit) for unit in units)

    def looked(self, looking: Set[str], now: float) -> Set[str]:
        """Note that every backend but these has looked at all its units; the hardware of units that were not there any more."""
        self._looking = looking
        self._looked = {source for source in self._looked if source[0] in looking}
        gone = [source for source in self._unseen if source[0] not in looking]
        return {hardware for source in gone for hardware in self.replace(source, (), now)}


def _kept(active: Mapping[_Key, Active]) -> dict[_Key, Active]:
    """Those of them that make hardware Unhealthy or Degraded, now or later."""
    return {key: it for key, it in active.items() if it.signal.verdict in _KEPT}


def _key(source: Source, signal: Signal) -> _Key:
    if signal.measure is not None:
        return (source, signal.reason, signal.verdict, signal.measure.name), ""
    return (source, signal.reason, signal.verdict, ""), signal.message


# --- what records say ---


UNSAID: Final = frozenset({Clears.BOOT, Clears.OPERATOR})
"""What ends a signal of a record that does not say what does: nothing holds for ever."""

_OF_ONE: Final = 32
_HARDWARE: Final = 16384
"""Pieces of hardware with latches, and latches of each: more than any node has; what a log says may have no end."""

_REBOOT: Final = frozenset({Clears.BOOT, Clears.REBIND})
"""What a boot of the machine is: it rebinds every driver, too, perhaps with the inode numbers of last time."""


class Latch(Struct, frozen=True):
    """A signal of a record."""

    signal: Signal
    since: float
    """Monotonic seconds of the boot in which it was latched."""
    source: str
    boot: str
    sequence: int
    """Of the last record that said so."""
    bindings: Mapping[str, str] = {}
    """How its hardware was bound at that time, by the backends that had seen it so, or as it was seen first after that.

    By backend for agents from before `Device.bindings`, which may read what we keep."""

    def verdict(self, now: float) -> Verdict:
        """What it means at this time."""
        return matured(self.signal, self.since, now)

    @property
    def begins(self) -> float:
        """When it begins to count, or began."""
        return self.since + self.signal.after if self.signal.verdict is Verdict.DELAYED else self.since

    def deadline(self) -> float | None:
        """When it begins to count."""
        return self.begins if self.signal.verdict is Verdict.DELAYED else None

    @property
    def waits_for(self) -> frozenset[Clears]:
        """Any of these ends it."""
        return self.signal.clears_on or UNSAID

    @property
    def key(self) -> tuple[str, Verdict, frozenset[Clears]]:
        """Tells it from the others of its hardware. The message does not: each line of a log may have another."""
        return self.signal.reason, self.signal.verdict, self.waits_for

    def outlived(self, boot: str) -> bool:
        """Whether this is another boot than the record's, and that is what it waits for."""
        return self.boot != boot and bool(self.waits_for & _REBOOT)


_MILD: Final = frozenset({Verdict.DEGRADED, Verdict.INFO})
"""Where there is no more room, these give way to what makes hardware unhealthy."""


class Latches:
    """The latched signals of all hardware, and the bindings of the hardware that is there."""

    def __init__(self) -> None:
        self._latched: defaultdict[str, dict[object, Latch]] = defaultdict(dict)
        self._bindings: defaultdict[str, dict[str, str]] = defaultdict(dict)  # by hardware, and backend that sees it so
        self.revision = 0
        """Raised whenever anything that is latched changes."""
        self.ended: deque[tuple[Latch, Clears]] = deque(maxlen=_OF_ONE)
        """What has ended, and with what, until it is taken from here."""

    def of(self, hardware: str) -> Iterable[Latch]:
        """The latches of this hardware."""
        return self._latched[hardware].values() if hardware in self._latched else ()

    def all(self) -> list[Latch]:
        """Every latch, by hardware."""
        return [latch for of_one in self._latched.values() for latch in of_one.values()]

    def take(self, signal: Signal, record: Record, now: float) -> bool:
        """Latch what a record said, or end what it says is over; returns whether that changes anything that is said.

        Said again, a signal keeps its first words, which are nearest to the cause, and belongs to the later binding.
        """
        if signal.verdict is Verdict.FINE:
            return self.clear(signal.clears_on, signal.hardware)
        if signal.verdict is Verdict.NOTE:
            return False
        bindings = dict(self._bindings.get(signal.hardware, {}))
        latch = Latch(signal, now, record.source, record.boot, record.sequence, bindings)
        known = self._latched.get(signal.hardware, {}).get(latch.key)
        if known is not None:
            latch = replace(latch, signal=known.signal, since=known.since)
        return self._put(latch) and known is None

    def replace_all(self, latches: Iterable[Latch]) -> None:
        """Have these latched and no others, except those whose hardware has another binding already."""
        self._latched.clear()
        for latch in latches:
            self._put(latch)
        for hardware in list(self._latched):
            self._compare(hardware)

    def clear(self, happened: Set[Clears], hardware: str) -> bool:
        """End the latches that wait for any of this; returns whether there were any."""
        over = [latch for latch in self.of(hardware) if latch.waits_for & happened]
        self.ended.extend((latch, min(latch.waits_for & happened, key=lambda it: it.value)) for latch in over)
        return self._drop(over)

    def bound(self, backend: str, hardware: str, binding: str) -> tuple[bool, bool]:
        """A backend sees the hardware with this binding, or none ("": gone, no driver, unknown).

        What the binding was is forgotten where there is none: what a record says while a driver is being bound belongs
        to the binding that is seen next.

        Returns:
            whether it had another binding before, and whether any latch changed.
        """
        before = self._bindings.get(hardware, {}).get(backend, "")
        if before == binding:
            return False, False
        if binding:
            self._bindings[hardware][backend] = binding
        else:
            del self._bindings[hardware][backend]
            if not self._bindings[hardware]:
                del self._bindings[hardware]
        return bool(before), self._compare(hardware)

    def _compare(self, hardware: str) -> bool:
        """End latches of bindings that are gone; bind those without any to the present ones. Returns whether a latch changed.

        Backends look one after the other: what one of them still sees may be what another saw before, and the other way
        round. So a latch that was taken in between is of both bindings, and stays with the later one.
        """
        if (seen := self._bindings.get(hardware)) is None:
            return False
        revision, over = self.revision, []
        for latch in list(self.of(hardware)):
            if not latch.bindings:
                self._put(replace(latch, bindings=dict(seen)))
            elif Clears.REBIND in latch.waits_for and set(seen.values()).isdisjoint(latch.bindings.values()):
                over.append(latch)
        self.ended.extend((latch, Clears.REBIND) for latch in over)
        self._drop(over)
        return self.revision != revision

    def _put(self, latch: Latch) -> bool:
        """Keep this latch; False if there is no room for it."""
        of_one = self._latched.get(latch.signal.hardware)
        if of_one is None and len(self._latched) >= _HARDWARE:
            return False
        if of_one is not None and latch.key not in of_one and len(of_one) >= _OF_ONE:
            mild = next((it for it in of_one.values() if it.signal.verdict in _MILD), None)
            if mild is None or latch.signal.verdict in _MILD:
                return False
            self._drop([mild])
        self._latched[latch.signal.hardware][latch.key] = latch
        self.revision += 1
        return True

    def _drop(self, over: list[Latch]) -> bool:
        for latch in over:
            of_one = self._latched[latch.signal.hardware]
            del of_one[latch.key]
            if not of_one:
                del self._latched[latch.signal.hardware]
        self.revision += len(over)
        return bool(over)


# --- what is there, went away and came back ---


PLUGGED: Final = ("pci:", "usb:")
"""What the names of hardware begin with that can be pulled out."""


WINDOW: Final = 600.0
"""Seconds. A link that retrains every two minutes is of no use to a job; one that fails hourly is still used."""


class _Gone(Struct, frozen=True):
    since: float
    identities: frozenset[str]
    """As it was offered last."""


class Presence:
    """Where each piece of hardware is seen, and what has gone."""

    def __init__(self) -> None:
        self._seen: dict[
            Source, dict[str, frozenset[str] | None]
        ] = {}  # its identities; None: no device of it can be used
        self._places: defaultdict[str, set[Source]] = defaultdict(set)
        self._offered: dict[str, frozenset[str]] = {}  # of what is there and was to be had: its identities then
        self._gone: dict[str, _Gone] = {}

    def forget(self, backend: str) -> None:
        """Another instance of the backend looks from now on: what it does not show may be what it is not to look for.

        So such hardware does not count as gone, if no other backend shows it.
        """
        for names in [names for source, names in self._seen.items() if source[0] == backend]:
            for name in names:
                if all(place[0] == backend for place in self._places[name]):
                    self._offered.pop(name, None)

    def found(
        self,
        backend: str,
        units: Mapping[str, Iterable[Device]],
        beside: Mapping[str, Iterable[Device]],
        now: float,
        excused: Callable[[str], bool],
    ) -> list[str]:
        """These units hold exactly these devices, and `beside` them those that cannot be used; returns what is back.

        Another card in its place is not it back; nor is what moved in no time, or was away for longer than a `WINDOW`.

        Args:
            backend: which.
            units: with their devices.
            beside: the same.
            now: monotonic seconds.
            excused: whether this hardware may go and come, as far as is known.
        """
        concerned: set[str] = set()
        for unit, devices in units.items():
            source = backend, unit
            before, seen = self._seen.pop(source, {}), _seen(devices, beside.get(unit, ()))
            for name in before.keys() - seen.keys():
                self._places[name].discard(source)
                if not self._places[name]:
                    del self._places[name]
            for name in seen:
                self._places[name].add(source)
            if seen:
                self._seen[source] = seen
            concerned |= before.keys() | seen.keys()
        self._gone = {name: gone for name, gone in self._gone.items() if now - gone.since <= WINDOW}
        return [name for name in sorted(concerned) if self._is_back(name, now, excused)]

    def _is_back(self, name: str, now: float, excused: Callable[[str], bool]) -> bool:
        if name not in self._places:
            was = self._offered.pop(name, None)
            if was is not None and not excused(name):
                self._gone[name] = _Gone(now, was)
            return False
        sights = [seen for source in self._places[name] if (seen := self._seen[source][name]) is not None]
        if not sights:
            return False
        identities = self._offered[name] = frozenset[str]().union(*sights)
        gone = self._gone.pop(name, None)
        if gone is None or gone.since == now or excused(name):
            return False
        return not (gone.identities and identities) or not gone.identities.isdisjoint(identities)


def _seen(devices: Iterable[Device], beside: Iterable[Device]) -> dict[str, frozenset[str] | None]:
    """The hardware of these that can be pulled out, with the identities of the devices that can be had."""
    seen: dict[str, frozenset[str] | None] = {}
    for device in beside:
        seen.update((name, None) for name in device.hardware if name.startswith(PLUGGED))
    for device in devices:
        for name in device.hardware | device.depends:
            if name.startswith(PLUGGED):
                known = seen.setdefault(name, None)
                if not device.unusable:
                    told = {device.identity} if device.identity and name in device.hardware else ()
                    seen[name] = (known or frozenset()).union(told)
    return seen
