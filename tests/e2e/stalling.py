"""A gRPC client that opens ListAndWatch on a unix socket and never reads its lists."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ResponseReceived
from h2.settings import SettingCodes

from tests.e2e.process import PATIENCE


@contextmanager
def stall(path: Path, window: int) -> Iterator[None]:
    """Stay connected; `window` is how many bytes the other side may send as far as HTTP/2 is concerned."""
    client = H2Connection(H2Configuration(client_side=True))
    client.local_settings[SettingCodes.INITIAL_WINDOW_SIZE] = window
    client.initiate_connection()
    if window > 65_535:
        client.increment_flow_control_window(window - 65_535)
    headers = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/v1beta1.DevicePlugin/ListAndWatch"),
        (":authority", "localhost"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
    client.send_headers(1, headers)
    client.send_data(1, b"\0\0\0\0\0", end_stream=True)  # an empty message
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(PATIENCE)
        sock.connect(str(path))
        sock.sendall(client.data_to_send())
        while not any(isinstance(event, ResponseReceived) for event in client.receive_data(sock.recv(4096))):
            pass  # until the stream is open
        yield
