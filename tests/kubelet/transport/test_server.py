from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partialmethod
from pathlib import Path
from typing import Any

import grpclib
import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from grpclib.client import Channel, UnaryUnaryMethod
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import StreamTerminatedError

from agent.kubelet.api.v1beta1 import Empty, PreStartContainerRequest
from agent.kubelet.server import SocketServer, listen
from agent.kubelet.wire import Codec, Encoded
from tests.wait import at_once, limit, pass_time, settled, until

Stream = grpclib.server.Stream[Any, Any]
Message = PreStartContainerRequest  # any message with bytes in it
PATIENCE = 60.0  # seconds, of which none passes but by a test


class Service:
    """Calls that last until they are let go."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.let_go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.asked = 0

    async def watch(self, stream: Stream) -> None:
        await stream.recv_message()
        await stream.send_message(Message(["now"]))
        self.started.set()
        await self._wait()

    async def call(self, stream: Stream) -> None:
        await stream.recv_message()
        self.asked += 1
        self.started.set()
        await self._wait()
        await stream.send_message(Message(["done"]))

    async def flood(self, stream: Stream) -> None:
        await stream.recv_message()
        while True:
            await stream.send_message(Encoded(b"\x0a\x80\x80\x08" + bytes(1 << 17)))

    async def _wait(self) -> None:
        try:
            await self.let_go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def __mapping__(self) -> dict[str, Handler]:
        return {
            "/t/Watch": Handler(self.watch, Cardinality.UNARY_STREAM, Empty, Message),
            "/t/Flood": Handler(self.flood, Cardinality.UNARY_STREAM, Empty, Message),
            "/t/Call": Handler(self.call, Cardinality.UNARY_UNARY, Empty, Message),
        }


@pytest.fixture(autouse=True, params=[False, True], ids=["by grpclib", "directly"])
def directly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these servers answers unary calls in one of the two ways."""
    monkeypatch.setattr(SocketServer, "__init__", partialmethod(SocketServer.__init__, directly=request.param))


@asynccontextmanager
async def serving(path: Path) -> AsyncIterator[tuple[Service, SocketServer]]:
    service = Service()
    server = SocketServer([service], path)
    await server.open()
    try:
        yield service, server
    finally:
        service.let_go.set()
        await server.shut_down()


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[Channel]:
    channel = Channel(path=str(path), codec=Codec())
    try:
        yield channel
    finally:
        channel.close()
        await asyncio.sleep(0)


class RawClient:
    """Speaks HTTP/2 by hand, to see each frame in its order, or to read none."""

    def __init__(self, path: Path) -> None:
        self.events: list[h2.events.Event] = []
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.setblocking(False)
        self.sock.connect(str(path))
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1 << 30})
        self.h2.increment_flow_control_window(1 << 30)

    async def ask(self, method: str) -> None:
        headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x"), (":path", method)]
        self.h2.send_headers(1, [*headers, ("te", "trailers"), ("content-type", "application/grpc")])
        self.h2.send_data(1, bytes(5), end_stream=True)  # an empty message
        await asyncio.get_running_loop().sock_sendall(self.sock, self.h2.data_to_send())

    async def read_to_the_end(self) -> None:
        """Until the server closes the connection.

        Raises:
            ConnectionResetError: it broke it.
        """
        while data := await asyncio.get_running_loop().sock_recv(self.sock, 1 << 16):
            self.events += self.h2.receive_data(data)

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sock.close()


def call(channel: Channel) -> asyncio.Task[Any]:
    return asyncio.ensure_future(UnaryUnaryMethod[Any, Any](channel, "/t/Call", Empty, Message)(Empty()))


async def soon(what: Any) -> Any:
    async with limit():
        return await what


