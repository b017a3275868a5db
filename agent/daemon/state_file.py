"""Keeps what must outlive a restart in one file of JSON lines in `state_dir`, written by a thread of its own.

A line holds one part of the state whole, or which claims came and went since the line before; a line that was cut off is
passed over. An Allocate waits for its line, however much else is held: adding one takes 15 us where renaming a new file
over the old takes 300 us, or 2 ms (ext4 flushes it then). A file that has doubled is replaced by one that says each part
once. A write that fails is reported, once, and refuses nothing.

What an operator decides is on the disk itself before he is told: health is synced when it is written. Claims are synced
once there is nothing else to write, since a machine that dies takes the pods along. Health is kept in a second file as
well: where the first is damaged, it is moved aside, and health is what the second says.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import structlog
from msgspec import structs

from agent.claims.ledger import HeldThen
from agent.health import KeptHealth
from agent.history.timeline import Record
from agent.inventory.shortfall import Offered
from agent.model import Held
from agent.runtime.errors import words
from agent.runtime.problems import Problems
from backends.linux import files

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
        self._runs = False  # does the thread?
        self._saved = Kept()  # as in the file; the thread's
        self._file: int | None = None  # open for adding lines; the thread's
        self._room = _MOST_BYTES  # that the open file may take; the thread's
        self._aside_is_kept = False
        self._unsynced = False  # has the open file lines that the disk may not have? the thread's

    @property
    def complaint(self) -> str:
        """Why it could not be written the last time; empty if it was."""
        return self._unwritten.reason

    @property
    def is_behind(self) -> bool:
        """Is there something that is to be written and is not yet?"""
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
            patience: the seconds that the disk may take; by default what an Allocate can wait.

        Returns:
            are they on the disk?
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
        """Start the thread that writes. If the system has none to give now, it may have one for the next write."""
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
    health, offered, history, claims = None, None, None, dict[str, dict[Held, None]]()
    found, broken = False, None
    lines = data.splitlines(keepends=True) or [b""]
    for line in lines:
        try:
            said = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if line is not lines[-1] or line.endswith(b"\n") or len(lines) == 1:
                broken = error
            continue
        if said.version not in _READABLE:
            raise _FormatError(f"it has format {said.version}, and this Fairlead reads {_FORMAT}")
        found, health = True, said.health or health
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
    return Kept(**parts, health=health, offered=offered, history=history), broken
