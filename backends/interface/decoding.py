"""Reads JSON and tables into typed values with msgspec, which learns each type in one thread at a time.

msgspec (0.22.0, `StructInfo_Convert` in its _core.c) puts what it learns of a struct on the class before it has learned the
types of its fields, for structs that contain themselves. Another thread that reads the same struct for the first time, too,
takes that for complete, follows a null pointer and ends the process with SIGSEGV. A type that is learned stays so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

_Value = TypeVar("_Value")

_learning: Final = threading.Lock()  # held for one type, with all types in it: some 200 us
_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}  # type → its decoder


def decoder(kind: type[_Value]) -> msgspec.json.Decoder[_Value]:
    """What reads JSON as this type; any thread may call and use it."""
    known = _decoders.get(kind)
    if known is None:
        with _learning:
            known = _decoders[kind] = msgspec.json.Decoder(kind)
    return known


def decoded(data: bytes | str, kind: type[_Value]) -> _Value:
    """What this JSON says.

    Raises:
        msgspec.MsgspecError: it is no JSON, or no such value.
        UnicodeDecodeError: it is no UTF-8.
        RecursionError: it nests as deep as the stack allows.
    """
    return decoder(kind).decode(data)


def converted(value: object, kind: type[_Value], hook: Callable[[type, Any], Any] | None = None) -> _Value:
    """What these mappings, lists and plain values say; `hook` makes values of types that msgspec does not know.

    Raises:
        msgspec.ValidationError: they are no such value.
    """
    decoder(kind)
    return msgspec.convert(value, kind, dec_hook=hook)
