"""Reads and writes header blocks (RFC 7541), each once: a kubelet sends the same ones in every call and on every connection.

hpack takes 50 us to read one and 90 us to write the three of a reply, more than Fairlead's own share of an Allocate.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from itertools import count
from typing import ClassVar, Final

from hpack import Decoder, Encoder

Headers = tuple[tuple[str, str], ...]

_MOST: Final = 256
"""Blocks that are remembered together; more come where each call has another one (`grpc-timeout`)."""

_LONGEST: Final = 1024
"""Bytes of a block that is remembered."""

MOST_HEADERS: Final = 16384
"""Bytes of a block, and of what it says (RFC 9113, 6.5.2, MAX_HEADER_LIST_SIZE): hpack reads those that clients send in 3 ms.
It takes 64 KiB by itself. gRPC over HTTP/2 recommends 8 KiB, and a kubelet sends 300 bytes."""


class Table:
    """One state of a client's header table. It never changes: a block leads to the next state.

    Clients that have sent the same blocks are in the same state, so connections share their tables.
    """

    __slots__ = ("_blocks", "_decoder", "_remembered")
    _first: ClassVar[Table | None] = None

    def __init__(self, decoder: Decoder, remembered: count[int]) -> None:
        self._decoder = decoder
        self._remembered = remembered  # counts the blocks of all states that followed the same first one
        self._blocks: dict[bytes, tuple[Headers, Table]] = {}

    @classmethod
    def first(cls) -> Table:
        """The state of a new connection."""
        if cls._first is None:
            cls._first = cls(Decoder(MOST_HEADERS), count())
        return cls._first

    def read(self, block: bytes) -> tuple[Headers, Table]:
        """What a block says, and the state that follows.

        Raises:
            HPACKError: it is no header block, or says more than `MOST_HEADERS`.
        """
        known = self._blocks.get(block)
        if known is None:
            known = self._read(block)
            if len(block) <= _LONGEST:
                if next(self._remembered) < _MOST:
                    self._blocks[block] = known
                else:
                    Table._first = None  # new connections begin to remember anew; these tables go with theirs
        return known

    def _read(self, block: bytes) -> tuple[Headers, Table]:
        before = self._decoder.header_table
        decoder = Decoder(MOST_HEADERS)
        decoder.header_table = after = copy(before)
        after.dynamic_entries = copy(before.dynamic_entries)
        # HTTP allows bytes above ASCII in values (RFC 9110, 5.5); grpclib refuses those in which they make no sense
        headers = tuple(
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in decoder.decode(block, raw=True)
        )
        if after.dynamic_entries == before.dynamic_entries and after.maxsize == before.maxsize:
            return headers, self
        return headers, Table(decoder, self._remembered)


EMPTY_TABLE: Final = b"\x20"
"""Says that our table has no entries (RFC 7541, 6.3): begins the block after a client has changed how many it allows."""


@lru_cache(64)
def write(headers: Headers) -> bytes:
    """A block that says this, and neither needs nor changes the client's table."""
    return Encoder().encode((name, value, True) for name, value in headers)
