"""Reports each problem of a part of the daemon once, when it begins and when it ends, and keeps what lasts for every face.

The log tells of it once for each reason; `status`, `doctor`, the page and the metric `fairlead_problems` show it as long
as it lasts. Problems of resources and of hardware have places of their own in those faces, and are not kept here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import structlog
from msgspec import Struct

_logger = structlog.get_logger()


class Lasting(Struct, frozen=True):
    """A problem that is not over."""

    part: str
    """One of few: `features`, `adoption`."""
    sentence: str


class Problems:
    """What is wrong with the parts of the daemon."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Prepare; `clock` has monotonic seconds."""
        self._clock = clock
        self._reported: dict[Trouble, None] = {}

    def trouble(
        self, part: str, what: str, event: str, ended: str = "", /, *, level: str = "warning", fades: float = math.inf,
        **fields: object,
    ) -> Trouble:  # fmt: skip
        """A way in which a part may fail.

        Args:
            part: which, in a word or two.
            what: what does not work, as the sentence begins that a person reads.
            event: the log's, when it begins and for each other reason.
            ended: the log's when it is over; empty: nobody asks for that.
            level: the log's.
            fades: seconds without a report after which it is over; by default somebody says so.
            fields: the log's, of both events. `then`, what is done about it, ends the sentence.
        """
        return Trouble(self, part, what, event, ended, level, fades, fields)

    def lasting(self) -> list[Lasting]:
        """Those that are not over, in the order in which they began."""
        return [Lasting(it.part, it.sentence) for it in self._reported if it.lasts]

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock()

    def keep(self, trouble: Trouble) -> None:
        """It has begun."""
        self._reported.setdefault(trouble)

    def drop(self, trouble: Trouble) -> None:
        """It is over."""
        self._reported.pop(trouble, None)


class Trouble:
    """One way in which a part may fail."""

    def __init__(
        self, problems: Problems, part: str, what: str, event: str, ended: str, level: str, fades: float,
        fields: dict[str, object],
    ) -> None:  # fmt: skip
        """As `Problems.trouble`."""
        self.part, self.reason = part, ""
        self._problems, self._what, self._event, self._ended, self._level = problems, what, event, ended, level
        self._fades, self._fields = fades, fields
        self._reported_at = -math.inf

    @property
    def lasts(self) -> bool:
        """Is it not over?"""
        return bool(self.reason) and self._problems.now() - self._reported_at < self._fades

    @property
    def sentence(self) -> str:
        """What does not work, why, and what is done about it."""
        then = self._fields.get("then")
        return f"{self._what}: {self.reason}" + (f"; {then}" if then else "")

    def is_known(self, reason: str) -> bool:
        """Has this been reported, and is it not over?"""
        return self.lasts and reason == self.reason

    def report_once(self, reason: str, error: BaseException | None = None) -> None:
        """It fails for this reason; the log tells where `error` comes from, if one is given."""
        is_known, self.reason, self._reported_at = self.is_known(reason), reason, self._problems.now()
        if is_known:
            return
        self._problems.keep(self)
        traceback = {} if error is None else {"exc_info": error}
        getattr(_logger, self._level)(self._event, **{**self._fields, "reason": reason, **traceback})

    def healed(self) -> None:
        """It does not fail any more."""
        if not self.reason:
            return
        self.reason = ""
        self._problems.drop(self)
        if self._ended:
            _logger.info(self._ended, **{name: it for name, it in self._fields.items() if name != "then"})
