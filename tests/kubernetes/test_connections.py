from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

from agent.kubernetes import client
from agent.kubernetes.api import ApiError
from agent.kubernetes.client import IDLE, MOST, ApiClient
from agent.kubernetes.identity import Identity
from agent.runtime.problems import Problems
from agent.runtime.workers import Workers
from tests.wait import block_until, limit, pass_time, settled, until

PATH = "/api/v1/nodes/n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

Served = Callable[["Peer", str], Coroutine[Any, Any, None]]


class Peer:
    """A connection as the server has it."""

    def __init__(self, server: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.server, self.reader, self.writer = server, reader, writer
        self.requests = 0

    def say(self, data: bytes) -> None:
        self.writer.write(data)


class Server:
    """Speaks as a test has it speak."""

    def __init__(self, answer: Served) -> None:
        self.answer = answer
        self.url = ""
        self.peers: list[Peer] = []
        self.open: set[Peer] = set()
        self.requests: list[str] = []
        self.reads = 0

    @asynccontextmanager
    async def asked(self) -> AsyncIterator[ApiClient]:
        """A client of it."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        workers = Workers("kubernetes", limit=2)

        def read() -> Identity:
            self.reads += 1
            return Identity(self.url, token="t")

        api = ApiClient(read, workers, Problems().trouble("kubernetes", "away", "kubernetes-away"))
        try:
            yield api
        finally:
            await api.close()
            server.close()
            for it in self.open:
                it.writer.transport.abort()
            workers.close()
            await until(lambda: not self.open)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(self, reader, writer)
        self.peers.append(peer)
        self.open.add(peer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                line = head.split(b"\r\n")[0].decode()
                self.requests.append(line.removesuffix(" HTTP/1.1"))
                peer.requests += 1
                await self.answer(peer, line)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open.discard(peer)
            writer.close()


async def at_once(peer: Peer, _: str) -> None:
    peer.say(OK)


async def test_requests_one_after_the_other_have_one_connection_which_is_closed_when_nothing_is_asked_any_more() -> (
    None
):
    server = Server(at_once)
    async with server.asked() as api:
        for _ in range(5):
            assert await api.call("GET", PATH) == b"{}"
        assert len(server.peers) == 1
        pass_time(IDLE)
        async with limit("the connection ends"):
            await until(lambda: not server.open)
        assert await api.call("GET", PATH) == b"{}"
        assert len(server.peers) == 2


async def test_requests_at_once_have_a_few_connections_and_the_credentials_are_read_once_for_all() -> None:
    go = asyncio.Event()

    async def answer(peer: Peer, _: str) -> None:
        await go.wait()
        peer.say(OK)

    server = Server(answer)
    async with server.asked() as api:
        calls = [asyncio.ensure_future(api.call("GET", f"{PATH}{n}")) for n in range(64)]
        await until(lambda: len(server.requests) == MOST)
        go.set()
        async with limit("all answers"):
            assert await asyncio.gather(*calls) == [b"{}"] * 64
        assert (len(server.peers), len(server.requests), server.reads) == (MOST, 64, 1)
        pass_time(IDLE)
        await until(lambda: not server.open)


async def test_a_watch_keeps_no_request_waiting() -> None:
    async def answer(peer: Peer, line: str) -> None:
        if "watch" in line:
            peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{}\n\r\n")
        else:
            peer.say(OK)

    server, lines = Server(answer), list[bytes]()
    async with server.asked() as api:
        watches = [
            asyncio.ensure_future(api.watch(f"{PATH}?watch={n}", "application/json", lines.append)) for n in range(MOST)
        ]
        await until(lambda: lines == [b"{}"] * MOST)
        assert await api.call("GET", PATH) == b"{}"
        for it in watches:
            it.cancel()
        await until(lambda: len(server.open) == 1)


async def test_a_request_that_meets_the_end_of_an_idle_connection_is_sent_once_more_where_that_does_no_harm() -> None:
    async def answer(peer: Peer, _: str) -> None:
        if peer.requests == 2:  # the server closed it as idle at that moment
            peer.writer.transport.abort()
        else:
            peer.say(OK)

    server = Server(answer)
    async with server.asked() as api:
        await api.call("GET", PATH)
        assert await api.call("GET", PATH) == b"{}"
        assert server.requests == [f"GET {PATH}"] * 3
        with pytest.raises(ApiError) as error:
            await api.call("POST", PATH, {})
        assert error.value.status == 0
        assert server.requests[3:] == [f"POST {PATH}"]


async def test_what_a_server_says_unasked_is_the_answer_to_nothing() -> None:
    server = Server(at_once)
    async with server.asked() as api:
        await api.call("GET", PATH)
        server.peers[0].say(b'HTTP/1.1 408 Request Timeout\r\nContent-Length: 5\r\n\r\n{"a":')
        await until(lambda: not server.open)
        assert await api.call("GET", PATH) == b"{}"


async def test_two_answers_to_one_request_do_not_answer_the_next() -> None:
    async def answer(peer: Peer, _: str) -> None:
        peer.say(OK + b'HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n{"other":true}')

    server = Server(answer)
    async with server.asked() as api:
        for _ in range(3):
            assert await api.call("GET", PATH) == b"{}"


MUCH = b"x" * (1 << 20)
MISBEHAVIOUR = {
    "no HTTP": b"220 mail.example.com ESMTP\r\n\r\n",
    "TLS where none is due": b"\x15\x03\x01\x00\x02\x02\x46",
    "a head without an end": b"HTTP/1.1 200 OK\r\nX: " + MUCH,
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100_000,
    "a body that breaks off": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}",
    "a chunk that breaks off": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{}",
    "a chunk of no length": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\n{}",
    "too much": b"HTTP/1.1 200 OK\r\n\r\n" + MUCH * 9,
    "too much of a refusal": b"HTTP/1.1 403 No\r\n\r\n" + MUCH * 9,
    "too much, byte by byte": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n{\r\n" * 1000,
    "nothing but 1xx": b"HTTP/1.1 102 Processing\r\n\r\n" * 10_000,
    "another protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\n\r\n",
    "nothing": b"",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "another place": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n",
    "compressed": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08",
}


@pytest.mark.parametrize("said", MISBEHAVIOUR.values(), ids=MISBEHAVIOUR)
async def test_a_server_that_does_not_speak_as_it_should_is_an_error_with_a_sentence_and_the_next_call_is_as_ever(
    said: bytes,
) -> None:
    async def answer(peer: Peer, _: str) -> None:
        if len(server.requests) == 1:
            peer.say(said)
            peer.writer.close()
        else:
            peer.say(OK)

    server = Server(answer)
    async with server.asked() as api:
        async with limit("an error"):
            with pytest.raises(ApiError, match=r"\w{3}") as error:
                await api.call("GET", PATH)
        assert len(error.value.sentence) < 600
        assert await api.call("GET", PATH) == b"{}"


@pytest.mark.parametrize("status", [200, 403])
async def test_an_answer_that_is_too_long_is_an_answer_so_that_the_part_that_asked_tells_of_it(status: int) -> None:
    async def answer(peer: Peer, _: str) -> None:
        peer.say(b"HTTP/1.1 %d It\r\n\r\n" % status + MUCH * 9)
        peer.writer.close()

    server = Server(answer)
    async with server.asked() as api, limit("errors"):
        with pytest.raises(ApiError, match="more than 8388608 bytes") as of_call:
            await api.call("GET", PATH)
        with pytest.raises(ApiError, match="more than 8388608 bytes") as of_watch:
            await api.watch(PATH, "application/json", lambda _: None)
    assert (of_call.value.status, of_watch.value.status) == (status, status), "0 would mean that nobody answers"


async def test_answers_without_a_length_and_in_http_1_0_are_read_to_the_end_of_the_connection() -> None:
    async def answer(peer: Peer, _: str) -> None:
        peer.say(b"HTTP/1.0 200 OK\r\n\r\n{")
        await settled()
        peer.say(b"}")
        peer.writer.close()

    server = Server(answer)
    async with server.asked() as api:
        for _ in range(2):
            assert await api.call("GET", PATH) == b"{}"
        assert len(server.peers) == 2


async def test_an_answer_of_single_bytes_lets_others_have_their_turns() -> None:
    async def answer(peer: Peer, _: str) -> None:
        peer.say(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer.say(b"1\r\n{\r\n" + b"1\r\n \r\n" * 20_000 + b"1\r\n}\r\n0\r\n\r\n")

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    server = Server(answer)
    async with server.asked() as api:
        beside = asyncio.ensure_future(others())
        assert len(await api.call("GET", PATH)) == 20_002
        beside.cancel()
    assert turns > 20_000 / client._STEP


@pytest.mark.parametrize(
    ("url", "why"),
    [
        (it, "no URL")
        for it in ("10.0.0.1:6443", "ftp://a", "https://a:99999", "http://[", "http://api..b", f"http://{'a' * 64}.b")
    ],
)
async def test_a_server_that_is_no_url_is_named_in_a_sentence(url: str, why: str) -> None:
    server = Server(at_once)
    async with server.asked() as api:
        server.url = url
        with pytest.raises(ApiError, match=why):
            await api.call("GET", PATH)


async def test_a_path_before_all_others_and_a_user_in_the_servers_url_are_understood() -> None:
    server = Server(at_once)
    async with server.asked() as api:
        server.url = server.url.replace("//", "//user:secret@") + "/k8s/clusters/c-1/"
        await api.call("GET", PATH)
        assert server.requests == [f"GET /k8s/clusters/c-1{PATH}"]


async def test_a_token_that_no_header_may_have_is_not_in_the_sentence_about_it() -> None:
    server = Server(at_once)
    async with server.asked() as api:
        api._read = lambda: Identity(server.url, token="sec\nret")
        with pytest.raises(ApiError, match="a character that no request may have") as error:
            await api.call("GET", PATH)
        assert "ret" not in error.value.sentence.replace("request", "")


def test_a_resolver_that_hangs_does_not_keep_the_agent_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the network goes before the service does, and the kubeconfig names the API server."""
    asked, gate = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        asked.set()
        gate.wait()

    async def begin() -> None:
        api = ApiClient(
            lambda: Identity("http://api.example", token="t"),
            Workers("kubernetes", limit=2),
            Problems().trouble("kubernetes", "away", "kubernetes-away"),
        )
        call = asyncio.ensure_future(api.call("GET", PATH))
        await until(asked.is_set)
        call.cancel()

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    run = threading.Thread(target=lambda: asyncio.run(begin()), daemon=True)
    run.start()
    try:
        block_until(lambda: not run.is_alive())
    finally:
        gate.set()
