"""Notes what happened to hardware and changed no health (an XID of an application), and whose pod it was.

Lines that the kernel prints of one event within a second are one note. Whose it was: of a process, the pod whose cgroup it is
in; else every pod that holds the hardware, by what the kubelet says now, or by the history for what happened earlier.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from agent.history.timeline import SPAN, Key, Note
from agent.inventory.inventory import Inventory
from agent.model import SlotKey
from agent.runtime.pacing import SYSTEM, Clock, Doorbell
from agent.runtime.workers import NoWorkerError, Workers
from backends.base import Signal
from backends.linux import files

PER_HARDWARE: Final = 50
"""Notes of one piece of hardware; the oldest goes first."""

_GATHER: Final = (
    0.1  # seconds for the other lines of an event: NVIDIA's driver writes the three of an XID 13 within 4 ms
)
_ONE: Final = 1.0  # seconds between lines of one event
_PAST: Final = 10.0  # seconds after which those who hold the hardware may be others
_MANY, _WHILE = 10, 600.0  # notes of a kind within so many seconds; those that follow are counted with the last
_WAITING: Final = 256  # of what is not told yet, and of kinds that may go on
_THREADS: Final = 2
_CGROUP_BYTES: Final = 65536

_POD: Final = re.compile(rb"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./\n]|\Z)")
"""A pod's cgroup: `pod<UID>` of the kubelet's cgroupfs driver, `…-pod<UID with _>.slice` of its systemd driver
(pkg/kubelet/cm of Kubernetes); a static pod's UID is a hash."""

log = structlog.get_logger()


class _Waiting(Struct):
    """A note that is not told yet."""

    note: Note
    last: float
    """When the kernel wrote its last line, monotonic."""
    pod: asyncio.Future[str | None] | None = None


