"""Reads the kernel's log: lines of drivers become records of what sysfs does not keep (an NVIDIA XID).

Each read of /dev/kmsg is one record (Documentation/ABI/testing/dev-kmsg): `level,sequence,microseconds,flags;text`,
then lines ` KEY=value` with what it is about. Only the kernel's own count: root may write to the log too, but what it
writes bears another facility. Only lines that begin with a wanted text count: users choose much of what lines quote.

The flag `c` says that a record was printed with KERN_CONT. Where the same task's line is still open, such a text goes on in
that line's record; else it is a record of its own. So it is either a whole line (NVIDIA's driver prints each of its lines so:
nv_printf, kernel-open/nvidia/os-interface.c), or the rest of a line that a record of another CPU has cut in two. In 6.12 three
such rests begin with a user's text: the name of a cgroup after `,cpuset=` (cpuset_print_current_mems_allowed, of the OOM
killer and of failed allocations) and after `empty cpuset ` (cgroup v1), a radio text after `<control>: ` (log_ctrl of V4L2).
All others begin with the kernel's own words. So a record with that flag counts, unless a line that may go on like that was cut
before it, up to `_TORN` seconds ago.

A line shows once it has ended: the kernel keeps one without a newline open for more.
A FIFO does in the log's place, for tests and pretend nodes: several records may come with one read.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import anyio
from anyio.lowlevel import checkpoint
from msgspec import Struct, field

from agent.discovery.sources import Beat, Emit, boot_id, unwatched
from agent.runtime.errors import words
from agent.runtime.problems import Problems, Troubles
from agent.runtime.watchdog import beating
from backends.base import Host, HostPath, Record

_READ_BYTES: Final = 8192  # CONSOLE_EXT_LOG_MAX until Linux 6.3; PRINTK_MESSAGE_MAX, 2048, since
_BATCH: Final = 256  # lines between two turns of the event loop: 1 ms
_LOST_FOR: Final = 3600.0  # seconds since the last line that was lost, after which no face tells of it any more

_CUT: Final = ("cpuset=", "empty cpuset ")
_CUT_LABEL: Final = ": "
"""How a line ends that the kernel meant to go on with a text that a user may have chosen (see above). Whole lines may end in a
label's colon, too: NVIDIA's driver has such (`Sent following content to FSP: `), and lines of `=` (`=== GSP-RM unresponsive
===`) just before an XID. So of those with KERN_CONT a label does not count, nor of dev_printk's, which are always whole."""
_TORN: Final = 60.0
"""Seconds until the rest of it must have come: the printing task can be preempted in between, but holds rcu_read_lock, which
the kernel complains of after 21 s (CONFIG_RCU_CPU_STALL_TIMEOUT)."""

_ADVICE: Final = (
    "until it can, errors that drivers tell nowhere else go unseen; "
    "show the host's /dev/kmsg to this process (device 1:11) and give it CAP_SYSLOG"
)

DENIED: Final = "the device cgroup of this process's own container denies it, which its mode and capabilities allow"
"""Why EPERM, where `is_denied_by_cgroup`."""

ALLOW: Final = (
    "run privileged (in Kubernetes nothing less will do), or allow this process device 1:11: "
    "--device /dev/kmsg of docker and podman, DeviceAllow=/dev/kmsg r of systemd"
)
"""What to do then."""

_SYSLOG, _SYS_ADMIN = 34, 21  # linux/capability.h; either lets a process read the log

_HEADER: Final = re.compile(rb"(\d{1,9}),(\d{1,20}),(\d{1,20}),([^;\n]*);(.*)")
_ESCAPE: Final = re.compile(rb"\\x([0-9a-fA-F]{2})")


