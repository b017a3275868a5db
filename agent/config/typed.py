"""Turns the plain values of TOML into typed ones, and names every mistake on the way.

msgspec stops at the first error, so tables and lists are walked here and msgspec converts what is left.
"""

from __future__ import annotations

import builtins
import enum
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Final, Literal, Self

import msgspec

from agent.config import syntax
from agent.config.problems import KeyPath
from agent.config.syntax import WORDS
from agent.runtime.errors import unknown
from agent.runtime.limits import SOCKET_PATH_LIMIT
from backends.base import Seconds
from backends.interface.decoding import converted

_TCP: Final = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s\[\]:/]+):(?P<port>[0-9]{1,5})")


class Listen(str):
    """Where HTTP is served: "host:port", "unix:/path" or "off"."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> Listen:
        """Read an address.

        Raises:
            ValueError: it has none of the three forms, or cannot be bound.
        """
        scheme, _, path = text.partition(":")
        if scheme == "unix":
            if not path.startswith("/") or "\0" in path or len(path.encode()) > SOCKET_PATH_LIMIT:
                raise ValueError(f"{path!r} is no absolute path of at most {SOCKET_PATH_LIMIT} bytes")
        elif text != "off":
            found = _TCP.fullmatch(text)
            if found is None or not 0 < int(found["port"]) < 65536:
                raise ValueError(f"{text!r} is no address; write 'host:port', 'unix:/path' or 'off'")
        return cls(text)


class DriverName(str):
    """The name of a driver of dynamic resource allocation."""

    __slots__ = ()
    PATTERN: ClassVar = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
    """A DNS subdomain (RFC 1123), of at most 63 characters (`DriverNameMaxLength`, resource.k8s.io/v1)."""
    MOST: ClassVar = 63

    @classmethod
    def parse(cls, text: str) -> DriverName:
        """Read a name.

        Raises:
            ValueError: no driver can have it.
        """
        if len(text) > cls.MOST or re.fullmatch(cls.PATTERN, text) is None:
            raise ValueError(
                f"{text!r} is no driver's name: at most {cls.MOST} lower-case letters, digits, '-' and '.', as in 'fairlead.dev'"
            )
        return cls(text)


class _PathOrWord(str):
    """A file, or the word that says that there is none."""

    __slots__ = ()
    word: ClassVar[str]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read a path, or the word.

        Raises:
            ValueError: it is neither.
        """
        if text != cls.word:
            parse_path(text)
        return cls(text)

    @property
    def path(self) -> Path | None:
        """The path; None for the word."""
        return None if self == self.word else Path(self)


class PathOrOff(_PathOrWord):
    """A file, or "off"."""

    __slots__ = ()
    word = "off"


class PathOrNone(_PathOrWord):
    """A file, or "" where none is named."""

    __slots__ = ()
    word = ""


def parse_path(text: str) -> Path:
    """Read an absolute path.

    Raises:
        ValueError: it is relative or no path at all.
    """
    if not text.startswith("/") or "\0" in text:
        raise ValueError(f"{text!r} is no absolute path; it starts with '/'")
    return Path(text)


Mistake = tuple[KeyPath, str]

_READERS: Final[Mapping[Any, tuple[Any, str]]] = {
    Path: (parse_path, "a path"),
    Seconds: (Seconds.parse, "a duration such as '5s'"),
    Listen: (Listen.parse, "an address"),
    DriverName: (DriverName.parse, "a driver's name"),
    PathOrOff: (PathOrOff.parse, "a path, or 'off'"),
    PathOrNone: (PathOrNone.parse, "a path, or ''"),
}
_NOUNS: Final = {
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
    "datetime": "a date and time",
    "date": "a date",
    "time": "a time",
}
_WHERE: Final = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?", re.DOTALL)
_STEP: Final = re.compile(r"\.(?P<key>\w+)|\[(?P<index>\d+)\]")


def convert(value: object, wanted: Any) -> tuple[Any, list[Mistake]]:
    """The typed value, or None and every mistake with its path below `value`."""
    if mistakes := list(_mistakes(value, wanted)):
        return None, mistakes
    try:
        return converted(value, wanted, _read), []
    except msgspec.ValidationError as error:  # what a type checks as a whole
        return None, [_translated(error)]


@functools.cache
def keys(record: Any) -> Mapping[str, Any]:
    """The keys that a struct has in TOML, and the type of each, with what `Annotated` adds to it."""
    hints = typing.get_type_hints(record, include_extras=True)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(record)}


def _required(record: Any) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(record) if field.required]