class TestShutDown:
    async def test_streams_that_return_end_with_trailers_and_the_connection_with_goaway(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server):
            with RawClient(tmp_path / "s") as client:
                await client.ask("/t/Watch")
                await soon(service.started.wait())
                service.let_go.set()
                _, ended = await soon(asyncio.gather(client.read_to_the_end(), server.shut_down()))
                assert ended
                *_, data, trailers, stream_ended, goaway = client.events
                assert isinstance(data, h2.events.DataReceived)
                assert isinstance(trailers, h2.events.TrailersReceived)
                headers: Any = trailers.headers  # h2 does not know that they are decoded
                assert dict(headers) == {"grpc-status": "0"}
                assert isinstance(stream_ended, h2.events.StreamEnded)
                assert isinstance(goaway, h2.events.ConnectionTerminated)
                assert goaway.error_code == h2.errors.ErrorCodes.NO_ERROR

    async def test_a_call_in_flight_is_answered(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            calling = call(channel)
            await soon(service.started.wait())
            ending = asyncio.ensure_future(server.shut_down())
            await asyncio.sleep(0)
            service.let_go.set()
            assert await soon(calling) == Message(["done"])
            assert await soon(ending)

    async def test_a_late_call_is_cancelled_and_said_to_be_late(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            calling = call(channel)
            await soon(service.started.wait())
            assert not await at_once(server.shut_down(PATIENCE))
            assert service.cancelled.is_set()
            with pytest.raises(StreamTerminatedError):
                await soon(calling)

    async def test_a_client_that_never_reads_does_not_hold_it_up(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (_, server):
            with RawClient(tmp_path / "s") as client:
                await client.ask("/t/Flood")
                await until(lambda: any(not c.connection.write_ready.is_set() for c in server._connections))
                assert not await at_once(server.shut_down(PATIENCE))
                assert await server.wait_disconnected(0)

    async def test_an_idle_connection_is_closed(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            service.let_go.set()
            await soon(call(channel))
            assert await soon(server.shut_down())
            assert not channel._connected

    async def test_nobody_can_connect_any_more_and_the_socket_is_gone(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (_, server):
            assert await server.shut_down()
            assert list(tmp_path.iterdir()) == []
            assert not server.is_reachable()
            with pytest.raises(FileNotFoundError):
                await asyncio.open_unix_connection(tmp_path / "s")

    @pytest.mark.parametrize("turns", range(4))
    async def test_a_connection_made_while_it_ends_is_not_served(self, tmp_path: Path, turns: int) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            first = call(channel)
            await soon(service.started.wait())
            with RawClient(tmp_path / "s") as late:
                for _ in range(turns):  # from waiting in the backlog to being accepted
                    await asyncio.sleep(0)
                ending = asyncio.ensure_future(server.shut_down())
                await asyncio.sleep(0)
                service.let_go.set()
                await soon(first)
                assert await soon(ending)
                assert await server.wait_disconnected(0)
                with suppress(ConnectionResetError):
                    await soon(late.read_to_the_end())

    async def test_cancelling_it_leaves_no_connection(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            calling = call(channel)
            await soon(service.started.wait())
            ending = asyncio.ensure_future(server.shut_down(60))
            await settled()
            assert not ending.done()
            ending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await soon(ending)
            with pytest.raises(StreamTerminatedError):
                await soon(calling)
            assert await server.wait_disconnected(PATIENCE)

    async def test_twice_is_as_once_and_it_can_be_opened_again(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server):
            service.let_go.set()
            assert await server.shut_down()
            assert await server.shut_down()
            await server.open()
            async with connected(tmp_path / "s") as channel:
                assert await soon(call(channel)) == Message(["done"])


class TestDisconnecting:
    async def test_it_waits_until_the_client_has_closed_its_connection(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            service.let_go.set()
            await soon(call(channel))
            assert not await at_once(server.wait_disconnected(PATIENCE))
            waiting = asyncio.ensure_future(server.wait_disconnected(PATIENCE))
            await settled()
            assert not waiting.done()
            channel.close()
            assert await soon(waiting)

    async def test_without_connections_it_does_not_wait(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (_, server):
            assert await soon(server.wait_disconnected(60))

    async def test_a_client_that_went_while_this_process_stood_still_has_gone_in_time(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (service, server), connected(tmp_path / "s") as channel:
            service.let_go.set()
            await soon(call(channel))
            waiting = asyncio.ensure_future(server.wait_disconnected(5))
            await asyncio.sleep(0)
            server.reset_connections()
            pass_time(5)
            assert await soon(waiting)

    async def test_resetting_ends_every_connection_at_once(self, tmp_path: Path) -> None:
        async with (
            serving(tmp_path / "s") as (service, server),
            connected(tmp_path / "s") as one,
            connected(tmp_path / "s") as other,
        ):
            calls = [call(one), call(other)]
            await until(lambda: service.asked == 2)
            server.reset_connections()
            assert await soon(server.wait_disconnected())
            for calling in calls:
                with pytest.raises(StreamTerminatedError):
                    await soon(calling)
            service.let_go.set()
            async with connected(tmp_path / "s") as again:
                assert await soon(call(again)) == Message(["done"])


class TestSocket:
    async def test_only_its_owner_may_connect(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s"):
            found = (tmp_path / "s").lstat()
            assert stat.S_ISSOCK(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o600

    async def test_another_socket_renamed_over_ours_stays(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (_, server):
            assert server.is_reachable()
            with socket.socket(socket.AF_UNIX) as theirs:
                theirs.bind(str(tmp_path / "s.new"))
            (tmp_path / "s.new").rename(tmp_path / "s")
            inode = (tmp_path / "s").lstat().st_ino
            assert not server.is_reachable()
            await server.shut_down()
            assert (tmp_path / "s").lstat().st_ino == inode

    async def test_a_second_server_takes_the_name_over_and_the_first_leaves_it(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (one, first), connected(tmp_path / "s") as old:
            one.let_go.set()
            await soon(call(old))
            async with serving(tmp_path / "s") as (other, second):
                assert second.is_reachable()
                assert not first.is_reachable()
                await first.shut_down()
                assert second.is_reachable()
                other.let_go.set()
                async with connected(tmp_path / "s") as channel:
                    await soon(call(channel))
                assert (one.asked, other.asked) == (1, 1)

    async def test_a_wiped_socket_is_noticed(self, tmp_path: Path) -> None:
        async with serving(tmp_path / "s") as (_, server):
            (tmp_path / "s").unlink()
            assert not server.is_reachable()
            (tmp_path / "s").touch()
            assert not server.is_reachable()

    async def test_it_takes_the_place_of_a_dead_one(self, tmp_path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "s"))
        async with serving(tmp_path / "s") as (service, _), connected(tmp_path / "s") as channel:
            service.let_go.set()
            await soon(call(channel))

    def test_the_longest_path_works_and_a_longer_one_leaves_nothing(self, tmp_path: Path) -> None:
        directory = tmp_path / ("d" * (107 - len(os.fsencode(tmp_path)) - 1 - 1 - 6))
        directory.mkdir()
        with listen(directory / "x.sock") as sock:
            assert len(os.fsencode(sock.getsockname())) <= 107
            assert [entry.name for entry in directory.iterdir()] == ["x.sock"]
        (directory / "x.sock").unlink()
        with pytest.raises(OSError, match="107 bytes") as raised:
            listen(directory / "xx.sock")
        assert raised.value.errno == errno.ENAMETOOLONG
        assert list(directory.iterdir()) == []

    def test_a_missing_directory_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=f"{tmp_path}/gone/s"):
            listen(tmp_path / "gone" / "s")

    def test_what_cannot_be_put_in_place_leaves_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "s").mkdir()
        with pytest.raises(IsADirectoryError):
            listen(tmp_path / "s")
        assert [entry.name for entry in tmp_path.iterdir()] == ["s"]

    def test_sockets_with_long_and_similar_names_do_not_meet(self, tmp_path: Path) -> None:
        names = [f"a-resource-with-a-very-long-name-{n}.sock" for n in range(20)]
        socks = [listen(tmp_path / name) for name in names]
        assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(names)
        for sock in socks:
            sock.close()

    async def test_a_failed_start_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        async def fail(*args: object, **kwargs: object) -> None:
            raise OSError(errno.EMFILE, "no")

        server = SocketServer([Service()], tmp_path / "s")
        monkeypatch.setattr(asyncio.get_running_loop(), "create_server", fail)
        with pytest.raises(OSError, match="no"):
            await server.open()
        assert list(tmp_path.iterdir()) == []


async def test_a_malformed_request_ends_its_call_and_not_the_server(tmp_path: Path) -> None:
    async with serving(tmp_path / "s") as (service, _), connected(tmp_path / "s") as channel:
        service.let_go.set()
        garbage = UnaryUnaryMethod[Any, Any](channel, "/t/Call", Empty, Message)
        with pytest.raises(grpclib.GRPCError) as raised:
            await soon(garbage(Encoded(b"\x0a\xff")))
        assert raised.value.status is Status.UNKNOWN
        assert await soon(call(channel)) == Message(["done"])


async def test_a_server_cancelled_while_it_starts_leaves_nothing_in_the_event_loop(tmp_path: Path) -> None:
    for turns in range(6):
        server = SocketServer([Service()], tmp_path / "cancelled")
        opening = asyncio.ensure_future(server.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        await asyncio.wait([opening])
        await server.shut_down(0)
        assert list(tmp_path.iterdir()) == []
        async with serving(tmp_path / "s") as (service, _), connected(tmp_path / "s") as channel:  # the same descriptor
            service.let_go.set()
            assert await soon(call(channel)) == Message(["done"])
