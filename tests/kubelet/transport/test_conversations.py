"""Our HTTP/2 connection and h2's, as its client, hold any conversation: what one sends the other hears."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    PingAckReceived,
    RequestReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from agent.kubelet.http2 import ServerConnection
from tests.kubelet.transport.frames import receive

ASK: Final = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/v1beta1.DevicePlugin/Allocate"),
    (":authority", "x"),
]
REPLY: Final = [(":status", "200"), ("content-type", "application/grpc+proto")]

names = st.sampled_from(["grpc-encoding", "user-agent", "x-of-ours"])
values = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40).map(str.strip)
extra = st.lists(st.tuples(names, values), max_size=3)
sizes = st.integers(0, 70_000)
HEAD: Final = b"\0\0\1\0\0"  # of a message of 64 KiB: it is handed on when it is whole, or at the end


class Conversation(RuleBasedStateMachine):
    """A client that keeps to the protocol, and a server that does what grpclib's does."""

    def __init__(self) -> None:
        super().__init__()
        self.client = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.client.initiate_connection()
        self.server = ServerConnection()
        self.asking: list[int] = []  # streams that the client has not ended
        self.answering: dict[int, bool] = {}  # streams that the server has not ended: whether it has sent headers
        self.sent: defaultdict[tuple[str, int], bytes] = defaultdict(bytes)
        self.heard: defaultdict[tuple[str, int], bytes] = defaultdict(bytes)
        self.told: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)  # each by who is to understand it
        self.understood: defaultdict[str, list[tuple[object, ...]]] = defaultdict(list)
        self.unread: list[tuple[int, int]] = []  # of the server: stream and bytes
        self.pings = 0

    @initialize()
    def greet(self) -> None:
        self.exchange(1 << 20)

    @rule(headers=extra, cut=st.integers(1, 70_000))
    @precondition(lambda self: len(self.answering) < 20)
    def ask(self, headers: Sequence[tuple[str, str]], cut: int) -> None:
        stream = self.client.get_next_available_stream_id()
        self.client.send_headers(stream, [*ASK, *headers])
        self.told["server"].append(("ask", stream, (*ASK, *headers)))
        self.asking.append(stream)
        self.answering[stream] = False
        self.exchange(cut)

    @rule(
        data=st.data(),
        size=sizes,
        end=st.booleans(),
        padding=st.none() | st.integers(0, 255),
        cut=st.integers(1, 70_000),
    )
    @precondition(lambda self: self.asking)
    def send(self, data: st.DataObject, size: int, end: bool, padding: int | None, cut: int) -> None:
        stream = data.draw(st.sampled_from(self.asking))
        room = min(self.client.local_flow_control_window(stream), self.client.max_outbound_frame_size)
        size = max(0, min(size, room - 256))
        piece = (HEAD[len(self.sent["client", stream]) :] + bytes([size & 0xFF]) * size)[:size]
        self.client.send_data(stream, piece, end_stream=end, pad_length=padding)
        if size:
            self.sent["client", stream] += piece
        if end:
            self.asking.remove(stream)
            self.told["server"].append(("ended", stream))
        self.exchange(cut)

    @rule(data=st.data(), trailers=st.booleans())
    @precondition(lambda self: self.asking)
    def end(self, data: st.DataObject, trailers: bool) -> None:
        stream = data.draw(st.sampled_from(self.asking))
        if trailers:
            self.client.send_headers(stream, [("x-of-ours", "trailer")], end_stream=True)
        else:
            self.client.end_stream(stream)
        self.asking.remove(stream)
        self.told["server"].append(("ended", stream))
        self.exchange(9)

    @rule(data=st.data())
    @precondition(lambda self: self.answering)
    def give_up(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(sorted(self.answering)))
        self.client.reset_stream(stream, ErrorCodes.CANCEL)
        self.forget(stream)
        self.told["server"].append(("reset", stream, ErrorCodes.CANCEL))
        self.exchange(100)

    @rule(window=st.integers(0, 1 << 20), table=st.sampled_from([0, 64, 4096]), frame=st.sampled_from([16384, 65536]))
    def change_settings(self, window: int, table: int, frame: int) -> None:
        self.client.update_settings(
            {
                SettingCodes.INITIAL_WINDOW_SIZE: window,
                SettingCodes.HEADER_TABLE_SIZE: table,
                SettingCodes.MAX_FRAME_SIZE: frame,
            }
        )
        self.exchange(1000)
        assert self.server.max_outbound_frame_size == frame

    @rule(more=st.integers(1, 1 << 20))
    def widen(self, more: int) -> None:
        self.client.increment_flow_control_window(more)
        self.exchange(13)

    @rule()
    def ping(self) -> None:
        self.client.ping(b"12345678")
        self.server.ping(b"87654321")
        self.told["client"].append(("pong", b"12345678"))
        self.told["server"].append(("pong", b"87654321"))
        self.exchange(5)

    @rule(data=st.data(), size=sizes, end=st.booleans(), message=values)
    @precondition(lambda self: self.answering)
    def answer(self, data: st.DataObject, size: int, end: bool, message: str) -> None:
        stream = data.draw(st.sampled_from(sorted(self.answering)))
        if not self.answering[stream]:
            self.server.send_headers(stream, REPLY)
            self.told["client"].append(("reply", stream, tuple(REPLY)))
            self.answering[stream] = True
        size = max(0, min(size, self.server.local_flow_control_window(stream), self.server.max_outbound_frame_size))
        if size:
            piece = bytes([size & 0xFF]) * size
            self.server.send_data(stream, piece)
            self.sent["server", stream] += piece
        if end:
            trailers = [("grpc-status", "9"), ("grpc-message", message)]
            self.server.send_headers(stream, trailers, end_stream=True)
            self.told["client"] += [("trailers", stream, tuple(trailers)), ("ended", stream)]
            del self.answering[stream]
            if stream in self.asking:  # as grpclib does: nothing more is to come
                self.server.reset_stream(stream, ErrorCodes.NO_ERROR)
                self.told["client"].append(("reset", stream, ErrorCodes.NO_ERROR))
                self.asking.remove(stream)
        self.exchange(16)

    @rule()
    def read(self) -> None:
        for stream, size in self.unread:
            self.server.acknowledge_received_data(size, stream)
        self.unread.clear()
        self.exchange(1 << 20)

    @invariant()
    def each_understands_what_the_other_said(self) -> None:
        assert self.understood == self.told
        for (who, stream), sent in self.sent.items():
            call = self.server.streams.get(stream) if who == "client" else None
            heard = self.heard[who, stream] + (call.waiting if call else b"")
            assert heard == sent or (call is None and who == "client" and sent.startswith(heard))

    @invariant()
    def both_know_how_much_may_be_sent(self) -> None:
        for stream in self.server.streams:
            if stream in self.answering:
                assert self.server.local_flow_control_window(stream) == self.client.remote_flow_control_window(stream)

    @invariant()
    def a_call_that_both_have_ended_is_forgotten(self) -> None:
        assert set(self.server.streams) == set(self.answering) | set(self.asking)

    def forget(self, stream: int) -> None:
        self.answering.pop(stream, None)
        if stream in self.asking:
            self.asking.remove(stream)

    def exchange(self, cut: int) -> None:
        """Let both read what the other has written, in pieces of so many bytes, until neither has more to say."""
        while (asked := self.client.data_to_send()) + (answered := bytes(self.server.data_to_send())):
            for start in range(0, len(asked), cut):
                for event in receive(self.server, asked[start : start + cut]):
                    self.hear_as_server(event)
            for event in self.client.receive_data(answered):
                self.hear_as_client(event)

    def hear_as_server(self, event: object) -> None:
        if isinstance(event, RequestReceived):
            self.understood["server"].append(("ask", event.stream_id, tuple(event.headers)))
        elif isinstance(event, DataReceived):
            assert event.flow_controlled_length >= len(event.data)
            if event.data:  # there is none where all is padding
                self.heard["client", event.stream_id] += event.data
            self.unread.append((event.stream_id, event.flow_controlled_length))
        elif isinstance(event, StreamEnded):
            self.understood["server"].append(("ended", event.stream_id))
        elif isinstance(event, StreamReset):
            self.understood["server"].append(("reset", event.stream_id, event.error_code))
        elif isinstance(event, PingAckReceived):
            self.understood["server"].append(("pong", event.ping_data))

    def hear_as_client(self, event: object) -> None:
        if isinstance(event, ResponseReceived):
            self.understood["client"].append(("reply", event.stream_id, tuple(event.headers)))
        elif isinstance(event, TrailersReceived):
            self.understood["client"].append(("trailers", event.stream_id, tuple(event.headers)))
        elif isinstance(event, DataReceived):
            self.heard["server", event.stream_id] += event.data
        elif isinstance(event, StreamEnded):
            self.understood["client"].append(("ended", event.stream_id))
        elif isinstance(event, StreamReset):
            self.understood["client"].append(("reset", event.stream_id, event.error_code))
        elif isinstance(event, PingAckReceived):
            self.understood["client"].append(("pong", event.ping_data))


def test_a_client_and_the_server_understand_whatever_the_other_says() -> None:
    run_state_machine_as_test(Conversation, settings=settings(max_examples=30, stateful_step_count=30, deadline=None))
