"""Calls a plugin's socket with grpcio, whose HTTP/2 is gRPC's own in C: `python -m tests.e2e.kubelet.grpcio_client SOCKET CASE`.

A process of its own: grpcio's threads would stay with the tests.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import grpc
import pytest

from tests.wait import PATIENCE

BIG: Final = bytes(range(256)) * 16384  # 4 MiB


def same(data: bytes) -> bytes:
    """Messages go as they are."""
    return data


def echo(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/t/Echo", same, same)
    for size in (0, 1, 16_379, 16_380, 70_000, 3 << 20):
        assert call(BIG[:size]) == BIG[:size]
    assert call(b"x", timeout=PATIENCE, metadata=(("k", "v"), ("b-bin", b"\1\2\xff"))) == b"x"
    assert [call(str(i).encode()) for i in range(300)] == [str(i).encode() for i in range(300)]


def at_once(channel: grpc.Channel) -> None:
    call = channel.unary_unary("/t/Echo", same, same)
    replies = [call.future(str(i).encode()) for i in range(400)]  # four times as many as a connection may have
    assert [reply.result() for reply in replies] == [str(i).encode() for i in range(400)]


def stream(channel: grpc.Channel) -> None:
    assert list(channel.unary_stream("/t/List", same, same)(b"")) == [BIG] * 3


def refusal(channel: grpc.Channel) -> None:
    for method, code, details in (
        ("Refuse", grpc.StatusCode.FAILED_PRECONDITION, "no: ä %" + "m" * 1990),
        ("Break", grpc.StatusCode.UNKNOWN, "Internal Server Error"),
        ("Nothing", grpc.StatusCode.UNIMPLEMENTED, "Method not found"),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(f"/t/{method}", same, same)(b"")
        assert (refused.value.code(), refused.value.details()) == (code, details)


def cancel(channel: grpc.Channel) -> None:
    call = channel.unary_stream("/t/Wait", same, same)(b"")
    assert next(call) == b"waits"
    call.cancel()
    assert channel.unary_unary("/t/Given", same, same)(b"") == b"up"


CASES: Final[dict[str, Callable[[Any], None]]] = {it.__name__: it for it in (echo, at_once, stream, refusal, cancel)}

if __name__ == "__main__":
    options = [("grpc.default_authority", "localhost"), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(f"unix:{sys.argv[1]}", options=options) as channel:
        CASES[sys.argv[2]](channel)