class Line(Struct, frozen=True):
    """One record of the kernel's log."""

    facility: int
    """0 is the kernel; only the kernel can say so (syslog(3); devkmsg_write in kernel/printk/printk.c)."""
    sequence: int
    time: float
    text: str
    properties: dict[str, str] = field(default_factory=dict)
    is_fragment: bool = False
    """Printed with KERN_CONT: a whole line, or the rest of one whose beginning another record has."""


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole records in what was read, and the rest of a line that was cut off."""
    *lines, rest = data.split(b"\n")
    records: list[bytes] = []
    for line in lines:
        if not line.startswith(b" "):
            records.append(line)
        elif records:  # what belongs to a record of the read before, which a FIFO may cut there, is lost
            records[-1] += b"\n" + line
    return records, rest


def parse(record: bytes) -> Line | None:
    """Read one record; None if it has not the format of one. Whatever else a header may bear is not used."""
    head, *more = record.split(b"\n")
    if (found := _HEADER.fullmatch(head)) is None:
        return None
    priority, sequence, microseconds, flags, text = found.groups()
    pairs = (line[1:].partition(b"=") for line in more)
    properties = {_text(key): _text(value) for key, is_pair, value in pairs if is_pair}
    is_fragment = flags.startswith((b"c", b"+"))  # "+" until Linux 4.9
    return Line(int(priority) >> 3, int(sequence), int(microseconds) / 1e6, _text(text), properties, is_fragment)


def _text(data: bytes) -> str:
    """Undo the kernel's escapes, of what is not printable and of the backslash."""
    if b"\\" in data:
        data = _ESCAPE.sub(lambda found: bytes((int(found[1], 16),)), data)
    return data.decode(errors="replace")


class KmsgSource:
    """Hands on the kernel's lines that begin with a wanted text, from the oldest that the log still has, each of them once."""

    def __init__(
        self,
        emit: Emit,
        host: Host,
        beat: Beat = unwatched,
        on_complaint: Callable[[], None] = lambda: None,
        problems: Problems | None = None,
    ) -> None:
        """Prepare; `on_complaint` is called when `complaint` is another, `problems` is told of lines that are lost."""
        self.complaint: str | None = None
        """Why the log cannot be read, in one sentence; empty while it is read; None before that was tried."""
        self._on_complaint = on_complaint
        self.caught_up = asyncio.Event()
        """Set when what was logged so far has been handed on, or cannot be read."""
        self._emit = emit
        self._beat = beat
        self._host = host
        self._path = host.local(HostPath("/dev/kmsg"))
        self._texts: frozenset[str] = frozenset()
        self._after: tuple[str, int] | None = None
        self._pass = anyio.CancelScope()  # over the log, for these texts
        self._boot = ""
        self._position = -1  # the last line that was read
        self._cut = -_TORN  # when the kernel printed the last line that may go on with a user's text
        self._pending = b""
        self._told: dict[str, int] = {}  # text → the line up to which those with it have been handed on
        told, file = problems or Problems(), str(self._path)
        self._lost = Troubles(
            lambda _: told.trouble(
                "kernel-log", f"lines of {file} are lost", "kernel-lines-lost", fades=_LOST_FOR, file=file
            )
        )

    def watch(self, texts: frozenset[str]) -> None:
        """From now on hand on the lines that begin with any of these; also those that came before it was wanted."""
        if texts != self._texts:
            self._texts = texts
            self._pass.cancel()

    async def run(self, after: tuple[str, int] | None = None) -> None:
        """Read until cancelled; the log is opened only while something is wanted of it.

        `after` is a boot, and the sequence of a line of it: what was logged until then is passed over.

        Raises:
            OSError: it cannot be read; the message says why and what to do.
        """
        self._after = after
        while True:
            with anyio.CancelScope() as self._pass:
                if self._texts:
                    try:
                        await self._read()
                    except OSError as error:
                        self._complain(words(error))
                        raise
                await beating(anyio.sleep_forever, self._beat)

    async def _read(self) -> None:
        """Hand on what there is, from the oldest line on, and what comes."""
        texts, self._position, self._cut, self._pending = self._texts, -1, -_TORN, b""
        self._boot = boot_id(self._host)
        try:
            with _opened(self._path) as log:
                while True:
                    while self._receive(log):
                        self._beat()
                        await checkpoint()
                    self.caught_up.set()
                    self._complain("")
                    await beating(lambda: anyio.wait_readable(log), self._beat)
        finally:
            self._told |= {text: max(self._position, self._told.get(text, -1)) for text in texts}
            self.caught_up.set()

    def _complain(self, why: str) -> None:
        if why != self.complaint:
            self.complaint = why
            self._on_complaint()

    def _receive(self, log: int) -> bool:
        """Read one batch; True if more may be waiting."""
        lines = 0
        while lines < _BATCH:
            lines += 1
            try:
                data = os.read(log, _READ_BYTES)
            except BlockingIOError:
                return False
            except OSError as error:
                self._skip(error)
                continue
            if not data:
                raise OSError(errno.ENODATA, f"{self._path} is not the kernel's log: it has an end; {_ADVICE}")
            records, rest = split(self._pending + data)
            self._pending = rest[-_READ_BYTES:]
            for record in records:
                self._take(record)
            lines += len(records)
        return True

    def _skip(self, error: OSError) -> None:
        """Report once that lines are missing; the next read has the one after them."""
        if error.errno == errno.EPIPE:
            self._note_lost("the kernel overwrote lines of its log before they were read")
        elif error.errno == errno.EINVAL:
            self._note_lost(f"a line of the kernel's log is longer than {_READ_BYTES} bytes")
        else:
            raise OSError(error.errno, f"{self._path} cannot be read: {os.strerror(error.errno or 0)}") from error

    def _note_lost(self, reason: str) -> None:
        self._lost[reason].report_once(reason)

    def _take(self, data: bytes) -> None:
        if (line := parse(data)) is None:
            self._note_lost("it has lines that are not as the kernel writes them; they are passed over")
            return
        self._position = line.sequence
        if line.facility:
            return
        is_proof = not line.is_fragment or line.time - self._cut >= _TORN
        is_plain = not line.is_fragment and not line.properties
        if line.text.endswith(_CUT) or (is_plain and line.text.endswith(_CUT_LABEL)):
            self._cut = line.time
        if not any(text in line.text for text in self._texts):
            return
        record = Record("kmsg", self._boot, line.sequence, line.time, line.text, line.properties)
        message = record.message
        found = [text for text in self._texts if message.startswith(text)]
        if found and not is_proof:
            self._note_lost(
                "a line of it was cut in two, and what came next may be a user's text in place of a driver's"
            )
        elif found and line.sequence > max(self._passed(), *(self._told.get(text, -1) for text in found)):
            self._emit(record)

    def _passed(self) -> int:
        """The line up to which an earlier run has handled them; -1 if that was of another or an unknown boot."""
        return self._after[1] if self._after is not None and self._boot and self._after[0] == self._boot else -1


