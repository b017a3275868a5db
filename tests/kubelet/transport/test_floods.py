"""Whatever a client sends on a plugin's socket, other clients are answered and nothing grows without bound."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.kubelet.client import FrameCounter
from agent.kubelet.plugin import Plugin
from agent.kubelet.server import Allowance
from agent.kubelet.wire import Encoded
from agent.kubelet.witnesses import list_pods
from agent.runtime.errors import brief, brief_list, unknown
from agent.runtime.limits import MESSAGE_LIMIT
from backends.base import AllocationRefused
from tests.kubelet.plugins import SERVICE, TOY, connected, nothing, served
from tests.wait import PATIENCE, limit

PING = b"\0\0\x08\x06\0\0\0\0\0" + b"fairlead"
UNKNOWN = b"\0\0\x04\xf0\0\0\0\0\0" + b"what"
EMPTY_DATA = b"\0\0\0\x00\0\0\0\0\x01"


async def refuses(resource: str, ids: Sequence[str], told: Callable[[str], bool]) -> Encoded:
    """Names what was asked for, as every refusal does."""
    raise AllocationRefused(f"{resource} has no device {ids[0]}")


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    async with served(tmp_path / "s.sock", Plugin(TOY, nothing)):
        yield tmp_path / "s.sock"


class Raw:
    """A client that speaks HTTP/2 by hand."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.setblocking(False)
        self.sock.connect(str(path))
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()

    async def send(self, more: bytes = b"") -> None:
        async with limit("all sent"):
            await asyncio.get_running_loop().sock_sendall(self.sock, self.h2.data_to_send() + more)

    def ask(self, method: str = "GetDevicePluginOptions", *, end: bool = True) -> None:
        headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", SERVICE + method)]
        self.h2.send_headers(1, [*headers, ("te", "trailers"), ("content-type", "application/grpc")])
        if end:
            self.h2.send_data(1, bytes(5), end_stream=True)

    async def until(self, kind: type[h2.events.Event]) -> h2.events.Event:
        """The next event of this kind."""
        async with limit(kind.__name__):
            while True:
                data = await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16)
                assert data, "the server closed the connection"
                for event in self.h2.receive_data(data):
                    if isinstance(event, kind):
                        return event

    async def ends(self) -> None:
        """Read until the server breaks the connection."""
        async with limit("the connection's end"):
            try:
                while await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16):
                    pass
            except ConnectionResetError:
                pass


@contextmanager
def raw(path: Path) -> Iterator[Raw]:
    client = Raw(path)
    try:
        yield client
    finally:
        client.sock.close()


async def test_frames_of_unknown_types_are_passed_over(path: Path) -> None:
    with raw(path) as client:
        await client.send(UNKNOWN * 3)
        client.ask()
        await client.send(UNKNOWN)
        await client.until(h2.events.TrailersReceived)


async def test_frames_of_unknown_types_from_a_kubelet_are_passed_over_too(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        kubelet = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        kubelet.initiate_connection()
        answered = False
        while not answered:
            for event in kubelet.receive_data(await reader.read(1 << 16)):
                if isinstance(event, h2.events.RequestReceived):
                    kubelet.send_headers(1, [(":status", "200"), ("content-type", "application/grpc")])
                    kubelet.send_data(1, bytes(5))
                    kubelet.send_headers(1, [("grpc-status", "0")], end_stream=True)
                    answered = True
            writer.write(UNKNOWN + kubelet.data_to_send())
        await reader.read(-1)
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "k.sock")
    async with server:
        assert await list_pods(tmp_path / "k.sock", PATIENCE) == []