class Notes:
    """The notes of all hardware."""

    def __init__(
        self,
        inventory: Inventory,
        pods: Callable[[SlotKey], Iterable[str]],
        uids: Callable[[SlotKey], Mapping[str, str]],
        held_at: Callable[[Key, float], Iterable[str]],
        proc: Path,
        *,
        clock: Clock = SYSTEM,
        on_note: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin with none.

        Args:
            inventory: which devices are of the hardware, and who claims them.
            pods: tells who has a slot, as `namespace/name`, as far as is known.
            uids: tells the UIDs of these pods, as far as they are known.
            held_at: tells who had a device at a time of the wall clock, as far as was noted.
            proc: the host's /proc.
            clock: the time.
            on_note: is called when there is something new to keep.
        """
        self._inventory, self._pods, self._uids, self._held_at, self._proc = inventory, pods, uids, held_at, proc
        self._clock, self._wall, self._on_note = clock.now, clock.wall, on_note
        self._notes: dict[str, deque[Note]] = {}
        self._last: dict[tuple[str, str], float] = {}  # hardware and reason → the last line, monotonic
        self._waiting: list[_Waiting] = []
        self._news = Doorbell()
        self._workers = Workers("history", _THREADS)

    def restore(self, notes: Iterable[Note]) -> None:
        """Take in what an earlier run noted; of a note that was kept several times the last counts."""
        kept = {(it.hardware, it.reason, it.pid, it.time): it for it in (*notes, *self.all())}
        self._notes.clear()
        for note in sorted(kept.values(), key=lambda it: it.time):
            self._of(note.hardware).append(note)

    def all(self) -> Iterator[Note]:
        """The notes of the last 24 hours."""
        begin = self._wall() - SPAN
        return (note for notes in self._notes.values() for note in notes if note.time > begin)

    def of(self, hardware: Iterable[str]) -> list[Note]:
        """Those of this hardware, the oldest first."""
        names = set(hardware)
        return sorted((note for note in self.all() if note.hardware in names), key=lambda it: it.time)

    def _of(self, hardware: str) -> deque[Note]:
        return self._notes.setdefault(hardware, deque(maxlen=PER_HARDWARE))

    def add(self, note: Note) -> None:
        """Have one that is whole."""
        self._of(note.hardware).append(note)
        self._on_note()

    def take(self, signal: Signal, heard: float) -> None:
        """Something happened; `heard` is when, in seconds of the monotonic clock. It is told a moment later."""
        now, key = self._clock(), (signal.hardware, signal.reason)
        heard = min(heard, now)
        is_going_on = heard - self._last.get(key, -_ONE) < _ONE
        if len(self._last) >= _WAITING:
            self._last.clear()
        self._last[key] = heard
        for it in reversed(self._waiting):
            if is_going_on and (it.note.hardware, it.note.reason) == key and _is_same(it.note.pid, signal.pid):
                it.note = replace(it.note, pid=signal.pid or it.note.pid, process=signal.process or it.note.process)
                it.last, it.pod = heard, it.pod or self._pod_of(signal.pid, heard)
                return
        then = self._wall() - (now - heard)
        if self._count_if_alike(signal, then, is_going_on=is_going_on) or len(self._waiting) >= _WAITING:
            return
        note = Note(signal.hardware, signal.reason, signal.message, then, pid=signal.pid, process=signal.process)
        self._waiting.append(_Waiting(note, heard, self._pod_of(signal.pid, heard)))
        self._news.set()

    def _count_if_alike(self, signal: Signal, then: float, *, is_going_on: bool) -> bool:
        """Count a signal with the note that it belongs to; False if there is none."""
        notes = self._of(signal.hardware)
        alike = [it for it in notes if it.reason == signal.reason]
        if not alike:
            return False
        last, is_flood = alike[-1], sum(then - it.time < _WHILE for it in alike) >= _MANY
        if not is_flood and not (_is_same(last.pid, signal.pid) and (is_going_on or abs(then - last.time) < _ONE)):
            return False
        notes[notes.index(last)] = replace(last, count=last.count + 1)
        self._on_note()
        return True

    def _pod_of(self, pid: int | None, heard: float) -> asyncio.Future[str | None] | None:
        """Read at once which pod a process is of: it may be about to end."""
        if pid is None or self._clock() - heard > _PAST:
            return None
        try:
            return self._workers.start(partial(pod_of, self._proc, pid))
        except NoWorkerError:
            return None

    async def run(self) -> None:
        """Note and log what happens, for ever; only the one agent of a node does."""
        try:
            while True:
                await self._news.rung(gather=_GATHER)
                waiting, self._waiting = self._waiting, []
                for it in waiting:
                    await self._tell(it)
                self._on_note()
        finally:
            self._workers.close()

    async def _tell(self, it: _Waiting) -> None:
        found = [(one.device, one.placed) for one in self._inventory.on({it.note.hardware}, minding=True) if one.placed]
        devices = [(placed.resource, device.key) for device, placed in found]
        is_past = self._clock() - it.last > _PAST
        if is_past:
            pods: Iterable[str] = {pod for key in devices for pod in self._held_at(key, it.note.time)}
        else:
            uid = await it.pod if it.pod is not None else None
            slots = [(placed.resource, device_id) for _, placed in found for device_id in placed.ids]
            pods = self._whose(uid, slots)
        note = replace(it.note, pods=tuple(sorted(pods)))
        self._of(note.hardware).append(note)
        resource, device = devices[0] if devices else ("", "")
        at = datetime.fromtimestamp(note.time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if is_past else ""
        log.info(
            "hardware-noted", resource=resource, device=device, hardware=note.hardware, reason=note.reason,
            message=note.message, pid=note.pid, process=note.process, pods=note.pods, at=at,
        )  # fmt: skip

    def _whose(self, uid: str | None, slots: Iterable[SlotKey]) -> Set[str]:
        """Of those who have the slots, the pod with this UID; none if it is empty, of no pod; else each that it may be."""
        if uid == "":
            return frozenset()
        held = [slot for slot in slots if self._pods(slot)]
        mine = {pod for slot in held for pod, its in self._uids(slot).items() if its == uid} if uid else set()
        return mine or {pod for slot in held for pod in self._pods(slot)}


def _is_same(one: int | None, other: int | None) -> bool:
    """Whether both numbers can be the same process. Not every line names it."""
    return one is None or other is None or one == other


def pod_of(proc: Path, pid: int) -> str | None:
    """The UID of the pod that a process of the host is of; empty if of none; None if that cannot be read."""
    try:
        if files.read(proc / "2/comm", 64).strip() != b"kthreadd":
            return None  # this /proc is not the host's: its numbers are other processes
        cgroup = files.read(proc / str(pid) / "cgroup", _CGROUP_BYTES)
    except OSError:
        return None
    return uid_in(cgroup)


def uid_in(cgroup: bytes) -> str:
    """The UID of the pod that a cgroup's name or path is of; empty if it is of none."""
    found = _POD.search(cgroup)
    return found[1].decode().replace("_", "-") if found else ""
