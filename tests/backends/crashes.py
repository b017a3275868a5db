"""A process that is killed at any of the writes that it makes: before the kernel has seen it, or after."""

from __future__ import annotations


class Crash(BaseException):
    """The process ends here; nothing catches this."""


class Fuse:
    """Burns at one of the steps that are counted."""

    def __init__(self) -> None:
        self.steps: int | None = None
        """How many are left; None: it does not burn."""

    def step(self) -> None:
        """One more step is made."""
        if self.steps is None:
            return
        if self.steps == 0:
            self.steps = None
            raise Crash
        self.steps -= 1
