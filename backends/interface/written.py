"""What people write of hardware in the configuration: selectors, by attributes; durations. How it is read, checked and compared.

Import it from `backends.base`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

if TYPE_CHECKING:
    from backends.interface.values import Resource

# --- selectors ---


Selector = Mapping[str, tuple[str, ...]]
"""Attribute → the values any of which must be among the device's."""

_MOST_NAMED: Final = 8
"""Values of a selector that a sentence names; a range may have hundreds."""


@functools.lru_cache(maxsize=1024)  # a selector's are asked for with every device, and a range may have hundreds
def _folded(wanted: tuple[str, ...]) -> frozenset[str]:
    return frozenset(value.lower() for value in wanted)


def mismatch(selector: Selector, attributes: Mapping[str, tuple[str, ...]]) -> str | None:
    """Why the selector does not match, or None if it does."""
    for name, wanted in selector.items():
        found = attributes.get(name, ())
        if _folded(wanted).isdisjoint(value.lower() for value in found):
            meant = " or ".join(wanted) if len(wanted) <= _MOST_NAMED else f"any of the {len(wanted)} that are selected"
            return f"{name} is {' or '.join(found) or 'unknown'}, not {meant}"
    return None


# --- attributes ---


class Attribute(Struct, frozen=True):
    """One attribute, for `Backend.attributes`."""

    written: str = ""
    """What its values are, to follow "is": "four hexadecimal digits, as in '10de'"; empty where any text may be one."""
    pattern: str = ""
    """What each value matches as a whole, upper case or lower; empty where any text may be one."""
    quoted: bool = False
    """Whether numbers are refused. `0x10de` without quotes is read as 4318, and does not show it."""
    ranged: bool = False
    """Whether a selector may say `0-7` for the numbers 0 to 7."""

    def wanted(self, value: str) -> Iterable[str]:
        """The values that a selector means by this one."""
        first, dash, last = value.partition("-")
        if not (self.ranged and dash and _is_value(value, self.pattern)):
            return (value,)
        return map(str, range(int(first), int(last) + 1))


TEXT: Final = Attribute()
NUMBER: Final = Attribute("a number", "[0-9]+")
NUMBERS: Final = Attribute("a number, or a range as in '0-7'", "[0-9]{1,5}(-[0-9]{1,5})?", ranged=True)
HEX4: Final = Attribute("four hexadecimal digits in quotes, as in '10de'", "[0-9a-f]{4}", quoted=True)


def one_of(*values: str) -> Attribute:
    """An attribute that has only these values."""
    return Attribute(" or ".join(map(repr, values)), "|".join(map(re.escape, values)))


def assumed(
    attributes: Mapping[str, tuple[str, ...]], unknown: Iterable[str], resources: Iterable[Resource[Any]]
) -> dict[str, tuple[str, ...]]:
    """With all values that any resource selects by for what is not known.

    Hardware must not leave the resource that a pod got it from for what cannot be seen of it for a while.
    """
    wanted = [table for resource in resources for table in resource.spec.select]
    values = {name: tuple(v for table in wanted for v in table.get(name, ())) for name in unknown}
    return {**{name: tuple(dict.fromkeys(found)) for name, found in values.items() if found}, **attributes}


def mistake(name: str, value: str | int, attribute: Attribute) -> str | None:
    """Why no device can have this value, one sentence; None if one can."""
    if attribute.quoted and isinstance(value, int):
        return f"{value} is ambiguous without quotes; {name} is {attribute.written}"
    if _is_value(str(value), attribute.pattern):
        return None if list(attribute.wanted(str(value))) else f"{value!r} is no range: {name} goes up, as in '0-7'"
    nearly = [text for text in (str(value).lower().removeprefix("0x"), f"0000:{value}") if text != value]
    meant = [text for text in nearly if _is_value(text, attribute.pattern)]
    advice = f"; did you mean {meant[0]!r}?" if meant else ""
    return f"no device has {value!r}: {name} is {attribute.written}{advice}"


def _is_value(text: str, pattern: str) -> bool:
    return not pattern or _compiled(pattern).fullmatch(text) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


# --- durations ---


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