@pytest.mark.parametrize("frame", [PING, UNKNOWN, EMPTY_DATA], ids=["ping", "unknown", "empty data"])
async def test_a_flood_of_small_frames_ends_its_connection_and_no_other(path: Path, frame: bytes) -> None:
    with raw(path) as flooding, capture_logs() as logs:
        flooding.ask("Allocate", end=False)
        await flooding.send()
        sending = asyncio.ensure_future(flooding.send(frame * 200_000))
        async with connected(path) as other:
            assert (await other.allocate("a")).container_responses[0].envs == {"GIVEN": "a"}
        await flooding.ends()
        await asyncio.wait([sending])
        assert sending.exception() is not None, "it was cut off while it sent"
    assert [line["event"] for line in logs if line["log_level"] == "warning"] == ["connection-flooded"]
    async with connected(path) as other:
        assert (await other.allocate("b")).container_responses[0].envs == {"GIVEN": "b"}


async def test_a_request_that_is_longer_than_any_may_be_ends_with_its_stream(path: Path) -> None:
    with raw(path) as client:
        client.ask("Allocate", end=False)
        await client.send()
        reset = asyncio.ensure_future(client.until(h2.events.StreamReset))
        part, sent = bytes([0, 0x7F, 255, 255, 255]) + bytes(11), 0
        while not reset.done() and sent <= MESSAGE_LIMIT + (1 << 16):
            window = min(client.h2.local_flow_control_window(1), 1 << 14)
            if window:
                client.h2.send_data(1, part.ljust(window, b"\0"))
                sent += window
                part = b""
                await client.send()
            await asyncio.sleep(0)
        event = await reset
        assert isinstance(event, h2.events.StreamReset)
        assert event.error_code == h2.errors.ErrorCodes.ENHANCE_YOUR_CALM
        assert sent <= MESSAGE_LIMIT + (1 << 17)


async def test_a_megabyte_of_id_gets_a_refusal_that_fits_into_a_header(tmp_path: Path) -> None:
    async with served(tmp_path / "s", Plugin(TOY, refuses)), connected(tmp_path / "s") as client:
        with capture_logs() as logs, pytest.raises(GRPCError) as refused:
            await client.allocate("x" * (1 << 20))
    assert refused.value.status is Status.FAILED_PRECONDITION
    assert refused.value.message is not None
    assert refused.value.message.startswith(f"{TOY} has no device xxx")
    assert len(refused.value.message) < 2100
    (line,) = (line for line in logs if line["event"] == "allocation-refused")
    assert len(line["ids"][0]) < 500


async def test_a_large_request_of_a_kubelet_is_answered(path: Path) -> None:
    ids = [f"{n:060}" for n in range(20_000)]
    async with connected(path) as client:
        assert (await client.allocate(*ids)).container_responses[0].envs == {"GIVEN": ",".join(ids)}


def test_no_sentence_repeats_more_of_a_name_than_anybody_reads() -> None:
    assert brief("x" * 400) == "x" * 400
    assert brief("x" * 401) == "x" * 400 + "... (401 characters)"
    assert brief_list(["a"] * 20) == ["a"] * 20
    assert brief_list(["a"] * 22) == ["a"] * 20 + ["and 2 more"]
    assert len(unknown("device", "x" * (1 << 20), [f"{'x' * 300}{n}" for n in range(10)])) < 1000


@given(st.lists(st.binary(max_size=40), max_size=30), st.integers(1, 50))
def test_frames_are_counted_wherever_reads_cut_them(payloads: list[bytes], step: int) -> None:
    data = b"".join(len(it).to_bytes(3, "big") + bytes(6) + it for it in payloads)
    counter = FrameCounter()
    assert sum(counter.count(data[at : at + step]) for at in range(0, len(data), step)) == len(payloads)


def test_what_a_client_may_send_grows_with_time_and_with_what_it_is_sent() -> None:
    now = 0.0
    allowance = Allowance(lambda: now)
    assert allowance.take(10_000, sent=0)
    assert not allowance.take(1, sent=0)
    now = 1.0
    assert allowance.take(999, sent=0)
    assert not allowance.take(1, sent=0)
    now = 3600.0
    assert allowance.take(10_000, sent=0)
    assert not allowance.take(1, sent=0)
    assert allowance.take(10_000, sent=10 << 20)
    now = 7200.0
    assert allowance.take(1, sent=10 << 20)
