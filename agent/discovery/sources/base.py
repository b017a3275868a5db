"""What every source hands on: hints where to look, facts that are nowhere else, and word that some were lost."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from backends.base import Hint, Host, HostPath, Record

_BOOT_ID = HostPath("/proc/sys/kernel/random/boot_id")


class Resync(Struct, frozen=True):
    """Hints were lost: look at everything again."""

    reason: str
    """One sentence for the log."""


Said = Hint | Record | Resync

Emit = Callable[[Said], None]
"""Takes what a source has to say, on the event loop and at once; it must not block."""

Beat = Callable[[], None]
"""A sign of life, which every source gives at least each `agent.runtime.supervision.watchdog.BEAT` seconds, and at every turn."""


def nobody() -> None:
    """For a source whose signs of life nobody wants."""


def boot_id(host: Host) -> str:
    """Which boot of the machine this is (random(4)), "" if nobody can say; procfs makes the text up, nothing blocks."""
    try:
        return host.local(_BOOT_ID).read_text().strip()
    except OSError:
        return ""
