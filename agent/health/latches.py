"""Keeps the signals made of kernel records until something clears them, however old the record is."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Set
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from agent.health.severity import matured
from backends.base import Clears, Record, Signal, Verdict

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
        """Is this another boot than the record's, and is that what it waits for?"""
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
        """What has ended, and with what, until somebody takes it."""

    def of(self, hardware: str) -> Iterable[Latch]:
        """The latches of this hardware."""
        return self._latched[hardware].values() if hardware in self._latched else ()

    def all(self) -> list[Latch]:
        """Every latch, by hardware."""
        return [latch for of_one in self._latched.values() for latch in of_one.values()]

    def take(self, signal: Signal, record: Record, now: float) -> bool:
        """Latch what a record said, or end what it says is over; does this change anything that is said?

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
        """End the latches that wait for any of this; were there any?"""
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
        """End the latches of bindings that are gone; give the present bindings to latches without any. Did any latch change?

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