def _mistakes(value: object, wanted: Any) -> Iterator[Mistake]:
    wanted = _branch(value, wanted)
    inner: list[tuple[str | int, object, Any]]
    if isinstance(value, Mapping) and _is_record(wanted):
        known = keys(wanted)
        yield from (((key,), unknown("key", key, known)) for key in value if key not in known)
        yield from (((), f"the key {key!r} is missing") for key in _required(wanted) if key not in value)
        inner = [(key, it, known[key]) for key, it in value.items() if key in known]
    elif isinstance(value, list) and (item := _item_type(wanted)) is not None:
        inner = [(number, it, item) for number, it in enumerate(value)]
    else:
        yield from _leaf_mistakes(value, wanted)
        return
    for step, it, kind in inner:
        yield from (((step, *path), sentence) for path, sentence in _mistakes(it, kind))


def _leaf_mistakes(value: object, wanted: Any) -> Iterator[Mistake]:
    choices = _choices(wanted)
    if isinstance(value, str) and choices and value not in choices:
        yield (), unknown("choice", value, choices)
    elif isinstance(value, str) and _is_record(wanted) and len(required := _required(wanted)) == 1:
        yield (), f"expected a table, as in {{ {required[0]} = {value!r} }}"
    else:
        try:
            converted(value, wanted, _read)
        except msgspec.ValidationError as error:
            path, sentence = _translated(error)
            yield path, sentence + _written(value, wanted)


def _written(value: object, wanted: Any) -> str:
    """What was meant by a value of another kind, as TOML writes it: with or without quotes or brackets, with a unit."""
    for meant in _meant(value, wanted):
        with suppress(msgspec.ValidationError):
            converted(meant, wanted, _read)
            return f"; write: {syntax.written(meant)}"
    return ""


def _meant(value: Any, wanted: Any) -> Iterator[Any]:
    if isinstance(value, str):
        text = value.strip().lower()
        for read in (_truth, int, float):
            with suppress(KeyError, ValueError):
                yield read(text)
    elif isinstance(value, int | float):
        text = str(value).lower()
        yield from (text, f"{text}s")  # of a duration
    elif isinstance(value, list) and len(value) == 1:
        yield from (value[0], *_meant(value[0], wanted))
    if (item := _item_type(_branch([], wanted))) is not None:
        yield from ([it] for it in (value, *_meant(value, item)))
    elif _is_record(record := _branch({}, wanted)) and len(required := _required(record)) == 1:
        yield {required[0]: value}


def _truth(text: str) -> bool:
    return WORDS[text] == "true"


def _branch(value: object, wanted: Any) -> Any:
    """Of a union, the record or list that the value could be; msgspec allows no two of a kind."""
    if not isinstance(value, (Mapping, list)):
        return wanted
    if typing.get_origin(wanted) is typing.Annotated:  # its conditions are met or not when all is converted
        return _branch(value, typing.get_args(wanted)[0])
    if typing.get_origin(wanted) in (UnionType, typing.Union):
        fits = _is_record if isinstance(value, Mapping) else _item_type
        return next(filter(fits, (_branch(value, choice) for choice in typing.get_args(wanted))), wanted)
    return wanted


def _item_type(wanted: Any) -> Any:
    """What a list's items are; None if it is no list whose items are all alike."""
    match typing.get_origin(wanted), typing.get_args(wanted):
        case builtins.list, (item,):
            return item
        case builtins.tuple, (item, builtins.Ellipsis):
            return item
    return None


def _is_record(wanted: Any) -> bool:
    return isinstance(wanted, type) and issubclass(wanted, msgspec.Struct)


def _choices(wanted: Any) -> list[str]:
    if typing.get_origin(wanted) is Literal:
        return [choice for choice in typing.get_args(wanted) if isinstance(choice, str)]
    if isinstance(wanted, type) and issubclass(wanted, enum.Enum):
        return [choice.value for choice in wanted]
    return []


def _read(wanted: type, value: object) -> object:
    read, noun = _READERS[wanted]
    if not isinstance(value, str):
        raise ValueError(f"expected {noun}, got {value!r}")  # noqa: TRY004  # msgspec puts only ValueError in words
    return read(value)


def _translated(error: msgspec.ValidationError) -> Mistake:
    """The path and sentence of msgspec, in our words."""
    found = _WHERE.fullmatch(str(error))
    assert found is not None
    path = tuple(step["key"] or int(step["index"]) for step in _STEP.finditer(found["path"] or ""))
    what = re.sub(
        r"`([^`]*)`", lambda names: " or ".join(_NOUNS.get(name, name) for name in names[1].split(" | ")), found["what"]
    )
    return path, what[:1].lower() + what[1:] if what.startswith("Expected") else what
