"""Header blocks are read as hpack reads them, whatever connections have shared, and remembered within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import pytest
from hpack import Decoder, Encoder, HPACKError
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.kubelet import http2
from agent.kubelet.http2 import Table, header_block

headers = st.lists(
    st.tuples(
        st.sampled_from([":path", "grpc-timeout", "te", "x-of-ours"]),
        st.sampled_from(["", "trailers", "5S"]) | st.text(st.characters(max_codepoint=255), max_size=60),
        st.booleans(),
    ),
    max_size=5,
)
sent = st.lists(st.tuples(st.integers(0, 3), headers, st.none() | st.sampled_from([0, 64, 4096])), max_size=30)


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Table, "_first", None)


@settings(max_examples=200, deadline=None)
@given(sent)
def test_connections_that_share_tables_read_what_each_was_sent(
    sent: Sequence[tuple[int, Sequence[tuple[str, str, bool]], int | None]],
) -> None:
    encoders = [Encoder() for _ in range(4)]
    tables = [Table.first() for _ in range(4)]
    for connection, said, size in sent:
        if size is not None:
            encoders[connection].header_table_size = size
        block = encoders[connection].encode(
            [(name.encode(), value.encode("latin-1"), secret) for name, value, secret in said]
        )
        read, tables[connection] = tables[connection].read(block)
        assert read == tuple((name, value) for name, value, _ in said)


@given(st.lists(headers, max_size=10))
def test_what_is_written_is_read_by_whoever_has_an_empty_table_or_any_other(
    blocks: Sequence[Sequence[tuple[str, str, bool]]],
) -> None:
    client = Decoder()
    for said in blocks:
        ascii_only = tuple((name, value.encode("ascii", "replace").decode()) for name, value, _ in said)
        assert (
            tuple((str(n), str(v)) for n, v in client.decode(http2._EMPTY_TABLE + header_block(ascii_only)))
            == ascii_only
        )


def test_a_connection_whose_blocks_all_differ_does_not_make_us_remember_them_all() -> None:
    encoder, table = Encoder(), Table.first()
    for timeout in range(3 * http2._REMEMBERED):
        _, table = table.read(encoder.encode([("grpc-timeout", f"{timeout}m")]))
    assert next(table._remembered) > http2._REMEMBERED
    assert table._blocks == {}
    assert Table.first() is not table, "other connections begin to remember anew"
    assert next(Table.first()._remembered) == 0


def test_a_block_longer_than_any_kubelets_is_read_each_time() -> None:
    table = Table.first()
    block = Encoder().encode([("x-of-ours", "?" * 2 * http2._LONGEST, True)], huffman=False)
    assert table.read(block)[0] == table.read(block)[0] == (("x-of-ours", "?" * 2 * http2._LONGEST),)
    assert table._blocks == {}


def test_the_same_block_is_decoded_once() -> None:
    encoder, again = Encoder(), Encoder()
    said = [("grpc-timeout", "5S"), ("te", "trailers")]
    read, after = Table.first().read(encoder.encode(said))
    assert Table.first().read(again.encode(said)) == (read, after)
    assert Table.first().read(Encoder().encode(said))[0] is read


@pytest.mark.parametrize("block", [b"\xff\xff\xff\xff\xff", b"\xc9", b"\x40"], ids=["integer", "index", "cut off"])
def test_a_block_that_makes_no_sense_leaves_the_table_as_it_was(block: bytes) -> None:
    table = Table(Decoder(), count())
    with pytest.raises(HPACKError):
        table.read(block)
    assert table.read(Encoder().encode([("te", "trailers")]))[0] == (("te", "trailers"),)
