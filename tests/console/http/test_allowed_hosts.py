"""Over TCP only this node's own names are answered: a page in a browser cannot read us under a name of its own."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from agent.console.http.serving import Hosts, own_names
from tests.console.fakes import FakeDaemon
from tests.console.http.serving import Answer, Served, free_port, served


async def ask(face: Served, head: str) -> Answer:
    return Answer.parse(await face.say(f"GET /status.json HTTP/1.1\r\n{head}\r\n\r\n".encode()))


async def test_a_name_of_a_strangers_is_refused_over_tcp(tmp_path: Path) -> None:
    async with served(tmp_path, FakeDaemon(), free_port()) as face:
        for name in (f"127.0.0.1:{face.port}", "localhost", f"LOCALHOST:{face.port}", "[::1]", "10.1.2.3:9440"):
            assert (await ask(face, f"Host: {name}")).status == 200
        assert (await ask(face, f"Host: {socket.gethostname()}:9440")).status == 200
        for name in (
            "evil.example",
            f"evil.example:{face.port}",
            "127.0.0.1.evil.example",
            "localhost.evil.example",
            "",
        ):
            answer = await ask(face, f"Host: {name}")
            assert answer.status == 421
            assert "resources" not in answer.body
        assert "hosts in [http]" in answer.body


async def test_over_a_unix_socket_any_name_does(tmp_path: Path) -> None:
    async with served(tmp_path, FakeDaemon()) as face:
        assert (await ask(face, "Host: whatever")).status == 200


@pytest.mark.parametrize(
    "name", ["node-1", "node-1:9440", "NODE-1.", "node-1.example.com", "x.localhost:1", "[fe80::1]:1"]
)
def test_names_of_this_node(name: str) -> None:
    assert Hosts(["node-1", "Node-1.example.com."]).include(name)


@pytest.mark.parametrize("name", ["node-2", "node-1.evil.com", "", ":9440", "node-1 node-2", "1.2.3", "[evil]"])
def test_others(name: str) -> None:
    assert not Hosts(["node-1", ""]).include(name)


def test_the_name_in_the_address_and_the_downward_apis_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NODE_NAME", "worker-3.local")
    hosts = Hosts(own_names("scraped.example:9440", ["alias"]))
    assert all(map(hosts.include, ["scraped.example:9440", "worker-3.local", "alias"]))
