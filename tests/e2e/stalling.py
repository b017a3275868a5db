"""A kubelet that accepts registrations, opens ListAndWatch, and never reads a list."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import Event, ResponseReceived, StreamEnded
from h2.settings import SettingCodes

from agent.kubelet.api.v1beta1 import Empty, RegisterRequest, RegistrationBase
from agent.kubelet.server import SocketServer
from tests.wait import PATIENCE

_HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/v1beta1.DevicePlugin/ListAndWatch"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


class StallingKubelet(RegistrationBase):
    """Its streams give the other side `window` bytes as far as HTTP/2 is concerned."""

    def __init__(self, plugin_dir: Path, window: int) -> None:
        self.registered = asyncio.Event()
        self._plugin_dir, self._window = plugin_dir, window
        self._sockets: list[socket.socket] = []

    async def register(self, register_request: RegisterRequest) -> Empty:
        path = self._plugin_dir / register_request.endpoint
        self._sockets.append(await asyncio.to_thread(_open_stream, path, self._window))
        self.registered.set()
        return Empty()

    def close(self) -> None:
        for sock in self._sockets:
            sock.close()


@asynccontextmanager
async def stalling_kubelet(plugin_dir: Path, window: int) -> AsyncIterator[StallingKubelet]:
    """Run one."""
    kubelet = StallingKubelet(plugin_dir, window)
    server = SocketServer([kubelet], plugin_dir / "kubelet.sock")
    await server.open()
    try:
        yield kubelet
    finally:
        await server.shut_down()
        kubelet.close()


def _open_stream(path: Path, window: int) -> socket.socket:
    """Connect, open a stream, and read until it is open and not a byte more."""
    client = H2Connection(H2Configuration(client_side=True))
    client.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
    client.initiate_connection()
    if window > 65_535:
        client.increment_flow_control_window(window - 65_535)
    client.send_headers(1, _HEADERS)
    client.send_data(1, b"\0\0\0\0\0", end_stream=True)  # an empty message
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(PATIENCE)
    sock.connect(str(path))
    sock.sendall(client.data_to_send())
    events: list[Event] = []
    while not any(isinstance(event, ResponseReceived) for event in events):
        events += client.receive_data(sock.recv(1024))
    assert not any(isinstance(event, StreamEnded) for event in events)  # as it would be in a refusal
    return sock
