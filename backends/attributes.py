"""Says which attributes a kind of hardware has, and how their values are written, so that a selector can be checked."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute, for `Backend.attributes`."""

    written: str = ""
    """What its values are, to follow "is": "four hexadecimal digits, as in '10de'"; empty where any text may be one."""
    pattern: str = ""
    """What each value matches as a whole, upper case or lower; empty where any text may be one."""
    quoted: bool = False
    """Are numbers refused? Of `0x10de` without quotes nobody could tell that it has been read as 4318."""


TEXT: Final = Attribute()
NUMBER: Final = Attribute("a number", "[0-9]+")
HEX4: Final = Attribute("four hexadecimal digits in quotes, as in '10de'", "[0-9a-f]{4}", quoted=True)


def one_of(*values: str) -> Attribute:
    """An attribute that has only these values."""
    return Attribute(" or ".join(map(repr, values)), "|".join(map(re.escape, values)))


def mistake(name: str, value: str | int, attribute: Attribute) -> str | None:
    """Why no device can have this value, one sentence; None if one can."""
    if attribute.quoted and isinstance(value, int):
        return f"{value} is ambiguous without quotes; {name} is {attribute.written}"
    if _is_value(str(value), attribute.pattern):
        return None
    nearly = [text for text in (str(value).lower().removeprefix("0x"), f"0000:{value}") if text != value]
    meant = [text for text in nearly if _is_value(text, attribute.pattern)]
    advice = f"; did you mean {meant[0]!r}?" if meant else ""
    return f"no device has {value!r}: {name} is {attribute.written}{advice}"


def _is_value(text: str, pattern: str) -> bool:
    return not pattern or _compiled(pattern).fullmatch(text) is not None


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)
