"""Keeps what must outlive a restart: restores it into its owners, and has it written to one file whenever it changes.

What a dead agent wrote is read before anything is listed, so that what was drained, latched or quarantined is not Healthy
for a moment. Nothing is written while another agent may still be running: the file is its.

The file has JSON lines, is in `state_dir`, and is written by a thread of its own. A line holds one part of the state whole,
or which claims came and went since the line before; a line that was cut off is passed over. An Allocate waits for its line,
however much else is held: adding one takes 15 us where renaming a new file over the old takes 300 us, or 2 ms (ext4 flushes
it then). A file that has doubled is replaced by one that says each part once. A write that fails is reported, once, and
refuses nothing.

What an operator decides is on the disk itself before he is told: health is synced when it is written. Claims are synced
once there is nothing else to write, since a machine that dies takes the pods along. Health is kept in a second file as
well: where the first is damaged, it is moved aside, and health is what the second says.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import structlog
from msgspec import structs

from agent.claims.ledger import HeldThen, Ledger
from agent.hardware.releases import Releaser
from agent.health import HealthBook, KeptHealth
from agent.history.recorder import Recorder
from agent.history.timeline import Record
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Offered, Shortfall
from agent.model import Health, Held
from agent.runtime.errors import FairleadError, words
from agent.runtime.pacing import SYSTEM, Clock, Doorbell
from agent.runtime.problems import Problems
from agent.runtime.workers import in_batches
from backends.base import Clears
from backends.interface.decoding import decoded
from backends.linux import files

_PATIENCE: Final = 3.0
"""Seconds that the disk may take for what an operator decided, before he is told that it is not kept."""

_AT_THE_END: Final = 1.0  # seconds that a process which was told to end gives the disk

_LATEST: Final = 32503680000.0  # the year 3000, in seconds since the epoch: no later day can be written down everywhere


class NotYetError(FairleadError):
    """Another agent may still be running, and the state is its."""


class StateKeeper:
    """Between the state file and those who own what is in it."""

    def __init__(
        self,
        state: StateFile,
        ledger: Ledger,
        releaser: Releaser,
        inventory: Inventory,
        health: HealthBook,
        shortfall: Shortfall,
        history: Recorder,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._state = state
        self._ledger, self._releaser = ledger, releaser
        self._inventory, self._health, self._shortfall = inventory, health, shortfall
        self._history = history
        self._clock, self._wall = clock.now, clock.wall
        self._is_alone = False
        self._claims_changed = False
        self._written, self._written_offered = health.revision, shortfall.revision
        self._late = False
        self._wanted, self._wants_claims = Doorbell(), False

    async def run(self) -> None:
        """Write whatever is to be written soon, until cancelled; what comes while it is being written is written once."""
        while True:
            await self._wanted.rung()
            if self._wants_claims:
                self._wants_claims = False
                await self.write_claims()
            await self.write_health()

    def write_soon(self, *, claims: bool = False) -> None:
        """Have health written if it changed, and the claims, if they did."""
        self._wants_claims |= claims
        self._wanted.set()

    async def restore(self) -> None:
        """Take in what the file says; where it says nothing, all stays as it is (reading it blocks)."""
        kept, now = self._state.read(), self._clock()
        rebooted = kept.boot != self._health.boot if kept.boot else None
        another_boot = kept.health is None or kept.health.boot != self._health.boot
        async for batch in in_batches(kept.claims or ()):
            self._inventory.claim(self._ledger.restore(batch, now, rebooted=rebooted))
        if kept.releasing is not None:
            self._releaser.add(kept.releasing)
        if kept.offered is not None:
            self._shortfall.restore(kept.offered, another_boot=another_boot)
        if kept.history is not None:
            self._history.restore(kept.history)
        if kept.health is not None:
            unchanged = self._health.revision == self._written
            self._inventory.set_health(self._health.restore(kept.health, now, self._wall()))
            if unchanged:
                self._written = self._health.revision

    async def begin(self) -> None:
        """No other agent runs: write from now on, and first what has changed before."""
        self._is_alone = True
        if self._claims_changed:
            await self.write_claims()
        await self.write_health()
        await self.write_offered()
        if self._state.damage:  # so that the damaged file is moved aside now
            await self._state.write(health=self._health.kept())

    async def end(self) -> None:
        """Have what changed last written, though the process is ending; from now on another agent may write the file."""
        with anyio.CancelScope(shield=True):
            health = self._health.kept() if self._health.revision != self._written else None
            await self._state.write(health=health, history=self._history.record(), patience=_AT_THE_END)
        self._is_alone = False

    async def write_claims(self) -> None:
        """Have the claims, and what is to be undone of ended ones, written; returns when they are, or the disk takes too long."""
        self._claims_changed = True
        if self._is_alone:
            await self._state.write(
                claims=self._ledger.held_now(), releasing=self._releaser.pending(), boot=self._health.boot
            )

    async def write_health(self) -> None:
        """Have what is kept of health written, if it changed; returns when it is, or the disk takes too long."""
        if self._is_alone and self._health.revision != self._written:
            self._written = self._health.revision
            self._late = not await self._state.write(health=self._health.kept(), patience=_PATIENCE)

    async def write_offered(self) -> None:
        """Have what was offered written, if it changed, so that the next run knows what is gone; returns as the others."""
        if self._is_alone and self._shortfall.revision != self._written_offered:
            self._written_offered = self._shortfall.revision
            await self._state.write(offered=self._shortfall.offered)

    async def write_history(self) -> None:
        """Have what was noted of devices written, and that the daemon lives; returns as the others."""
        if self._is_alone:
            await self._state.write(history=self._history.record())

    def unkept(self) -> str:
        """Why a restart would forget what is kept here, one sentence; empty if it would not."""
        if self._state.complaint:
            return f"{self._state.path} cannot be written: {self._state.complaint}; a restart would forget drains"
        self._late = self._late and self._state.is_behind
        if self._late:
            return f"{self._state.path} could not be written within {_PATIENCE:g} s; a restart might forget drains"
        return ""

    def damage(self) -> str:
        """What was wrong with the state file at the start, one sentence; empty if nothing was."""
        return self._state.damage

    def _check_alone(self) -> None:
        """Refuse what would be forgotten: another agent's state is not ours to change.

        Raises:
            NotYetError: another agent may be running.
        """
        if not self._is_alone:
            raise NotYetError("this Fairlead does not serve the node now and would forget it")

    def drain(self, hardware: Iterable[str], reason: str, until: float | None) -> dict[str, Health]:
        """An operator takes this hardware out of service; the hardware whose health changed.

        Raises:
            FairleadError: the time is past, or none.
            NotYetError: another agent may be running.
        """
        wall = self._wall()
        if until is not None and not wall < until < _LATEST:
            raise FairleadError(
                "a drain must end later than now, in this millennium; without an end it lasts until undrain"
            )
        self._check_alone()
        return self._health.drain(hardware, reason, until, self._clock(), wall)

    def undrain(self, hardware: Iterable[str]) -> tuple[dict[str, Health], tuple[str, ...]]:
        """An operator puts this hardware back into service; the hardware whose health changed, the reasons that ended.

        Raises:
            NotYetError: another agent may be running.
        """
        self._check_alone()
        names, now = sorted(set(hardware)), self._clock()
        said = [it for name in names for it in self._health.signals_of(name, now)]
        ended = dict.fromkeys(it.reason for it in said if Clears.OPERATOR in it.waits_for)
        return self._health.undrain(names, now), tuple(ended)


# --- the file ---


_FORMAT: Final = 3

_READABLE: Final = frozenset({1, 2, _FORMAT})
"""1 had claims in every line, and nothing else; 2 had every part whole."""

_MOST_READ: Final = 64 << 20  # bytes of a file that is ours; a node's state has some 100 kB
_MOST_BYTES: Final = 256 << 10  # of the file, before it is replaced; more where twice what is kept is more
_WRITE_PATIENCE: Final = 0.1  # seconds that an Allocate waits for its claim to be in the file
_RETRY: Final = 30.0  # seconds before what could not be written is tried again, though nothing changes

_LOST: Final = "asking the kubelet who holds what; drains, and what the kernel said of devices, are forgotten"
_SAVED: Final = "asking the kubelet who holds what; drains, and what the kernel said of devices, are those of"

_ENCODE: Final = msgspec.json.Encoder(enc_hook=float).encode
"""A backend may give times as `Seconds`, which msgspec does not take for the number that it is."""

log = structlog.get_logger()


class Kept(msgspec.Struct, frozen=True, omit_defaults=True):
    """The file's content; of a line, what the others do not say is None."""

    claims: Collection[Held] | None = None
    releasing: Collection[Held] | None = None
    """Claims that are over and whose backend has not undone them yet."""
    health: KeptHealth | None = None
    offered: tuple[Offered, ...] | None = None
    """What was offered last, and what of it is gone."""
    history: Record | None = None
    """How devices were; a line has only the changes that the lines before it lack."""
    boot: str | None = None
    """The machine's boot in which the claims were written."""


