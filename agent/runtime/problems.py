"""Reports each problem of a part of the daemon once, when it begins and when it ends, and keeps what lasts for every face.

The log tells of it once for each reason; `status`, `doctor`, the page and the metric `fairlead_problems` show it as long
as it lasts. What has a place of its own in those faces (hardware, a resource's registration, the kubelet, the state file)
has a `Trouble` without a part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

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
        self.clock = clock
        self.reported: dict[Trouble, None] = {}
        """Those that began and were not called over since."""

    def trouble(
        self, part: str, what: str, event: str, ended: str = "", /, *, level: str = "warning", fades: float = math.inf,
        **fields: object,
    ) -> Trouble:  # fmt: skip
        """A way in which a part may fail; the arguments are fields of `Trouble`."""
        return Trouble(self, part, what, event, ended, level, fades, fields)

    def lasting(self) -> list[Lasting]:
        """Those that are not over, in the order in which they began."""
        return [Lasting(it.part, it.sentence) for it in self.reported if it.part and it.lasts]


class Trouble(Struct, eq=False):
    """One way in which a part may fail."""

    problems: Problems
    part: str
    """Which, in a word or two; empty: the faces have a place of their own for it."""
    what: str
    """What does not work: the beginning of the sentence that a person reads."""
    event: str
    """The log's, when it begins and for each other reason."""
    ended: str
    """The log's when it is over; empty: the log does not tell."""
    level: str
    """Of the log's first event."""
    fades: float
    """Seconds without a report after which it is over; by default `healed` ends it."""
    fields: dict[str, object]
    """Of both events. `then`, what is done about it, ends the sentence."""
    reason: str = ""
    """Why it fails; empty while it does not."""
    reported_at: float = -math.inf
    more: dict[str, object] = {}
    """What was reported beside the reason, as fields."""

    @property
    def lasts(self) -> bool:
        """Whether it is reported and not over."""
        return bool(self.reason) and self.problems.clock() - self.reported_at < self.fades

    @property
    def sentence(self) -> str:
        """What does not work, why, and what is done about it."""
        then = self.more.get("then", self.fields.get("then"))
        return f"{self.what}: {self.reason}" + (f"; {then}" if then else "")

    def is_known(self, reason: str) -> bool:
        """Whether this reason was reported, and it is not over."""
        return self.lasts and reason == self.reason

    def report_once(self, reason: str, error: BaseException | None = None, **more: object) -> None:
        """Report that it fails for this reason; the log tells where `error` comes from, if one is given, and `more`."""
        is_known, self.reason, self.reported_at = self.is_known(reason), reason, self.problems.clock()
        if is_known:
            return
        self.more = more
        self.problems.reported.setdefault(self)
        traceback = {} if error is None else {"exc_info": error}
        getattr(_logger, self.level)(self.event, **{**self.fields, "reason": reason, **traceback, **more})

    def healed(self) -> None:
        """Report that it does not fail any more."""
        if not self.reason:
            return
        self.reason = ""
        self.problems.reported.pop(self, None)
        if self.ended:
            _logger.info(self.ended, **{name: it for name, it in self.fields.items() if name != "then"})


class Troubles(dict[str, Trouble]):
    """Ways to fail that are alike, one for each key."""

    def __init__(self, make: Callable[[str], Trouble]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, key: str) -> Trouble:
        """The trouble of a key that has not failed yet."""
        made = self[key] = self._make(key)
        return made

    def tell(self, reasons: Mapping[str, str]) -> None:
        """Report that these keys fail, and why; all others do not."""
        self.heal(*(key for key in self if key not in reasons))
        for key, reason in reasons.items():
            self[key].report_once(reason)

    def heal(self, *keys: str) -> None:
        """Report that these keys do not fail any more, and forget them."""
        for key in keys:
            if (trouble := self.pop(key, None)) is not None:
                trouble.healed()
