"""A plugin's socket serves whatever speaks HTTP/2, and whoever breaks the protocol harms no other client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any, Final

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings
import pytest
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler
from grpclib.server import Stream
from h2.events import DataReceived, Event, RemoteSettingsChanged, RequestReceived, StreamReset
from hpack import Decoder, Encoder

from agent.kubelet.api.v1beta1 import PreStartContainerRequest
from agent.kubelet.http2 import OpenCalls, ServerConnection
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Codec, Encoded
from tests.kubelet.transport.frames import (
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    UNKNOWN,
    WINDOW_UPDATE,
    Frame,
    numbers,
    receive,
)
from tests.wait import limit, settled, until

Message = PreStartContainerRequest  # any message with bytes in it
LIST: Final = 3_000_000  # bytes
HELLO: Final = PREFACE + bytes(Frame(SETTINGS, 0, 0, b""))


def ask(method: str, *more: tuple[str | bytes, str | bytes]) -> bytes:
    """A header block."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", f"/t/{method}"), (":authority", "x")]
    return Encoder().encode([*headers, ("content-type", "application/grpc"), ("te", "trailers"), *more])


ECHO: Final = ask("Echo")
SAID: Final = b"\0\0\0\0\4\x0a\2hi"  # a message and its head: a device ID "hi"


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return bytes(Frame(kind, flags, stream, payload))


def setting(code: h2.settings.SettingCodes, value: int) -> bytes:
    return code.to_bytes(2, "big") + numbers(value)


