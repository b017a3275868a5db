"""Clients that stall, send garbage or come by the thousand, on real sockets: they cost their own connection."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import anyio
import pytest

from agent.console.http import app, serving
from agent.runtime import workers
from tests.console.fakes import FakeDaemon
from tests.console.http import nodes
from tests.console.http.serving import Answer, Served, free_port, served
from tests.wait import limit, pass_time, settled, until


@pytest.fixture
async def face(tmp_path: Path) -> AsyncIterator[Served]:
    async with served(tmp_path, FakeDaemon(shown=nodes.busy(), events=list(nodes.EVENTS))) as it:
        yield it


async def _is_cut(reader: asyncio.StreamReader) -> bool:
    async with limit("it is cut off"):
        with suppress(ConnectionError):
            await reader.read(-1)
    return True


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nX: x"], ids=["nothing", "a byte each hour"])
async def test_a_request_has_its_time_whether_nothing_comes_or_it_trickles_in(
    face: Served, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "REQUEST_WITHIN", 60 * 3600.0)
    reader, writer = await face.connect()
    await settled()
    for hour in range(59):
        writer.write(said[hour : hour + 1])
        await settled()
        pass_time(3600.0)
    await settled()
    assert not reader.at_eof()
    writer.write(said[59:])
    pass_time(3600.0)
    assert await _is_cut(reader)


async def test_where_half_of_the_places_are_taken_a_silent_client_has_a_second(face: Served) -> None:
    early = [await face.connect() for _ in range(serving.MOST // 2)]
    late, _ = await face.connect()
    await settled()
    pass_time(serving.HURRIED_WITHIN)
    assert await _is_cut(late)
    assert not any(reader.at_eof() for reader, _ in early)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\r\n\r\n",  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
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
    head = b"POST /metrics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000\r\n\r\n"
    reader, writer = await face.connect()
    writer.write(head + b"x" * 1000)
    assert (await reader.readline()).startswith(b"HTTP/1.1 405 ")
    assert await _is_cut(reader)


async def test_a_connection_carries_one_request(face: Served) -> None:
    one = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    assert (await face.say(one * 50)).count(b"HTTP/1.1 ") == 1


@pytest.mark.parametrize("path", ["/status.json", "/events", "/"])
async def test_who_does_not_read_the_answer_is_cut_off(
    face: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "READ_WITHIN", 0.0)
    face.daemon.shown = nodes.many(1000)
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as stalled:
        stalled.connect(str(face.path))
        stalled.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        await until(lambda: _is_hung_up(stalled), "it is cut off")
    assert (await face.get("/healthz")).status == 200


def _is_hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, 0)
    return any(event & select.POLLHUP for _, event in poll.poll(0))


async def test_a_thousand_idle_connections_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_PACE", 0.0)
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
    others = [await face.connect() for _ in range(serving.MOST)]
    assert await _is_cut(first[0])
    others[-1][1].write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (await others[-1][0].readline()).startswith(b"HTTP/1.1 200 ")


async def _open_page(face: Served) -> asyncio.StreamWriter:
    """It asks as soon as it has connected: if the last of many waited for all others, its time might be up."""
    reader, writer = await face.connect()
    writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"event: hello\n")
    return writer


async def test_pages_leave_room_for_scrapes(face: Served) -> None:
    for _ in range(app.MOST_VIEWERS):
        await _open_page(face)
    assert (await face.get("/events")).status == 503
    assert (await face.get("/metrics")).status == 200


async def test_where_all_are_busy_the_next_is_told_so(face: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MOST_VIEWERS", 1000)
    monkeypatch.setattr(serving, "STALLED_AFTER", 3600.0)
    pages = [await _open_page(face) for _ in range(serving.MOST)]
    reader, _ = await face.connect()  # who is turned away may be told so before it has asked anything
    async with limit("it is told so"):
        answer = Answer.parse(await reader.read(-1))
    assert (answer.status, answer.body) == (503, "Fairlead has too many clients\n")
    pages.pop().close()
    status = 0
    async with limit("there is room again", lambda: status):
        while status != 200:
            with suppress(OSError):  # it was turned away while it asked
                status = (await face.get("/healthz")).status


async def test_who_hammers_is_let_in_at_a_pace(face: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many wait, others have their turn between any two of them."""
    monkeypatch.setattr(serving, "_PACE", 2 * 3600.0)
    monkeypatch.setattr(serving, "REQUEST_WITHIN", 24 * 3600.0)
    begin, made = serving.Connection.connection_made, 0

    def count(self: serving.Connection, transport: asyncio.Transport) -> None:
        nonlocal made
        made += 1
        begin(self, transport)

    monkeypatch.setattr(serving.Connection, "connection_made", count)
    for _ in range(5):
        await face.connect()
    for number in range(1, 5):
        await settled()
        assert made == number
        pass_time(3600.0)
        await settled()
        assert made == number
        pass_time(3600.0)


@pytest.mark.parametrize(("path", "pieces"), [("/metrics", 3), ("/", 6)])
async def test_others_have_their_turn_while_a_long_answer_is_made(
    face: Served, path: str, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SLICE", 0.0)
    face.daemon.shown, turns = nodes.many(1000), 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(turn)
        assert (await face.get(path)).status == 200
        tasks.cancel_scope.cancel()
    assert turns > 1000 * pieces, "one for each piece of what is said of each device"
