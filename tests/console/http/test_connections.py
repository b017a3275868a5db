"""Clients that stall, send garbage or come by the thousand, on real sockets: they cost their own connection."""

from __future__ import annotations

import asyncio
import select
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import anyio
import pytest

from agent.console.http import connections, viewers
from tests.console.fakes import FakeDaemon
from tests.console.http import nodes
from tests.console.http.serving import Answer, Served, free_port, served

_SOON = 0.05  # seconds, for what takes 5 or 10 in earnest


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, FakeDaemon(shown=nodes.busy(), events=list(nodes.EVENTS))) as it:
        yield it


async def _is_cut(reader: asyncio.StreamReader) -> bool:
    with anyio.fail_after(20), suppress(ConnectionError):
        await reader.read(-1)
    return True


async def test_who_connects_and_says_nothing_is_cut_off(face: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_WITHIN", _SOON)
    reader, _ = await face.connect()
    assert await _is_cut(reader)


async def test_a_request_that_trickles_in_has_no_more_time_than_one_that_does_not(
    face: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "REQUEST_WITHIN", 0.2)
    reader, writer = await face.connect()
    began = time.monotonic()
    with suppress(ConnectionError):
        for byte in b"GET / HTTP/1.1\r\nX: " + b"x" * 1000:
            writer.write(bytes((byte,)))
            await writer.drain()
            await anyio.sleep(0.01)
    assert await _is_cut(reader)
    assert time.monotonic() - began < 8  # it would be 10, and more on a busy machine


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"x" * 100_000,
        b"GET /" + b"x" * 100_000,
    ],
)
async def test_garbage_is_refused_and_makes_no_noise(
    face: Served, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    said = b""
    with suppress(ConnectionError):
        said = await face.say(garbage)
    assert not said or said.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 404 "))
    assert caplog.records == []
    assert (await face.get("/healthz")).status == 200


async def test_a_body_that_nobody_wants_is_not_read(face: Served) -> None:
    head = b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n"
    reader, writer = await face.connect()
    writer.write(head + b"x" * 1000)
    assert (await reader.readline()).startswith(b"HTTP/1.1 405 ")
    assert await _is_cut(reader)


async def test_a_connection_carries_one_request(face: Served) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n"
    assert (await face.say(one * 50)).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", ["/status.json", "/events", "/"])
async def test_who_does_not_read_the_answer_is_cut_off(
    face: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_WITHIN", _SOON)
    face.daemon.shown = nodes.many(3000)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as stalled:
        stalled.connect(str(face.path))
        stalled.sendall(f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
        with anyio.fail_after(20):
            while not _is_hung_up(stalled):
                await anyio.sleep(0.01)
    assert (await face.get("/healthz")).status == 200


def _is_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


async def test_a_thousand_idle_connections_keep_nobody_out(tmp_path: Path) -> None:
    async with served(tmp_path, FakeDaemon(), port=free_port()) as face:
        with ExitStack() as idle:
            for _ in range(1000):
                sock = idle.enter_context(closing(socket.socket()))
                sock.setblocking(False)
                sock.connect_ex(("127.0.0.1", face.port))
                await anyio.sleep(0)
            assert (await face.get("/healthz")).status == 200


async def test_who_came_first_and_asked_nothing_makes_room(face: Served) -> None:
    first = await face.connect()
    others = [await face.connect() for _ in range(connections.MOST)]
    assert await _is_cut(first[0])
    others[-1][1].write(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
    assert (await others[-1][0].readline()).startswith(b"HTTP/1.1 200 ")


async def _open_page(face: Served) -> asyncio.StreamWriter:
    """It asks as soon as it has connected: if the last of many waited for all others, its time might be up."""
    reader, writer = await face.connect()
    writer.write(b"GET /events HTTP/1.1\r\nHost: a\r\n\r\n")
    await reader.readuntil(b"event: hello\n")
    return writer


async def test_pages_leave_room_for_scrapes(face: Served) -> None:
    for _ in range(viewers.MOST):
        await _open_page(face)
    assert (await face.get("/events")).status == 503
    assert (await face.get("/metrics")).status == 200


async def test_where_all_are_busy_the_next_is_told_so(face: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "MOST", 1000)
    monkeypatch.setattr(connections, "STALLED_AFTER", 60)
    pages = [await _open_page(face) for _ in range(connections.MOST)]
    reader, _ = await face.connect()  # who is turned away may be told so before it has asked anything
    answer = Answer.parse(await asyncio.wait_for(reader.read(-1), 20))
    assert (answer.status, answer.body) == (503, "Fairlead has too many clients\n")
    pages.pop().close()
    status = 0
    with anyio.fail_after(20):
        while status != 200:
            with suppress(OSError):  # it was turned away while it asked
                status = (await face.get("/healthz")).status
            await anyio.sleep(0.01)


async def test_who_hammers_does_not_hold_up_the_loop(face: Served) -> None:
    """Each connection's work is small, and they are let in one by one: others have their turn in between."""
    face.daemon.shown = nodes.many(1000)
    turns: list[float] = []

    async def turn() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            turns.append(time.thread_time() - began)

    async def hammer(path: str) -> None:
        for _ in range(10):
            with suppress(ConnectionError, asyncio.IncompleteReadError):
                await face.get(path)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn)
        async with anyio.create_task_group() as hammering:
            for path in ("/metrics", "/", "/status.json", "/readyz", "/healthz") * 4:
                hammering.start_soon(hammer, path)
        tasks.cancel_scope.cancel()
    assert sorted(turns)[len(turns) * 99 // 100] < 0.02  # of CPU; this test's own clients are in it
