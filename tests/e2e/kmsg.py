"""A kernel's log that tests write: a FIFO in the place of /dev/kmsg, to which lines are added as the kernel words them.

User space cannot make a kernel's line in the real log: what is written there bears another facility. A FIFO is read
with the same calls, but several records may come with one read, and what was read is gone: before another start,
`repeat` writes again what the real log would still have. It lies at `<dev>/kmsg`, where `[host] dev` is `<dev>`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

KERNEL, USER = 0, 1  # facilities (syslog(3))


def record(
    sequence: int,
    text: str,
    properties: Mapping[str, str] | None = None,
    *,
    facility: int = KERNEL,
    level: int = 4,
    microseconds: int = 0,
    flags: str = "-",
) -> bytes:
    """One record, as a read of /dev/kmsg returns it (msg_add_ext_text in kernel/printk/printk.c)."""
    head = f"{facility << 3 | level},{sequence},{microseconds},{flags};"
    lines = [head.encode() + _escaped(text)]
    lines += [b" " + _escaped(f"{key}={value}") for key, value in (properties or {}).items()]
    return b"".join(line + b"\n" for line in lines)


def _escaped(text: str) -> bytes:
    return re.sub(rb"[^ -~]|\\", lambda found: b"\\x%02x" % found[0][0], text.encode())


class KernelLog:
    """Closed when its context is left; `clock` has the nanoseconds since the start of the machine."""

    def __init__(self, path: Path, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.path = path
        self._clock = clock
        self.lines: list[bytes] = []
        os.mkfifo(path)
        self._end = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # also a reader: it opens and writes without another

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._end)

    def say(
        self,
        text: str,
        properties: Mapping[str, str] | None = None,
        *,
        facility: int = KERNEL,
        level: int = 4,
        flags: str = "-",
    ) -> int:
        """Log a line; its sequence."""
        sequence, microseconds = len(self.lines), self._clock() // 1000
        line = record(
            sequence, text, properties, facility=facility, level=level, microseconds=microseconds, flags=flags
        )
        self.lines.append(line)
        self.write(line)
        return sequence

    def write(self, data: bytes) -> None:
        """Any bytes."""
        assert os.write(self._end, data) == len(data), "a FIFO holds 64 kB"

    def repeat(self) -> None:
        """Have a reader that starts now find every line again."""
        for line in self.lines:
            self.write(line)
