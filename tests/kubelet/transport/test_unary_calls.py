"""A unary call is answered the same whether grpclib or our shorter way answers it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from hpack import Decoder, Encoder

from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Encoded
from tests.kubelet.transport.frames import DATA, GOAWAY, HEADERS, PREFACE, RST_STREAM, SETTINGS, Frame
from tests.kubelet.transport.test_http2 import Client
from tests.wait import settled

END: Final = 1
END_OF_HEADERS: Final = 4
PLAIN: Final = {":method": "POST", "content-type": "application/grpc", "te": "trailers"}
SAID: Final = b"\0\0\0\0\4\x0a\2hi"


async def echo(stream: Any) -> None:
    message = await stream.recv_message()
    if message is None:
        raise GRPCError(Status.INVALID_ARGUMENT, "the request has no message")
    await stream.send_message(message)


async def refuse(stream: Any) -> None:
    await stream.recv_message()
    raise GRPCError(Status.FAILED_PRECONDITION, "it is broken: 100 % of ä")


async def fail(stream: Any) -> None:
    raise RuntimeError("a bug")


async def forget(stream: Any) -> None:
    await stream.recv_message()


async def answer_and_refuse(stream: Any) -> None:
    await echo(stream)
    raise GRPCError(Status.ABORTED, "after all")


class Service:
    def __mapping__(self) -> dict[str, Handler]:
        handlers = {"Echo": echo, "Refuse": refuse, "Fail": fail, "Forget": forget, "Both": answer_and_refuse}
        return {f"/t/{name}": Handler(it, Cardinality.UNARY_UNARY, Encoded, Encoded) for name, it in handlers.items()}


CALLS: Final[dict[str, tuple[str, dict[str, str], bytes, bool]]] = {
    "is fine": ("Echo", {}, SAID, True),
    "goes on after its message": ("Echo", {}, SAID, False),
    "has a time": ("Echo", {"grpc-timeout": "10S"}, SAID, True),
    "has no time": ("Echo", {"grpc-timeout": "soon"}, SAID, True),
    "names its messages": ("Echo", {"content-type": "application/grpc+proto"}, SAID, True),
    "has other messages": ("Echo", {"content-type": "application/grpc+json"}, SAID, True),
    "has no type": ("Echo", {"content-type": "text/plain"}, SAID, True),
    "is no POST": ("Echo", {":method": "GET"}, SAID, True),
    "wants no trailers": ("Echo", {"te": ""}, SAID, True),
    "has an unknown method": ("Nothing", {}, SAID, True),
    "is refused": ("Refuse", {}, SAID, True),
    "is refused before its end": ("Refuse", {}, SAID, False),
    "is refused after its answer": ("Both", {}, SAID, True),
    "fails": ("Fail", {}, SAID, True),
    "is not answered": ("Forget", {}, SAID, True),
    "has no message": ("Echo", {}, b"", True),
    "is compressed": ("Echo", {}, b"\1" + SAID[1:], True),
    "is cut off": ("Echo", {}, SAID[:-1], True),
    "is cut off within its head": ("Echo", {}, SAID[:3], True),
    "has two messages": ("Echo", {}, SAID + SAID, True),
}


async def answers(path: Path, calls: list[tuple[str, dict[str, str], bytes, bool]], *, directly: bool) -> list[Any]:
    """What a client gets that makes these calls over one connection, one after the other."""
    server = SocketServer([Service()], path, directly=directly)
    await server.open()
    client, encoder, decoder, got = Client(path), Encoder(), Decoder(), []
    await client.send(PREFACE + bytes(Frame(SETTINGS, 0, 0, b"")))
    for number, (method, headers, data, ends) in enumerate(calls):
        stream = 2 * number + 1
        asked = [(":path", f"/t/{method}"), (":scheme", "http"), (":authority", "x"), *{**PLAIN, **headers}.items()]
        await client.send(bytes(Frame(HEADERS, END_OF_HEADERS, stream, encoder.encode(sorted(asked)))))
        await client.send(bytes(Frame(DATA, END if ends else 0, stream, data)))
        await settled()
    await server.shut_down(0)
    while (frame := await client.frame()) is not None and frame.kind != GOAWAY:
        if frame.kind in (HEADERS, DATA, RST_STREAM):
            content = decoder.decode(frame.payload) if frame.kind == HEADERS else frame.payload
            got.append((frame.stream, frame.kind, frame.flags, content))
    client.close()
    return got


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_is_answered_as_by_grpclib_when_it(tmp_path: Path, name: str) -> None:
    """The call after it shows that the connection goes on."""
    calls = [CALLS[name], CALLS["is fine"]]
    ours = await answers(tmp_path / "ours", calls, directly=True)
    assert ours == await answers(tmp_path / "grpclibs", calls, directly=False)
    assert (3, DATA, 0, SAID) in ours


async def test_a_client_that_ends_its_calls_after_their_answers_can_make_any_number(tmp_path: Path) -> None:
    server = SocketServer([Service()], tmp_path / "s", directly=True)
    await server.open()
    client, encoder = Client(tmp_path / "s"), Encoder()
    await client.send(PREFACE + bytes(Frame(SETTINGS, 0, 0, b"")))
    for stream in range(1, 501, 2):
        asked = [*PLAIN.items(), (":path", "/t/Echo"), (":scheme", "http"), (":authority", "x")]
        await client.send(bytes(Frame(HEADERS, END_OF_HEADERS, stream, encoder.encode(asked))))
        await client.send(bytes(Frame(DATA, 0, stream, SAID)))
        while (frame := await client.frame()) is not None and not (frame.stream == stream and frame.flags & END):
            assert frame.kind != RST_STREAM
        assert frame is not None
        await client.send(bytes(Frame(DATA, END, stream, b"")))
    client.close()
    await server.shut_down(0)
