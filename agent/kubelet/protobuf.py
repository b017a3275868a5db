"""How protobuf writes numbers and fields."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf wire types


class MalformedError(ValueError):
    """The bytes are no protobuf message."""


def varint(value: int) -> bytes:
    """A non-negative integer as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer that begins there, and where the next thing begins.

    Raises:
        MalformedError: it is cut off, or has more than 64 bits.
    """
    value = shift = 0
    while True:
        try:
            byte = data[at]
        except IndexError:
            raise MalformedError("the message ends within a number") from None
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise MalformedError("a number has more than 64 bits")
            return value, at
        shift += 7
        if shift > 63:
            raise MalformedError("a number has more than 64 bits")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order: number, and what it holds; without those of a fixed size.

    Raises:
        MalformedError: the bytes are cut off or no protobuf.
    """
    at, end = 0, len(data)
    while at < end:
        if data[at] < 0x80:  # as mostly
            key, at = data[at], at + 1
        else:
            key, at = read_varint(data, at)
        kind, number = key & 7, key >> 3
        if not number:
            raise MalformedError("there is no field number 0")
        if kind == BYTES:
            if at < end and data[at] < 0x80:  # as mostly
                size, at = data[at], at + 1
            else:
                size, at = read_varint(data, at)
            if at + size > end:
                raise MalformedError("the message ends within a field")
            yield number, data[at : at + size]
            at += size
        elif kind == VARINT:
            value, at = read_varint(data, at)
            yield number, value
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
            if at > end:
                raise MalformedError("the message ends within a field")
        else:
            raise MalformedError(f"wire type {kind} is not used by proto3")
