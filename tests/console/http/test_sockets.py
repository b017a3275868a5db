"""The sockets, real ones."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.console.http.serving import listening
from tests.console.http.serving import free_port


async def test_a_unix_socket_is_for_root_and_its_group_and_goes_with_us(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    async with listening(f"unix:{path}"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert os.listdir(tmp_path) == ["http.sock"]  # noqa: PTH208
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert not path.exists()


async def test_a_socket_of_another_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    async with listening(f"unix:{path}"):
        async with listening(f"unix:{path}"):  # a newer agent's
            theirs = path.stat().st_ino
            assert theirs
        path.touch()
    assert path.exists()


async def test_it_is_removed_while_no_other_can_have_its_inode_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[int] = []
    async with listening(f"unix:{tmp_path}/http.sock") as sockets:
        monkeypatch.setattr(os.path, "samestat", lambda *_: files.append(sockets[0].fileno()))
    assert files
    assert -1 not in files, "it is still open"


async def test_tcp_listens_at_every_address_of_the_host() -> None:
    port = free_port()
    async with listening(f"localhost:{port}") as sockets:
        assert {sock.getsockname()[0] for sock in sockets} <= {"127.0.0.1", "::1"}
        with socket.create_connection(("127.0.0.1", port), 1):
            pass
    async with listening(f"localhost:{port}"):  # at once again
        pass


async def test_ipv6_has_brackets_and_any_address_is_both_kinds() -> None:
    port = free_port()
    async with listening(f"[::]:{port}"):
        for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as client:
                client.connect((host, port))
    async with listening(f"[::1]:{port}"), listening(f"127.0.0.1:{port}"):
        pass


async def test_where_somebody_listens_already_the_sentence_says_where() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127\.0\.0\.1 port {port}: Address already in use"):
            async with listening(f"127.0.0.1:{port}"):
                pass


async def test_a_host_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # a machine without DNS takes its time to say so
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:9440: "):
        async with listening("no.such.host.invalid:9440"):
            pass


async def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no/http\.sock"):
        async with listening(f"unix:{tmp_path}/no/http.sock"):
            pass


async def test_a_client_that_sends_nothing_is_not_even_accepted_and_one_that_asks_is() -> None:
    port = free_port()
    async with listening(f"127.0.0.1:{port}") as (sock,):
        with ExitStack() as clients:
            for _ in range(200):
                clients.enter_context(socket.create_connection(("127.0.0.1", port), 1))
            asking = clients.enter_context(socket.create_connection(("127.0.0.1", port), 1))
            asking.sendall(b"GET")
            accepted, _ = sock.accept()
            with accepted:
                assert accepted.getpeername() == asking.getsockname()


async def test_an_agent_goes_on_at_the_sockets_of_the_one_before_and_closes_those_of_other_addresses() -> None:
    port, other = free_port(), free_port()
    async with listening(f"127.0.0.1:{port}") as (before,), listening(f"127.0.0.1:{other}") as (unused,):
        given = [before.dup(), unused.dup()]
        async with listening(f"127.0.0.1:{port}", given) as (sock,):
            assert sock is given[0]
            before.close()
            with socket.create_connection(("127.0.0.1", port), 1):
                pass
    assert {one.fileno() for one in given} == {-1}
