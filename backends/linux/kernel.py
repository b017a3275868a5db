"""Writes attributes of sysfs, waits for what comes of it, and asks whether a node is in use.

A tiny object of its own, so that a test can hand in one that acts as a kernel would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Final

from backends.base import Host, HostPath

_PAUSE: Final = 0.005  # seconds between two looks


class Kernel:
    """The host's."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def write(self, path: HostPath, text: str) -> None:
        """Write an attribute, in one go as the kernel wants it; may block for as long as a driver takes.

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

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        """Look until it is so, for this long at most; is it?"""
        end = time.monotonic() + seconds
        while not (so := is_so()) and time.monotonic() < end:
            time.sleep(_PAUSE)
        return so