_PARTS: Final = Kept.__struct_fields__
_OF_CLAIMS: Final = ("claims", "releasing")


class _Line(Kept, frozen=True, omit_defaults=True):
    version: int = 0
    less: dict[str, Sequence[Held]] = {}
    """Of the parts of claims, what is over."""
    more: dict[str, Sequence[Held]] = {}
    """And what began after that."""


class StateFile:
    """Reads the state once and writes it whenever it changes, the newest content only."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.json"
        self._second = directory / "state.health.json"
        self._aside = directory / "state.damaged.json"
        self._wanted = self._written = 0  # count what was asked to be written, and what of it is; raised on the loop
        self._content = Kept()
        self._unwritten = Problems().trouble(
            "", f"{self.path} cannot be written", "state-not-written", "state-written-again",
            level="error", file=str(self.path), then=f"a restart of Fairlead would lose it: {_LOST}",
        )  # fmt: skip
        self.damage = ""
        """What was wrong with the file when it was read, one sentence for a person; empty if nothing was."""
        self._work = threading.Event()
        self._waiters: dict[int, asyncio.Future[None]] = {}  # those that still wait, by the number of their write
        self._runs = False  # whether the thread does
        self._saved = Kept()  # as in the file; the thread's
        self._file: int | None = None  # open for adding lines; the thread's
        self._room = _MOST_BYTES  # that the open file may take; the thread's
        self._aside_is_kept = False
        self._unsynced = False  # whether the open file has lines that the disk may lack; the thread's

    @property
    def complaint(self) -> str:
        """Why it could not be written the last time; empty if it was."""
        return self._unwritten.reason

    @property
    def is_behind(self) -> bool:
        """Whether something is to be written and is not yet."""
        return self._written < self._wanted

    def read(self) -> Kept:
        """What an earlier run left; nothing if there is none, or none that can be read (blocking).

        Parts that this run does not write stay in the file.
        """
        try:
            kept, torn = _contents(files.read(self.path, _MOST_READ, follow=False))
        except FileNotFoundError:
            return Kept()
        except NotADirectoryError as error:  # nothing can be damaged, or put aside, where no file can be
            log.warning("state-unreadable", file=str(self.path), reason=words(error), then=_LOST)
            return Kept()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, _FormatError) as error:
            kept, torn = Kept(), error
        if torn is not None:
            kept = self._without_damage(kept, torn)
        self._content = kept
        return kept

    def _without_damage(self, kept: Kept, error: BaseException) -> Kept:
        """What is left of a damaged file, with health as the second file has it."""
        try:
            health = _contents(files.read(self._second, _MOST_READ, follow=False))[0].health
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, _FormatError):
            health = None
        then = _LOST if health is None and kept.health is None else f"{_SAVED} {self._second if health else self.path}"
        log.warning("state-unreadable", file=str(self.path), reason=words(error), aside=str(self._aside), then=then)
        self.damage = f"{self.path} was damaged ({words(error)}) and is kept as {self._aside}; {then}"
        return kept if health is None else structs.replace(kept, health=health)

    async def write(
        self,
        claims: Collection[Held] | None = None,
        releasing: Collection[Held] | None = None,
        health: KeptHealth | None = None,
        offered: Collection[Offered] | None = None,
        history: Record | None = None,
        boot: str | None = None,
        *,
        patience: float | None = None,
    ) -> bool:
        """Have these parts written; returns when they are, or when the disk takes too long (they are all the same).

        Args:
            claims: what pods hold, which must not change: what began since the last time costs no look at the others.
            releasing: what is to be undone of ended claims.
            health: what is kept of health.
            offered: what was offered last, and what of it is gone.
            history: how devices were.
            boot: the machine's, with claims.
            patience: the seconds that the disk may take; by default what an Allocate can wait.

        Returns:
            whether they are on the disk.
        """
        if claims is not None:
            self._content = structs.replace(self._content, claims=claims)
        if releasing is not None:
            self._content = structs.replace(self._content, releasing=releasing)
        if health is not None:
            self._content = structs.replace(self._content, health=health)
        if offered is not None:
            self._content = structs.replace(self._content, offered=tuple(offered))
        if history is not None:
            self._content = structs.replace(self._content, history=history)
        if boot is not None and boot != self._content.boot:
            self._content = structs.replace(self._content, boot=boot)
        self._wanted += 1
        if not self._runs and not self._start_thread():
            return False
        number, done = self._wanted, asyncio.get_running_loop().create_future()
        self._waiters[number] = done
        if not self._work.is_set():  # else it is about to look; to wake a thread costs as much as its line
            self._work.set()
        try:
            with anyio.move_on_after(
                _WRITE_PATIENCE if patience is None else patience
            ):  # wait takes a turn of the loop more
                await done
                return not self.complaint
            return False
        finally:
            self._waiters.pop(number, None)

    def _start_thread(self) -> bool:
        """Start the thread that writes; False if the system has none to give now; it may for the next write."""
        try:
            threading.Thread(target=self._serve, args=[asyncio.get_running_loop()], name="state", daemon=True).start()
        except RuntimeError as error:
            self._finish(self._wanted, words(error))
            return False
        self._runs = True
        return True

    def _serve(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write whatever is wanted, and sync it once there is nothing else to write, until the loop is closed."""
        number, complaint = 0, ""
        while True:
            is_idle = self._unsynced and not self._work.is_set()
            try:
                if is_idle:
                    self._sync()
                    continue
                self._work.wait(_RETRY if complaint else None)
                self._work.clear()
                number, content = self._wanted, self._content
                self._save(content)
                complaint = ""
            except Exception as error:  # noqa: BLE001  # whatever it is, the thread must go on
                complaint = words(error)
                self._forget()
            try:
                loop.call_soon_threadsafe(self._finish, number, complaint)
            except RuntimeError:
                return  # the loop is closed: the process is ending

    def _save(self, content: Kept) -> None:
        """Write what is new: as lines more, or with all else in a fresh file where the old is too long, gone or broken."""
        if lines := _difference(self._saved, content):
            if not self._append(lines):
                self._begin_anew(_difference(Kept(), content))
            if content.health is not self._saved.health:
                self._sync()
                files.replace(self._second, _line(Kept(health=content.health)), synced=True)
            self._saved = content

    def _append(self, lines: bytes) -> bool:
        """Add lines to the file if it is still there and not too long; False if they are not whole in it."""
        if self._file is None:
            return False
        try:
            found = os.fstat(self._file)
            fits = found.st_nlink > 0 and found.st_size + len(lines) <= self._room
            self._unsynced = fits and os.write(self._file, lines) == len(lines)
        except OSError:
            self._unsynced = False  # a fresh file will tell
        if not self._unsynced:
            os.close(self._file)
            self._file = None
        return self._unsynced

    def _begin_anew(self, data: bytes) -> None:
        """Put a fresh file into the place of the old one; a damaged one is kept aside."""
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        for left in self.path.parent.glob(f".{self.path.name}.[0-9]*"):  # by versions that were killed while they wrote
            with suppress(OSError):
                left.unlink()
        if self.damage and not self._aside_is_kept:
            with suppress(FileNotFoundError):
                self.path.rename(self._aside)
            self._aside_is_kept = True
        files.replace(self.path, data, synced=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._room = max(_MOST_BYTES, 2 * len(data))

    def _sync(self) -> None:
        """Sync what was added."""
        if self._unsynced and self._file is not None:
            self._unsynced = False
            os.fdatasync(self._file)

    def _forget(self) -> None:
        """After a failure it is not known what the file says: the next write is a whole file."""
        if self._file is not None:
            with suppress(OSError):
                os.close(self._file)
        self._file, self._saved, self._unsynced = None, Kept(), False

    def _finish(self, number: int, complaint: str) -> None:
        """Tell all who wait for the writes up to this one; log a complaint once, and its end."""
        self._written = self._written if complaint else number
        for done in [done for wanted, done in self._waiters.items() if wanted <= number]:
            if not done.done():
                done.set_result(None)
        if complaint:
            self._unwritten.report_once(complaint)
        else:
            self._unwritten.healed()


class _FormatError(Exception):
    """A newer Fairlead wrote this."""


def _line(kept: Kept) -> bytes:
    return _ENCODE(_Line(**structs.asdict(kept), version=_FORMAT)) + b"\n"


def _difference(before: Kept, after: Kept) -> bytes:
    """The lines that make one of the other; a part that is None stays as it is."""
    lines = b""
    for name in _PARTS:
        old, new = getattr(before, name), getattr(after, name)
        if new is None or new is old:
            continue
        if old is not None and name == "history":
            new = new.since(old)
        if old is None or name not in _OF_CLAIMS:
            whole: Any = tuple(new) if name in _OF_CLAIMS else new
            lines += _line(Kept(**{name: whole}))
            continue
        less, more = _ended_and_begun(old, new)
        if less or more:
            lines += _ENCODE(_Line(version=_FORMAT, less={name: less}, more={name: more})) + b"\n"
    return lines


def _ended_and_begun(old: Collection[Held], new: Collection[Held]) -> tuple[Sequence[Held], Sequence[Held]]:
    if isinstance(new, HeldThen) and (begun := new.begun_since(old)) is not None:
        return (), begun
    olds, news = set(map(id, old)), set(map(id, new))  # 5,000 are compared in a millisecond, by their values in ten
    return [held for held in old if id(held) not in news], [held for held in new if id(held) not in olds]


def _contents(data: bytes) -> tuple[Kept, BaseException | None]:
    """What all lines together say, and what is wrong with one that could not be read.

    A last line without its end was cut off while it was written; no caller was told that it is kept.

    Raises:
        msgspec.MsgspecError: there is no line of ours.
        _FormatError: a line is of another format.
    """
    health, offered, history, boot, claims = None, None, None, None, dict[str, dict[Held, None]]()
    found, broken = False, None
    lines = data.splitlines(keepends=True) or [b""]
    for line in lines:
        try:
            said = decoded(line, _Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if line is not lines[-1] or line.endswith(b"\n") or len(lines) == 1:
                broken = error
            continue
        if said.version not in _READABLE:
            raise _FormatError(f"it has format {said.version}, and this Fairlead reads {_FORMAT}")
        found, health, boot = True, said.health or health, said.boot or boot
        offered = said.offered if said.offered is not None else offered
        history = said.history.after(history) if said.history else history
        for name in _OF_CLAIMS:
            if (whole := getattr(said, name)) is not None:
                claims[name] = dict.fromkeys(whole)
            if name in said.less or name in said.more:
                part = claims.setdefault(name, {})
                for held in said.less.get(name, ()):
                    part.pop(held, None)
                part |= dict.fromkeys(said.more.get(name, ()))
    if broken is not None and not found:
        raise broken
    parts = {name: tuple(part) for name, part in claims.items()}
    return Kept(**parts, health=health, offered=offered, history=history, boot=boot), broken
