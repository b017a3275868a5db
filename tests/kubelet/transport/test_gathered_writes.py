"""Gathered writes, on a real socket."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from agent.kubelet.client import Channel, GatheringTransport
from tests.wait import limit

Ends = tuple[GatheringTransport, socket.socket]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A gathering transport and the raw socket at its other end; datagrams, so that each send can be told."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    theirs.setblocking(False)
    stream = ours.dup()
    ours.close()
    loop = asyncio.get_running_loop()
    inner = loop._make_socket_transport(stream, asyncio.Protocol())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    yield GatheringTransport(inner), theirs
    inner.abort()
    theirs.close()
    await asyncio.sleep(0)


async def received(theirs: socket.socket) -> bytes:
    async with limit():
        return await asyncio.get_running_loop().sock_recv(theirs, 1024)


async def test_what_one_turn_writes_is_sent_in_one_piece(ends: Ends) -> None:
    transport, theirs = ends
    for part in (b"headers ", b"data ", b"trailers"):
        transport.write(part)
    assert await received(theirs) == b"headers data trailers"


async def test_each_turn_sends_what_it_wrote(ends: Ends) -> None:
    transport, theirs = ends
    transport.write(b"first")
    await asyncio.sleep(0)
    transport.write(b"second")
    assert await received(theirs) == b"first"
    assert await received(theirs) == b"second"


async def test_closing_sends_what_was_written(ends: Ends) -> None:
    transport, theirs = ends
    transport.write(b"goodbye")
    transport.close()
    assert transport.is_closing()
    assert await received(theirs) == b"goodbye"
    assert await received(theirs) == b""


async def test_aborting_sends_nothing(ends: Ends) -> None:
    transport, theirs = ends
    transport.write(b"lost")
    transport.abort()
    assert await received(theirs) == b""


async def test_what_is_written_before_the_connection_is_lost_is_no_error(ends: Ends) -> None:
    transport, theirs = ends
    transport.write(b"too late")
    transport._transport.abort()
    assert await received(theirs) == b""


async def test_a_channels_connection_sends_so(ends: Ends) -> None:
    transport, theirs = ends
    protocol = Channel("nowhere")._protocol_factory()
    protocol.connection_made(transport._transport)
    assert (await received(theirs)).startswith(b"PRI * HTTP/2.0")
    for payload in (b"one-----", b"two-----"):
        protocol.connection._connection.ping(payload)
        protocol.connection.flush()
    assert (await received(theirs)).endswith(b"two-----")
