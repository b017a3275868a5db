"""Whatever frames a client sends, our HTTP/2 connection understands what h2 would, but for what is named here."""

from __future__ import annotations

from collections.abc import Sequence

import h2.exceptions
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agent.kubelet.http2 import ServerConnection
from tests.kubelet.transport.frames import (
    BLOCK,
    CONTINUATION,
    DATA,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    REMEMBERED,
    RST_STREAM,
    SETTINGS,
    TRAILERS,
    UNKNOWN,
    WINDOW_UPDATE,
    Frame,
    numbers,
)

streams = st.sampled_from([1, 3, 5, 7])
ids = streams | st.sampled_from([0, 2, 9])
steps = st.sampled_from([1, 100, 16384, 65535, 2**31 - 1])
setting = st.tuples(st.sampled_from([1, 3, 4, 5, 6, 99]), steps | st.just(0)).map(
    lambda it: it[0].to_bytes(2, "big") + numbers(it[1])
)
frames = st.one_of(
    st.builds(Frame, st.just(HEADERS), st.sampled_from([4, 5]), streams, st.sampled_from([BLOCK, REMEMBERED])),
    st.builds(Frame, st.just(HEADERS), st.sampled_from([0, 1, 4, 5]), ids, st.sampled_from([BLOCK, TRAILERS, b"\xff\xff"])),
    st.builds(Frame, st.just(HEADERS), st.just(0x24), ids, st.just(b"\0\0\0\0\x10" + BLOCK)),
    st.builds(Frame, st.just(HEADERS), st.just(0x2D), streams, st.just(b"\2\0\0\0\0\x10" + BLOCK + b"\0\0")),
    st.builds(Frame, st.just(HEADERS), st.sampled_from([0xC, 0x2D]), ids, st.sampled_from([b"", b"\0", b"\x09" + BLOCK])),
    st.builds(Frame, st.just(CONTINUATION), st.sampled_from([0, 4]), ids, st.sampled_from([b"", TRAILERS])),
    st.builds(Frame, st.just(DATA), st.sampled_from([0, 1]), streams, st.sampled_from([b"", b"abc", bytes(16384)])),
    st.builds(Frame, st.just(DATA), st.sampled_from([8, 9]), ids, st.sampled_from([b"", b"\0", b"\1x", b"\2abc\0\0", b"\3x"])),
    st.builds(Frame, st.just(RST_STREAM), st.just(0), ids, st.sampled_from([numbers(8), b"", numbers(1, 2)])),
    st.builds(Frame, st.just(WINDOW_UPDATE), st.just(0), ids, steps.map(numbers) | st.sampled_from([bytes(4), b"\x80\0\0\1", b""])),
    st.builds(Frame, st.just(SETTINGS), st.sampled_from([0, 1]), st.sampled_from([0, 0, 1]), st.lists(setting, max_size=3, unique_by=lambda it: it[:2]).map(b"".join) | st.just(b"1")),
    st.builds(Frame, st.just(PING), st.sampled_from([0, 1]), st.sampled_from([0, 0, 1]), st.sampled_from([b"12345678", b"1"])),
    st.builds(Frame, st.just(PRIORITY), st.just(0), ids, st.sampled_from([b"\0\0\0\0\x10", b"1"])),
    st.builds(Frame, st.sampled_from([PUSH_PROMISE, GOAWAY, UNKNOWN]), st.just(0), st.sampled_from([0, 1]), st.sampled_from([bytes(8), b"1"])),
)  # fmt: skip


class Both:
    """The same frames and calls to both."""

    def __init__(self) -> None:
        self.h2 = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding="latin-1",
                validate_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_inbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self.h2.initiate_connection()
        self.ours = ServerConnection()
        self.h2.increment_flow_control_window((4 << 20) - 65535)
        self.h2.update_settings({4: 4 << 20})
        ack = bytes(Frame(SETTINGS, 1, 0, b""))
        for each in (self.h2, self.ours):
            each.receive_data(PREFACE + bytes(Frame(SETTINGS, 0, 0, b"")) + ack + ack)


