"""Puts our HTTP/2 connection beneath grpclib, in the place of h2's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from grpclib.protocol import Connection, EventsProcessor

from agent.kubelet.transport.http2.connection import ServerConnection
from agent.kubelet.transport.write_gathering import GatheringProtocol, GatheringTransport

if TYPE_CHECKING:
    from h2.connection import H2Connection


class ServerProtocol(GatheringProtocol):
    """A server's connection. Whoever derives from `GatheringProtocol` in its place has h2's connection again."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Make what grpclib's own `connection_made` would, which names h2's class."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = GatheringTransport(transport)
        self.connection = Connection(cast("H2Connection", ServerConnection()), self.transport, config=self.config)
        self.connection.flush()
        self.connection.initialize()
        self.processor = EventsProcessor(self.handler, self.connection)
