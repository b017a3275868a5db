"""What every source hands on: hints where to look, and word that some were lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.base import Hint


@dataclass(frozen=True, slots=True)
class Resync:
    """Hints were lost: look at everything again."""

    reason: str
    """One sentence for the log."""


Emit = Callable[[Hint | Resync], None]
"""Takes what a source has to say, on the event loop and at once; it must not block."""