class Service:
    """Says what it is told, sends a list, or waits."""

    def __init__(self, *, directly: bool) -> None:
        self.waiting = self.given_up = 0
        self._sends = Cardinality.UNARY_UNARY if directly else Cardinality.UNARY_STREAM

    async def echo(self, stream: Stream[Any, Any]) -> None:
        message = await stream.recv_message()
        assert message is not None
        await stream.send_message(message)

    async def big(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(Encoded(bytes(LIST)))

    async def wait(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up += 1

    def __mapping__(self) -> dict[str, Handler]:
        return {
            "/t/Echo": Handler(self.echo, Cardinality.UNARY_UNARY, Message, Message),
            "/t/Big": Handler(self.big, self._sends, Message, Message),
            "/t/Wait": Handler(self.wait, self._sends, Message, Message),
        }


@pytest.fixture(params=[False, True], ids=["by grpclib", "directly"])
async def service(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    service = Service(directly=request.param)
    server = SocketServer([service], tmp_path / "s", directly=request.param)
    await server.open()
    yield service
    await server.shut_down(0)


class Client:
    """Sends bytes and reads frames."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.setblocking(False)
        self.sock.connect(str(path))
        self._read = b""
        self._headers = Decoder()

    async def send(self, data: bytes) -> None:
        async with limit("all sent"):
            await asyncio.get_running_loop().sock_sendall(self.sock, data)

    async def frame(self) -> Frame | None:
        """The next; None where the server has ended the connection."""
        async with limit("a frame or the end"):
            while len(self._read) < 9 or len(self._read) < 9 + int.from_bytes(self._read[:3], "big"):
                try:
                    data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._read += data
        end = 9 + int.from_bytes(self._read[:3], "big")
        read, self._read = self._read[:end], self._read[end:]
        return Frame(read[3], read[4], int.from_bytes(read[5:9], "big"), read[9:])

    async def until(self, wanted: Callable[[Frame], bool]) -> Frame:
        while (frame := await self.frame()) is not None:
            if wanted(frame):
                return frame
        raise ConnectionResetError("the server ended the connection")

    async def reply(self, stream: int) -> tuple[bytes, dict[str, str]]:
        """The data of a call, and its headers and trailers; `reset` with a code if that ended it."""
        data = b""
        said: dict[str, str] = {}
        while True:
            got = await self.until(lambda it: it.stream == stream)
            if got.kind == RST_STREAM:
                return data, {**said, "reset": str(int.from_bytes(got.payload, "big"))}
            if got.kind == HEADERS:
                said |= {str(name): str(value) for name, value in self._headers.decode(got.payload)}
            data += got.payload if got.kind == DATA else b""
            if got.kind in (DATA, HEADERS) and got.flags & 1:
                return data, said

    async def echoes(self, stream: int) -> None:
        """A call of its own is answered."""
        await self.send(frame(HEADERS, 4, stream, ECHO) + frame(DATA, 1, stream, SAID))
        assert await self.reply(stream) == (
            SAID,
            {":status": "200", "content-type": "application/grpc+proto", "grpc-status": "0"},
        )

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def connect(tmp_path: Path, service: Service) -> Iterator[Callable[[], Client]]:
    with ExitStack() as clients:
        yield lambda: clients.enter_context(closing(Client(tmp_path / "s")))


@pytest.fixture
async def client(connect: Callable[[], Client]) -> Client:
    client = connect()
    await client.send(HELLO)
    return client


@pytest.mark.parametrize("size", [0, 1, 16_370, 16_384, 70_000, (4 << 20) - 5])  # the last is as large as any may be
async def test_a_message_of_any_size_comes_and_goes_whole(tmp_path: Path, service: Service, size: int) -> None:
    channel = Channel(path=str(tmp_path / "s"), codec=Codec())
    try:
        echo = UnaryUnaryMethod[Any, Any](channel, "/t/Echo", Message, Message)
        for _ in range(2):
            assert (await echo(Message(["?" * size]))).device_ids == ["?" * size]
    finally:
        channel.close()
        await settled()


async def test_a_hundred_calls_at_once_are_answered_each(tmp_path: Path, service: Service) -> None:
    channel = Channel(path=str(tmp_path / "s"), codec=Codec())
    try:
        echo = UnaryUnaryMethod[Any, Any](channel, "/t/Echo", Message, Message)
        replies = await asyncio.gather(*(echo(Message([str(i)])) for i in range(100)))
        assert [it.device_ids for it in replies] == [[str(i)] for i in range(100)]
    finally:
        channel.close()
        await settled()


async def test_a_call_above_a_hundred_is_refused_so_that_the_client_may_try_again(
    client: Client, service: Service
) -> None:
    for stream in range(1, 201, 2):
        await client.send(frame(HEADERS, 4, stream, ask("Wait")) + frame(DATA, 1, stream, SAID))
    await client.send(frame(HEADERS, 4, 201, ECHO) + frame(DATA, 1, 201, SAID))
    _, said = await client.reply(201)
    assert said["reset"] == str(int(h2.errors.ErrorCodes.REFUSED_STREAM))
    await client.send(frame(RST_STREAM, 0, 7, numbers(8)))
    await client.echoes(203)


async def test_what_comes_byte_by_byte_is_understood(connect: Callable[[], Client]) -> None:
    client = connect()
    for byte in HELLO + frame(HEADERS, 4, 1, ECHO) + frame(DATA, 1, 1, SAID):
        await client.send(bytes((byte,)))
        await asyncio.sleep(0)
    assert (await client.reply(1))[0] == SAID


ODD = {
    "a block in three frames": frame(HEADERS, 0, 1, ECHO[:5])
    + frame(CONTINUATION, 0, 1, ECHO[5:9])
    + frame(CONTINUATION, 4, 1, ECHO[9:])
    + frame(DATA, 1, 1, SAID),
    "padding and a priority": frame(HEADERS, 0x2C, 1, b"\7\0\0\0\0\x10" + ECHO + bytes(7))
    + frame(DATA, 9, 1, b"\4" + SAID + bytes(4)),
    "all padding": frame(HEADERS, 4, 1, ECHO) + frame(DATA, 8, 1, b"\3" + bytes(3)) + frame(DATA, 1, 1, SAID),
    "empty data amid a message": frame(HEADERS, 4, 1, ECHO)
    + frame(DATA, 0, 1, SAID[:3])
    + frame(DATA, 0, 1)
    + frame(DATA, 1, 1, SAID[3:]),
    "empty data at the end": frame(HEADERS, 4, 1, ECHO) + frame(DATA, 0, 1, SAID) + frame(DATA, 1, 1),
    "trailers": frame(HEADERS, 4, 1, ECHO) + frame(DATA, 0, 1, SAID) + frame(HEADERS, 5, 1, TRAILERS),
    "trailers in two frames": frame(HEADERS, 4, 1, ECHO)
    + frame(DATA, 0, 1, SAID)
    + frame(HEADERS, 1, 1, TRAILERS[:2])
    + frame(CONTINUATION, 4, 1, TRAILERS[2:]),
    "reserved bits": frame(WINDOW_UPDATE, 0, 0, b"\x80\0\0\1")
    + frame(HEADERS, 4, 1 << 31 | 1, ECHO)
    + frame(DATA, 1, 1 << 31 | 1, SAID),
    "frames of types unknown to us": frame(UNKNOWN, 3, 1, b"what")
    + frame(HEADERS, 4, 1, ECHO)
    + frame(UNKNOWN, 3, 1, b"what")
    + frame(DATA, 1, 1, SAID),
    "a header that is not ASCII": frame(HEADERS, 4, 1, ask("Echo", (b"x-of-ours", b"\xc3\xa4\xff")))
    + frame(DATA, 1, 1, SAID),
    "a priority before and amid": frame(PRIORITY, 0, 1, b"\0\0\0\0\x10")
    + frame(HEADERS, 4, 1, ECHO)
    + frame(PRIORITY, 0, 1, b"\0\0\0\0\x10")
    + frame(DATA, 1, 1, SAID),
    "settings unknown to us": frame(SETTINGS, 0, 0, b"\0\x63\0\0\0\1")
    + frame(HEADERS, 4, 1, ECHO)
    + frame(DATA, 1, 1, SAID),
    "a table of no entries": frame(SETTINGS, 0, 0, b"\0\1" + numbers(0))
    + frame(HEADERS, 4, 1, b"\x20" + ECHO[:0] + Encoder().encode([(n, v, True) for n, v in Decoder().decode(ECHO)]))
    + frame(DATA, 1, 1, SAID),
}


@pytest.mark.parametrize("what", ODD)
async def test_what_the_protocol_allows_is_answered(client: Client, what: str) -> None:
    await client.send(ODD[what])
    assert (await client.reply(1))[0] == SAID
    await client.echoes(3)


PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED = 1, 3, 5
FRAME_SIZE_ERROR, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 6, 9, 11
VIOLATIONS = {
    "a frame too long": (FRAME_SIZE_ERROR, frame(UNKNOWN, 0, 0, bytes(16385))),
    "headers of no stream": (PROTOCOL_ERROR, frame(HEADERS, 4, 0, ECHO)),
    "an even stream": (PROTOCOL_ERROR, frame(HEADERS, 4, 2, ECHO)),
    "headers amid a stream": (PROTOCOL_ERROR, frame(HEADERS, 4, 1, ECHO) + frame(HEADERS, 4, 1, ECHO)),
    "headers after the end": (STREAM_CLOSED, frame(HEADERS, 5, 1, ask("Wait")) + frame(HEADERS, 5, 1, TRAILERS)),
    "no header block": (COMPRESSION_ERROR, frame(HEADERS, 4, 1, b"\xff\xff\xff\xff\xff")),
    "an entry that no table has": (COMPRESSION_ERROR, frame(HEADERS, 4, 1, b"\xc9")),
    "headers of 100 kB from few bytes": (COMPRESSION_ERROR, frame(HEADERS, 4, 1, Encoder().encode([("a", "x" * 3000)], huffman=False) + b"\xbe" * 30)),
    "a frame amid a block": (PROTOCOL_ERROR, frame(HEADERS, 0, 1, ECHO) + frame(PING, 0, 0, bytes(8))),
    "a continuation of nothing": (PROTOCOL_ERROR, frame(CONTINUATION, 4, 1)),
    "a continuation of another": (PROTOCOL_ERROR, frame(HEADERS, 0, 1, ECHO) + frame(CONTINUATION, 4, 3)),
    "a block without an end": (ENHANCE_YOUR_CALM, frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(16384)) * 5),
    "data of no stream": (PROTOCOL_ERROR, frame(DATA, 0, 9, b"x")),
    "data after the end": (STREAM_CLOSED, frame(HEADERS, 5, 1, ask("Wait")) + frame(DATA, 1, 1, b"x")),
    "more padding than frame": (PROTOCOL_ERROR, frame(HEADERS, 4, 1, ask("Wait")) + frame(DATA, 8, 1, b"\4abc")),
    "padding without a length": (FRAME_SIZE_ERROR, frame(HEADERS, 4, 1, ask("Wait")) + frame(DATA, 8, 1)),
    "a priority cut off": (PROTOCOL_ERROR, frame(HEADERS, 0x24, 1, b"\0\0")),
    "a short priority": (FRAME_SIZE_ERROR, frame(PRIORITY, 0, 1, bytes(4))),
    "a short ping": (FRAME_SIZE_ERROR, frame(PING, 0, 0, bytes(7))),
    "a ping of a stream": (PROTOCOL_ERROR, frame(PING, 0, 1, bytes(8))),
    "cut settings": (FRAME_SIZE_ERROR, frame(SETTINGS, 0, 0, bytes(5))),
    "an acknowledgement that says something": (FRAME_SIZE_ERROR, frame(SETTINGS, 1, 0, bytes(6))),
    "settings of a stream": (PROTOCOL_ERROR, frame(SETTINGS, 0, 1)),
    "a first window too large": (FLOW_CONTROL_ERROR, frame(SETTINGS, 0, 0, b"\0\4" + numbers(1 << 31))),
    "frames too small": (PROTOCOL_ERROR, frame(SETTINGS, 0, 0, b"\0\5" + numbers(100))),
    "a window that grows by nothing": (PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 0, numbers(0))),
    "a window too large": (FLOW_CONTROL_ERROR, frame(WINDOW_UPDATE, 0, 0, numbers(2**31 - 1))),
    "a stream's window too large": (
        FLOW_CONTROL_ERROR,
        frame(HEADERS, 4, 1, ask("Wait")) + frame(WINDOW_UPDATE, 0, 1, numbers(2**31 - 1)),
    ),
    "a window of no stream": (PROTOCOL_ERROR, frame(WINDOW_UPDATE, 0, 9, numbers(1))),
    "a short window": (FRAME_SIZE_ERROR, frame(WINDOW_UPDATE, 0, 0, bytes(3))),
    "a reset of no stream": (PROTOCOL_ERROR, frame(RST_STREAM, 0, 5, bytes(4))),
    "a short reset": (FRAME_SIZE_ERROR, frame(RST_STREAM, 0, 1, bytes(3))),
    "a push": (PROTOCOL_ERROR, frame(PUSH_PROMISE, 4, 1, bytes(8))),
    "a short goodbye": (FRAME_SIZE_ERROR, frame(GOAWAY, 0, 0, bytes(3))),
    "more data than allowed in all": (
        FLOW_CONTROL_ERROR,
        b"".join(frame(HEADERS, 4, it, ask("Wait")) + frame(DATA, 0, it, bytes(16384)) * 200 for it in (1, 3, 5)),
    ),
    "more settings than there are": (ENHANCE_YOUR_CALM, frame(SETTINGS, 0, 0, b"\0\4" + numbers(1) + (b"\0\x63" + numbers(1)) * 32)),
}  # fmt: skip


@pytest.mark.parametrize("what", VIOLATIONS)
def test_what_the_protocol_forbids_ends_the_connection_with_the_code_that_it_names(what: str) -> None:
    code, sent = VIOLATIONS[what]
    connection = ServerConnection()
    connection.receive_data(HELLO)
    connection.data_to_send()
    with pytest.raises(h2.exceptions.ProtocolError) as caught:
        receive(connection, sent)
    assert caught.value.error_code == code
    written = bytes(connection.data_to_send())
    assert written.endswith(numbers(code))
    assert written[-14] == GOAWAY
    assert connection.receive_data(HELLO) == [], "nothing is read any more"


@pytest.mark.parametrize("what", [*VIOLATIONS, "no HTTP/2"])
async def test_whoever_breaks_the_protocol_ends_its_own_connection_and_no_other(
    connect: Callable[[], Client], client: Client, what: str
) -> None:
    broken = connect()
    with suppress(BrokenPipeError):  # the server has not waited for all of it
        await broken.send(b"GET / HTTP/1.1\r\n\r\n" if what == "no HTTP/2" else HELLO + VIOLATIONS[what][1])
    while await broken.frame() is not None:
        pass
    await client.echoes(1)


async def test_our_settings_come_first_and_together_with_the_answer_to_the_clients(
    connect: Callable[[], Client],
) -> None:
    client = connect()
    await settled()
    with pytest.raises(BlockingIOError):
        client.sock.recv(1)
    await client.send(HELLO)
    first, second, third = await client.frame(), await client.frame(), await client.frame()
    assert first is not None
    assert (first.kind, first.flags) == (SETTINGS, 0)
    assert second is not None
    assert second.kind == WINDOW_UPDATE
    assert third == Frame(SETTINGS, 1, 0, b"")


def calls(number: int, message: bytes, connection: ServerConnection, first: int = 1) -> list[Event]:
    """Begin so many calls, each with what is given of a message."""
    events = []
    for stream in range(first, first + 2 * number, 2):
        events += receive(connection, frame(HEADERS, 4, stream, ask("Wait")))
        for at in range(0, len(message), 16384):
            events += receive(connection, frame(DATA, 0, stream, message[at : at + 16384]))
    return events


def greeted(held: OpenCalls) -> ServerConnection:
    connection = ServerConnection(held)
    connection.receive_data(HELLO)
    return connection


def test_a_client_that_changes_its_first_window_again_and_again_has_the_last_one() -> None:
    connection = greeted(OpenCalls())
    calls(100, b"", connection)
    events = connection.receive_data(frame(SETTINGS, 0, 0, b"".join(b"\0\4" + numbers(n) for n in range(32))))
    assert [type(event) for event in events] == [RemoteSettingsChanged]
    assert {connection.local_flow_control_window(stream) for stream in connection.streams} == {31}


def test_a_message_goes_on_when_it_is_whole_however_many_pieces_it_came_in() -> None:
    """grpclib keeps an object of 400 bytes for each (CVE-2026-84304 of grpc-go)."""
    connection = greeted(OpenCalls())
    message = b"\0\0\0\1\0" + bytes(256)
    receive(connection, frame(HEADERS, 4, 1, ECHO))
    events = [it for byte in message for it in receive(connection, frame(DATA, 0, 1, bytes([byte])))]
    assert [(event.data, event.flow_controlled_length) for event in events] == [(message, 261)]  # type: ignore[attr-defined]
    assert [it for _ in range(1000) for it in receive(connection, frame(DATA, 0, 1, b"x"))] == []


def test_no_client_and_not_all_together_hold_more_than_a_few_requests() -> None:
    held, half = OpenCalls(), b"\0\0\x3f\xff\xff" + bytes(1 << 17)
    first = greeted(held)
    with pytest.raises(h2.exceptions.ProtocolError):  # it may not send so much that is not read
        calls(100, half, first)
    assert held.bytes <= 9 << 20
    first.release()
    assert held.bytes == 0
    others = [greeted(held) for _ in range(10)]
    refused = [it for one in others for it in calls(40, half, one) if isinstance(it, StreamReset)]
    assert held.bytes <= 17 << 20
    assert refused
    small = calls(1, SAID, others[-1], first=101)  # a pod's Allocate goes through all the same
    assert [type(event) for event in small] == [RequestReceived, DataReceived]
    for one in others:
        one.release()
    assert held.bytes == 0


def test_calls_that_end_hold_nothing_and_give_back_what_their_client_may_send() -> None:
    held = OpenCalls()
    connection = greeted(held)
    for stream in range(1, 2001, 2):
        calls(1, b"\0\0\x3f\xff\xff" + bytes(1 << 14), connection, first=stream)
        receive(connection, frame(RST_STREAM, 0, stream, numbers(8)))
    assert held.bytes == 0


def test_a_call_that_the_client_ends_in_the_same_breath_never_begins() -> None:
    """grpclib would keep its stream as long as the connection lasts: 40 MB in a second of such calls (CVE-2023-44487)."""
    held = OpenCalls()
    connection = greeted(held)
    for stream in range(1, 5001, 2):
        call = frame(HEADERS, 4, stream, ECHO) + frame(DATA, 0, stream, SAID + bytes(9000))
        assert connection.receive_data(call + frame(RST_STREAM, 0, stream, numbers(8))) == []
    assert (held.bytes, held.calls) == (0, 0)
    begun = connection.receive_data(frame(HEADERS, 4, 5001, ECHO) + frame(RST_STREAM, 0, 1, numbers(8)))
    ended = connection.receive_data(frame(RST_STREAM, 0, 5001, numbers(8)))
    assert [type(event) for event in (*begun, *ended)] == [RequestReceived, StreamReset]


def test_a_call_whose_message_is_refused_in_the_same_breath_never_begins() -> None:
    connection = greeted(OpenCalls())
    assert connection.receive_data(frame(HEADERS, 4, 1, ECHO) + frame(DATA, 0, 1, b"\0\0\x40\0\1")) == []
    assert connection.data_to_send().endswith(frame(RST_STREAM, 0, 1, numbers(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)))


def test_all_clients_together_have_a_thousand_calls_open_and_each_may_have_a_few() -> None:
    held = OpenCalls()
    others = [greeted(held) for _ in range(200)]
    for one in others:
        calls(100, b"", one)
    assert held.calls == 10 * 100 + 190 * 5
    assert {len(one.streams) for one in others} == {100, 5}
    for one in others:
        one.release()
    assert held.calls == 0
    calls(100, b"", others[-1], first=201)
    assert held.calls == 100


def test_one_turn_reads_few_header_blocks_that_are_long() -> None:
    """hpack takes a millisecond and more for one; those of a kubelet have 200 bytes."""
    connection, long = greeted(OpenCalls()), ask("Echo", ("x", "y" * 15000))
    data, events = b"".join(frame(HEADERS, 4, stream, long) for stream in range(1, 41, 2)), []
    turns = 0
    while not turns or connection.is_behind:
        read = connection.receive_data(b"" if turns else data)
        assert len(read) <= 3
        events += read
        turns += 1
    assert len(events) == 20
    with pytest.raises(h2.exceptions.ProtocolError):
        connection.receive_data(frame(HEADERS, 4, 41, ask("Echo", ("x", "y" * 17000))[:16384]))


def test_a_message_that_is_too_long_is_refused_by_its_head() -> None:
    connection = greeted(OpenCalls())
    (_, reset) = calls(1, b"\0\0\x40\0\1", connection)
    assert isinstance(reset, StreamReset)


@pytest.mark.parametrize("value", ["0n", "0S", "1n", "99999999n", "1u", "1m", "9" * 400 + "H", "-1S", "", "1s", "٣S"])
async def test_no_time_that_a_client_gives_a_call_is_worth_a_traceback(
    client: Client, caplog: pytest.LogCaptureFixture, value: str
) -> None:
    await client.send(frame(HEADERS, 4, 1, ask("Echo", ("grpc-timeout", value))) + frame(DATA, 1, 1, SAID))
    said, headers = await client.reply(1)
    assert said == SAID or headers["grpc-message"] == "Invalid grpc-timeout header"
    assert [record for record in caplog.records if record.exc_info] == []
    await client.echoes(3)


async def test_a_request_without_an_authority_is_answered(client: Client) -> None:
    """It ended servers of grpc-go (GO-2026-6443); a `host` may take its place, or nothing."""
    no_authority = [(":method", "POST"), (":path", "/t/Echo"), ("content-type", "application/grpc"), ("te", "trailers")]
    for stream, more in ((1, []), (3, [("host", "x")]), (5, [("host", "")])):
        await client.send(frame(HEADERS, 4, stream, Encoder().encode([*no_authority, *more])))
        await client.send(frame(DATA, 1, stream, SAID))
        assert (await client.reply(stream))[0] == SAID


async def test_a_request_without_a_path_is_reset_and_its_connection_goes_on(client: Client) -> None:
    await client.send(frame(HEADERS, 5, 1, Encoder().encode([(":method", "POST")])))
    assert (await client.reply(1))[1] == {"reset": str(PROTOCOL_ERROR)}
    await client.echoes(3)


async def test_a_ping_is_answered_and_an_answer_is_not(client: Client) -> None:
    await client.send(frame(PING, 1, 0, b"an echo?") + frame(PING, 0, 0, b"12345678"))
    assert await client.until(lambda it: it.kind == PING) == Frame(PING, 1, 0, b"12345678")


@pytest.mark.parametrize(
    "sent", [frame(RST_STREAM, 0, 1, numbers(8)), frame(GOAWAY, 0, 0, bytes(8)), None], ids=["reset", "goaway", "lost"]
)
async def test_a_call_that_the_client_gives_up_is_cancelled(
    client: Client, service: Service, sent: bytes | None
) -> None:
    await client.send(frame(HEADERS, 4, 1, ask("Wait")) + frame(DATA, 1, 1, SAID))
    await until(lambda: service.waiting)
    assert service.given_up == 0
    if sent:
        await client.send(sent)
    else:
        client.close()
    await until(lambda: service.given_up)


async def test_frames_of_a_call_that_has_just_ended_are_ignored(client: Client) -> None:
    await client.send(frame(HEADERS, 4, 1, ask("Nothing")))
    assert (await client.reply(1))[1]["grpc-status"] == "12"  # unimplemented
    late = frame(WINDOW_UPDATE, 0, 1, numbers(5)) + frame(RST_STREAM, 0, 1, numbers(8)) + frame(DATA, 1, 1, SAID)
    await client.send(late)
    await client.echoes(3)


async def test_no_more_is_sent_than_the_client_allows(connect: Callable[[], Client]) -> None:
    client = connect()
    window = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
    await client.send(PREFACE + frame(SETTINGS, 0, 0, setting(window, 1000)))
    await client.send(frame(HEADERS, 4, 1, ask("Big")) + frame(DATA, 1, 1, SAID))

    async def got(size: int) -> None:
        """So much comes, and no more before the answer to a ping."""
        have = 0
        while have < size:
            have += len((await client.until(lambda it: it.kind == DATA)).payload)
        await settled()
        await client.send(frame(PING, 0, 0, bytes(8)))
        assert (await client.until(lambda it: it.kind in (DATA, PING))).kind == PING
        assert have == size

    await got(1000)
    await client.send(frame(SETTINGS, 0, 0, setting(window, 3000)))
    await got(2000)
    await client.send(frame(SETTINGS, 0, 0, setting(window, 0)))  # 3,000 less than nothing
    await client.send(frame(WINDOW_UPDATE, 0, 1, numbers(2999)))
    await got(0)
    await client.send(frame(WINDOW_UPDATE, 0, 1, numbers(1 << 20)))
    await got(65535 - 3000)  # of the connection
    await client.send(frame(WINDOW_UPDATE, 0, 0, numbers(1 << 30)))
    await client.send(frame(WINDOW_UPDATE, 0, 1, numbers(1 << 30)))
    data, said = await client.reply(1)
    assert (len(data) + 65535, said["grpc-status"]) == (LIST + 5, "0")


def test_a_long_header_is_cut_into_frames_that_any_client_takes() -> None:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    client.initiate_connection()
    client.max_inbound_frame_size = 1 << 14
    client.send_headers(1, [(":method", "POST"), (":scheme", "http"), (":path", "/"), (":authority", "x")])
    server = ServerConnection()
    server.receive_data(client.data_to_send())
    message = "?" * 50_000
    server.send_headers(1, [(":status", "200"), ("grpc-message", message)])
    (reply,) = [
        it for it in client.receive_data(bytes(server.data_to_send())) if isinstance(it, h2.events.ResponseReceived)
    ]
    assert [(str(name), str(value)) for name, value in reply.headers] == [(":status", "200"), ("grpc-message", message)]
