"""Writes TOML: keys, values and comments, all on lines that a person can read."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from backends.errors import printable

Value = str | int | float | bool | Sequence["Value"] | Mapping[str, "Value"]
"""What our TOML can say."""

_WIDTH: Final = 118
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES: Final = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def comment(text: str) -> Iterator[str]:
    """A sentence as lines of a comment."""
    wrapped = textwrap.wrap(printable(text), _WIDTH, break_long_words=False, break_on_hyphens=False)
    return (f"# {line}" for line in wrapped)


def pair(key: str, value: Value) -> Iterator[str]:
    """`key = value`; a list of tables has one on each line if there are several."""
    if isinstance(value, Sequence) and len(value) > 1 and not isinstance(value, str) and isinstance(value[0], Mapping):
        yield f"{_key(key)} = ["
        for item in value:
            yield f"    {written(item)},"
        yield "]"
    else:
        yield f"{_key(key)} = {written(value)}"


def written(value: Value) -> str:
    """A value, on one line."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case str():
            return _text(value)
        case Mapping():
            inner = ", ".join(f"{_key(key)} = {written(item)}" for key, item in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case _:
            return f"[{', '.join(map(written, value))}]"


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return f'"{"".join(map(_character, text))}"'


def _character(character: str) -> str:
    if escaped := _ESCAPES.get(character):
        return escaped
    if character.isprintable():
        return character
    code = ord(character)
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
