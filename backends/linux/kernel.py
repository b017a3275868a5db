"""Changes hardware through the kernel: writes into sysfs, loads a module, waits for what comes of that, notes what to undo.

`Kernel` is an object so that a test can hand in one that acts as a kernel would.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from backends.base import Host, HostPath, NotReady
from backends.errors import reason_of
from backends.linux import files

GONE: Final = (errno.ENOENT, errno.ENODEV, errno.ENXIO)
"""The errors of the kernel for hardware that is gone."""

_MODPROBE_DEADLINE: Final = 5.0  # seconds, of the 10 that a claim has
_PAUSE: Final = 0.005  # seconds between two checks


class Kernel:
    """The kernel of the host."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def write(self, path: HostPath, text: str) -> None:
        """Write an attribute in one go, as the kernel wants it; may block for as long as a driver takes to let go.

        Raises:
            OSError: it cannot be written, or the kernel refuses what is written.
        """
        file = os.open(self._host.local(path), os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(file, text.encode())
        finally:
            os.close(file)

    def try_open(self, path: HostPath) -> None:
        """Open a device node, and close it at once.

        Raises:
            OSError: it cannot be opened; EBUSY where its driver lets it be open once at a time, and it is.
        """
        os.close(os.open(self._host.local(path), os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY))

    def load(self, module: str) -> None:
        """Load a kernel module from the host's /lib/modules.

        Raises:
            OSError: there is no modprobe, or it failed; with what it said.
        """
        import subprocess  # noqa: PLC0415  # milliseconds of a start, for what is rarely done

        command = ["modprobe", "--dirname", os.fspath(self._host.root), module]
        try:
            done = subprocess.run(  # noqa: S603  # nothing in it comes from outside
                command, capture_output=True, text=True, errors="replace", timeout=_MODPROBE_DEADLINE, check=False
            )
        except FileNotFoundError:
            raise OSError("there is no modprobe here") from None
        except subprocess.TimeoutExpired:
            raise OSError(f"modprobe {module} was not done within {_MODPROBE_DEADLINE:g} s") from None
        if done.returncode:
            raise OSError(done.stderr.strip() or f"modprobe {module} failed")

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Wait until `is_so`, for this long at most; returns whether it is."""
        end = time.monotonic() + seconds
        while not (so := is_so()) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return so


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Turns an OSError into a NotReady that says what could not be done, and why."""
    try:
        yield
    except OSError as error:
        raise NotReady(f"{what}: {reason_of(error)}") from error


_MOST: Final = 8192  # bytes; a path has 4,096 at most (PATH_MAX)


class Notes:
    """Notes of what to undo to hardware after a pod: one file for each piece, in a directory below /run.

    A reboot ends the notes and what they are about.
    """

    def __init__(self, host: Host, directory: HostPath) -> None:
        self._host, self._directory = host, directory

    def read(self, name: str) -> bytes | None:
        """The note about a piece of hardware; None if there is none.

        Raises:
            OSError: it cannot be read.
        """
        try:
            return files.read(self._host.local(self._directory / name), _MOST, follow=False)
        except FileNotFoundError:
            return None

    def write(self, name: str, data: bytes) -> None:
        """Write the note about a piece of hardware, in place of an earlier one.

        Raises:
            OSError: what was noted before is noted still.
        """
        self._host.local(self._directory).mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(self._host.local(self._directory / name), data)

    def drop(self, name: str) -> None:
        """Remove the note about a piece of hardware.

        Raises:
            OSError: the note is there still.
        """
        self._host.local(self._directory / name).unlink(missing_ok=True)
