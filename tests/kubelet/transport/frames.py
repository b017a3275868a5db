"""HTTP/2 frames by hand (RFC 9113, 6), to send what no client would."""

from __future__ import annotations

from typing import Final, NamedTuple

from h2.events import Event
from hpack import Encoder

from agent.kubelet.http2 import ServerConnection

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
UNKNOWN: Final = 0xF0
ASK: Final = [(":method", "POST"), (":scheme", "http"), (":path", "/t/Call"), (":authority", "x"), ("te", "trailers")]
BLOCK: Final = Encoder().encode([(name, value, True) for name, value in ASK])
REMEMBERED: Final = Encoder().encode(ASK)
TRAILERS: Final = Encoder().encode([("x-of-ours", "trailer", True)])


class Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes

    def __bytes__(self) -> bytes:
        head = len(self.payload) << 48 | self.kind << 40 | self.flags << 32 | self.stream
        return head.to_bytes(9, "big") + self.payload


def receive(connection: ServerConnection, data: bytes) -> list[Event]:
    """What it reads of this in as many turns as that takes."""
    events = connection.receive_data(data)
    while connection.is_behind:
        events += connection.receive_data(b"")
    return events


def numbers(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "big") for value in values)
