"""What every source hands on: hints where to look, records of what sysfs does not keep, and that some were lost."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from backends.base import Hint, Host, HostPath, Record

_BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")


class Resync(Struct, frozen=True):
    """Hints were lost: look at everything again."""

    reason: str
    """One sentence for the log."""


Emitted = Hint | Record | Resync

Emit = Callable[[Emitted], None]
"""Takes what a source hands on, on the event loop; it must not block."""

Beat = Callable[[], None]
"""A sign of life, which a source gives at least every `agent.runtime.supervision.watchdog.BEAT` seconds."""


def unwatched() -> None:
    """A `Beat` for a source that no watchdog watches."""


def boot_id(host: Host) -> str:
    """The ID of the machine's boot (random(4)), "" if it cannot be read. procfs makes the text, so that nothing blocks."""
    try:
        return host.local(_BOOT_ID).read_text().strip()
    except OSError:
        return ""
