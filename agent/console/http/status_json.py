"""The status as JSON, field by field as agent/console/views.py has it, in pieces: there may be thousands of devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from agent.console.views import Resource, Status


def encoded(value: Any) -> bytes:
    """A value as JSON, also with a file name in it that is no text."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def as_json(status: Status) -> Iterator[bytes]:
    """One JSON document."""
    return _object(status, resources=lambda resource: _object(resource, devices=_whole), unclaimed=_whole)


def _object(value: Status | Resource, **lists: Callable[[Any], Iterable[bytes]]) -> Iterator[bytes]:
    """An object; of the named fields each item is a piece."""
    for n, name in enumerate(value.__struct_fields__):
        yield b"%s%s:" % (b"," if n else b"{", encoded(name))
        content = getattr(value, name)
        if (pieces := lists.get(name)) is None:
            yield encoded(content)
        else:
            yield b"["
            for number, item in enumerate(content):
                if number:
                    yield b","
                yield from pieces(item)
            yield b"]"
    yield b"}"


def _whole(item: Any) -> tuple[bytes]:
    return (encoded(item),)