def is_denied_by_cgroup(error: OSError, proc: Path = Path("/proc")) -> bool:
    """Whether the device controller of our own cgroup is what denies the log.

    A mode, a mount and a security module deny with EACCES; EPERM comes from the log itself, where it is restricted and
    the capability is missing (check_syslog_permissions, kernel/printk/printk.c), else from that controller
    (devcgroup_check_permission, security/device_cgroup.c).
    """
    if error.errno != errno.EPERM:
        return False
    try:
        is_open = (proc / "sys/kernel/dmesg_restrict").read_text().strip() == "0"
    except OSError:
        is_open = False
    try:
        found = re.search(r"^CapEff:\s*([0-9a-f]+)$", (proc / "self/status").read_text(errors="replace"), re.MULTILINE)
        is_nodes = (proc / "self/uid_map").read_text().split() == ["0", "0", "4294967295"]  # the first user namespace
    except OSError:
        return is_open
    rights = int(found[1], 16) if found and is_nodes else 0
    return is_open or bool(rights & (1 << _SYSLOG | 1 << _SYS_ADMIN))


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """The log, at its oldest line."""
    try:
        log = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        why, advice = os.strerror(error.errno or 0), _ADVICE
        if is_denied_by_cgroup(error):
            why, advice = f"{why}: {DENIED}", ALLOW
        raise OSError(error.errno, f"the kernel's log cannot be read: {path}: {why}; {advice}") from error
    try:
        yield log
    finally:
        os.close(log)