def said(event: Event) -> tuple[object, ...] | None:
    """What grpclib learns of an event; None if nothing."""
    if isinstance(event, RequestReceived):
        return "request", event.stream_id, tuple(tuple(each) for each in event.headers)
    if isinstance(event, DataReceived):
        return (
            ("data", event.stream_id, event.data, event.flow_controlled_length)
            if event.flow_controlled_length
            else None
        )
    if isinstance(event, StreamEnded):
        return "ended", event.stream_id
    if isinstance(event, StreamReset):
        return ("reset", event.stream_id, event.error_code) if event.remote_reset else None
    if isinstance(event, WindowUpdated):
        return "window", event.stream_id
    if isinstance(event, RemoteSettingsChanged):
        return ("windows",) if 4 in event.changed_settings else None
    if isinstance(event, PingAckReceived):
        return "pong", event.ping_data
    if isinstance(event, ConnectionTerminated):
        return "goaway", event.error_code
    return None


def hear(connection: H2Connection | ServerConnection, frame: Frame) -> list[tuple[object, ...]] | str:
    try:
        events = connection.receive_data(bytes(frame))
    except h2.exceptions.ProtocolError as error:
        return f"ends: {error!r}"
    heard = list(dict.fromkeys(it for it in map(said, events) if it))  # a frame may set windows twice
    written = bytes(connection.data_to_send() or b"")
    while written:
        if written[3] == RST_STREAM:
            heard.append(("reset by us", int.from_bytes(written[5:9], "big")))
        written = written[9 + int.from_bytes(written[:3], "big") :]
    return heard


def is_meant(
    frame: Frame, newest: int, theirs: list[tuple[object, ...]] | str, ours: list[tuple[object, ...]] | str
) -> str:
    """Why we differ; empty if we should not."""
    if isinstance(ours, str):
        if frame.kind == RST_STREAM and frame.stream > newest:
            return "a reset of a stream that never was ends the connection (RFC 9113, 6.4)"
        ends_stream = not isinstance(theirs, str) and any(it[0] == "reset by us" for it in theirs)
        return "we end the connection where h2 ends the stream" if ends_stream else ""
    if isinstance(theirs, str):
        if frame.kind == WINDOW_UPDATE and frame.payload[0] & 0x80:
            return "the reserved bit means nothing (RFC 9113, 6.9)"
        if 0 < frame.stream <= newest:
            return "a stream that never was is to us one that has ended"
        return ""
    if not ours and frame.kind == DATA and [it[0] for it in theirs] == ["data"]:
        return "a message is handed on when all of it has come"
    if not ours and 0 < frame.stream <= newest and all(it[0] == "reset by us" for it in theirs):
        return "what comes for a stream that has ended is late, and not answered"
    if theirs and theirs[0][0] == "request" and not any(name == ":path" for name, _ in theirs[0][2]):  # type: ignore[attr-defined]
        return "grpclib takes a path for granted"
    return ""


@settings(max_examples=300, deadline=None)
@given(st.lists(frames, min_size=1, max_size=12))
@example([Frame(HEADERS, 4, 5, BLOCK), Frame(DATA, 0, 5, b"abc")])
def test_what_a_client_sends_means_the_same_to_us_as_to_h2(sent: Sequence[Frame]) -> None:
    both = Both()
    newest = 0
    for frame in sent:
        theirs, ours = hear(both.h2, frame), hear(both.ours, frame)
        if isinstance(theirs, str) and isinstance(ours, str):
            return
        if ours != theirs:
            assert is_meant(frame, newest, theirs, ours), (frame, theirs, ours)
            return
        for stream in both.ours.streams:
            assert both.ours.local_flow_control_window(stream) == both.h2.local_flow_control_window(stream)
        if ("goaway", 0) in theirs:
            return  # grpclib closes the connection
        newest = max([newest, *both.ours.streams])
