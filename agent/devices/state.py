"""What must outlive a restart, kept in one file of JSON lines in `state_dir`, written by a thread of its own.

Each line is the whole state, and the last one counts; one that was cut off is passed over. An Allocate waits for its
line, and adding one takes 15 us where renaming a new file over the old takes 300 us, or 2 ms (ext4 flushes it then).
A write that fails is reported, once, and refuses nothing; a file that cannot be read is reported and replaced.
The file is not synced to the disk: the page cache survives our death, and a machine that dies takes the pods along.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog

from agent.devices.model import Held

_FORMAT: Final = 1
_MOST_BYTES: Final = 256 << 10  # of the file, before it is replaced by one with a single line
_WRITE_PATIENCE: Final = 0.1  # seconds that an Allocate waits for its claim to be in the file

log = structlog.get_logger()


class Kept(msgspec.Struct, frozen=True):
    """The file's content."""

    version: int = _FORMAT
    claims: tuple[Held, ...] = ()


class StateFile:
    """Reads the state once and writes it whenever it changes, the newest content only."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "state.json"
        self._wanted = 0  # counts what was asked to be written; read and raised on the loop
        self._content = Kept()
        self._complaint = ""
        self._work = threading.Event()
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._file: int | None = None  # open for adding lines; the thread's

    def read(self) -> Kept:
        """What an earlier run left; nothing if there is none, or none that can be read (blocking)."""
        try:
            kept = _last_whole(self.path.read_bytes())
        except FileNotFoundError:
            return Kept()
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as failure:
            error = str(failure)
        else:
            if kept.version == _FORMAT:
                return kept
            error = f"it has format {kept.version}, and this Fairlead reads {_FORMAT}"
        log.warning("state-unreadable", file=str(self.path), error=error, then="asking the kubelet who holds what")
        return Kept()

    async def write(self, claims: Sequence[Held]) -> None:
        """Have this written; returns when it is, or when the disk takes too long (it is written all the same)."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._serve, name="state", daemon=True).start()
        self._content = Kept(claims=tuple(claims))
        self._wanted += 1
        done = self._loop.create_future()
        self._waiters.append((self._wanted, done))
        self._work.set()
        await asyncio.wait([done], timeout=_WRITE_PATIENCE)

    def _serve(self) -> None:
        while True:
            self._work.wait()
            self._work.clear()
            number, content = self._wanted, self._content
            complaint = ""
            try:
                self._add(msgspec.json.encode(content) + b"\n")
            except Exception as error:  # noqa: BLE001  # whatever it is, the thread must go on
                complaint = str(error) or repr(error)
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._finish, number, complaint)
            except RuntimeError:
                return  # the loop is closed: the process is ending

    def _add(self, line: bytes) -> None:
        """Write the newest content: as a line more, or in a fresh file where the old one is too long, gone or broken."""
        file, self._file = self._file, None
        if file is not None:
            if _append(file, line):
                self._file = file
                return
            os.close(file)
        self._file = self._replace(line)

    def _replace(self, data: bytes) -> int:
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self.path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        try:
            fresh.write_bytes(data)
            fresh.rename(self.path)
        except OSError:
            with suppress(OSError):
                fresh.unlink()  # a full disk is no place to leave half a file
            raise
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def _finish(self, number: int, complaint: str) -> None:
        for _, done in [waiter for waiter in self._waiters if waiter[0] <= number]:
            if not done.done():
                done.set_result(None)
        self._waiters = [waiter for waiter in self._waiters if waiter[0] > number]
        if complaint and complaint != self._complaint:
            log.error(
                "state-not-written",
                file=str(self.path),
                error=complaint,
                then="a restart of Fairlead will have to ask the kubelet who holds what",
            )
        elif self._complaint and not complaint:
            log.info("state-written-again", file=str(self.path))
        self._complaint = complaint


def _append(file: int, line: bytes) -> bool:
    """Add a line to a file that is still there and not too long; False if it is not whole in it."""
    try:
        found = os.fstat(file)
        fits = found.st_nlink > 0 and found.st_size + len(line) <= _MOST_BYTES
        return fits and os.write(file, line) == len(line)
    except OSError:
        return False  # a fresh file will tell


def _last_whole(data: bytes) -> Kept:
    """The content of the last line, or of the one before if the last was cut off.

    Raises:
        msgspec.MsgspecError: there is none.
    """
    *before, last = data.splitlines() or [b""]
    try:
        return msgspec.json.decode(last, type=Kept)
    except msgspec.DecodeError:
        if not before:
            raise
        return msgspec.json.decode(before[-1], type=Kept)
