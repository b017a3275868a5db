"""Durations as people write them in the configuration; import `Seconds` from `backends.base`."""

from __future__ import annotations

import re
from typing import Final

_DURATION: Final = re.compile(
    r"(?:(?P<h>\d{1,9})h)?(?:(?P<m>\d{1,9})m)?(?:(?P<s>\d{1,9}(?:\.\d{1,9})?)s)?(?:(?P<ms>\d{1,9})ms)?",
    re.ASCII,
)
_UNIT_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


class Seconds(float):
    """A duration; written as a text such as "5s", "2m", "1h30m" or "250ms"."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Seconds:
        """Read a duration.

        Raises:
            ValueError: it is none, or is zero.
        """
        found = _DURATION.fullmatch(text)
        if not text or found is None:
            raise ValueError(f"{text!r} is no duration; write it as in '5s', '2m' or '1h30m'")
        total = sum(float(number) * _UNIT_SECONDS[unit] for unit, number in found.groupdict().items() if number)
        if not total:
            raise ValueError(f"{text!r} is no time at all; the duration must be longer than zero")
        return cls(total)

    def written(self) -> str:
        """The text that is read as this duration: "1h30m"."""
        left, parts = round(self * 1000), []
        for unit, size in (("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
            number, left = divmod(left, size)
            if number:
                parts.append(f"{number}{unit}")
        return "".join(parts)
