"""Hardware that can be made to come and go: real loop devices with real kernel events, and a stub's file."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path
from typing import Final

from msgspec import Struct

_CONTROL: Final = Path("/dev/loop-control")
_LOOP_CTL_ADD: Final = 0x4C80  # linux/loop.h
_LOOP_CTL_REMOVE: Final = 0x4C81
_UDEV_READS: Final = 2.0  # seconds, at most, for which udevd has a new block device open
_TRY_AGAIN: Final = 0.005  # seconds
_NUMBERS: Final = range(100, 1000)  # far from those that losetup gives out


class LoopDevice(Struct, frozen=True):
    """One loop device of our own; adding takes the kernel half a millisecond, removing thirty."""

    number: int

    @classmethod
    def free(cls) -> LoopDevice | None:
        """A free one, if this process may make and remove it; two processes get different ones."""
        ours = os.getpid() % len(_NUMBERS)
        numbers = (*_NUMBERS[ours:], *_NUMBERS[:ours])
        device = cls(next((n for n in numbers if not Path(f"/dev/loop{n}").exists()), _NUMBERS[ours]))
        try:
            device.add()
            device.remove()
        except OSError:
            return None
        return device

    @property
    def name(self) -> str:
        """Its node's name in /dev."""
        return f"loop{self.number}"

    def add(self) -> None:
        """Make it; blocks until its node is there.

        Raises:
            OSError: not permitted, no such driver, or it exists.
        """
        self._control(_LOOP_CTL_ADD)

    def remove(self) -> None:
        """Remove it; blocks for some 30 ms, or until udevd has read it; one that is gone already is no error.

        Raises:
            OSError: not permitted, or it is in use.
        """
        deadline = time.monotonic() + _UDEV_READS
        while True:
            try:
                return self._control(_LOOP_CTL_REMOVE)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return None
                if error.errno != errno.EBUSY or time.monotonic() > deadline:
                    raise
            time.sleep(_TRY_AGAIN)

    def _control(self, request: int) -> None:
        fd = os.open(_CONTROL, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(fd, request, self.number)
        finally:
            os.close(fd)


def write_stub_file(path: Path, lines: str) -> None:
    """Replace a stub's file at once, so that no reader sees half of it."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(lines)
    fresh.rename(path)
