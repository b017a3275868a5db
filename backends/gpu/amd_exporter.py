"""Asks AMD's metrics exporter for the health of each GPU, as AMD's own device plugin does.

The exporter (device-metrics-exporter, with its own thresholds for ECC errors) answers one gRPC call on a socket of the
host. If it is missing or does not answer, no GPU is unhealthy for it.
Source: `metricssvc.proto` and `internal/pkg/exporter/health.go` of ROCm/k8s-device-plugin.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

from backends.base import Host, HostPath

if TYPE_CHECKING:
    from h2.connection import H2Connection
    from h2.events import Event


SOCKET: Final = HostPath("/var/lib/amd-metrics-exporter/amdgpu_device_metrics_exporter_grpc.socket")
UNHEALTHY: Final = "unhealthy"

_HEADERS: Final = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/metricssvc.MetricsService/List"),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)
_EMPTY: Final = bytes(5)  # not compressed, and the zero bytes of google.protobuf.Empty
_STATE, _HEALTH, _DEVICE = 1, 3, 5
"""Fields of GPUStateResponse, and of the GPUState in it."""
_VARINT, _LEN = 0, 2
_FIXED: Final = {1: 8, 5: 4}
"""Kind of a protobuf field → its bytes."""

_DEADLINE: Final = 2.0  # seconds for the whole answer
_MOST_BYTES: Final = 1 << 20  # a GPU takes 100
_KEPT_FOR: Final = 10.0  # seconds before it is asked again, whether or not it answered


def states(host: Host) -> Mapping[str, str]:
    """PCI address → "healthy", "unhealthy" or "unknown"; empty where no exporter answers."""
    return _states(host, int(time.monotonic() // _KEPT_FOR))


@functools.lru_cache(maxsize=4)
def _states(host: Host, _moment: int) -> Mapping[str, str]:
    path = host.local(SOCKET)
    try:
        return dict(_read(_asked(os.fspath(path)))) if path.exists() else {}
    except (OSError, ValueError):  # it may be stopped at any time; health does not depend on it alone
        return {}


def _asked(path: str) -> bytes:
    """The answer to the call.

    Raises:
        OSError: there is no exporter, or it takes too long or ends early.
        ValueError: it speaks no HTTP/2, or says too much.
    """
    from h2.config import H2Configuration  # noqa: PLC0415  # only where there is an exporter
    from h2.connection import H2Connection  # noqa: PLC0415
    from h2.exceptions import ProtocolError  # noqa: PLC0415

    until, answer = time.monotonic() + _DEADLINE, bytearray()
    with socket.socket(socket.AF_UNIX) as there:
        there.settimeout(_DEADLINE)
        there.connect(path)
        http = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        http.initiate_connection()
        stream = http.get_next_available_stream_id()
        http.send_headers(stream, _HEADERS)
        http.send_data(stream, _EMPTY, end_stream=True)
        while True:
            there.sendall(http.data_to_send())
            if (left := until - time.monotonic()) <= 0:  # it may send data for ever that is no answer
                raise TimeoutError
            there.settimeout(left)
            if not (data := there.recv(1 << 16)):
                raise ConnectionResetError
            try:
                if _ends(http.receive_data(data), http, answer):
                    return bytes(answer)
            except ProtocolError as error:
                raise ValueError from error


def _ends(events: list[Event], http: H2Connection, answer: bytearray) -> bool:
    from h2.events import DataReceived, StreamEnded, StreamReset  # noqa: PLC0415

    for event in events:
        if isinstance(event, DataReceived) and event.stream_id is not None:
            answer += event.data or b""
            if len(answer) > _MOST_BYTES:
                raise ValueError
            http.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
    return any(isinstance(event, StreamEnded | StreamReset) for event in events)


def _read(answer: bytes) -> Iterator[tuple[str, str]]:
    """The address and the health of each GPU in a gRPC message; nothing for an error, whose answer has no message.

    Raises:
        ValueError: it makes no sense.
    """
    for number, state in _texts(answer[5:]):
        if number == _STATE:
            said = {key: value.decode() for key, value in _texts(state)}
            yield said.get(_DEVICE, "").lower(), said.get(_HEALTH, "").lower()


def _texts(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message that are bytes, texts or messages; others are skipped.

    Source of the kinds: "Message Structure" of protobuf's encoding.

    Raises:
        ValueError: one is of a kind that there is not, or is cut off.
    """
    at = 0
    while at < len(message):
        tag, at = _number(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _number(message, at)
            continue
        size, at = (_FIXED[kind], at) if kind in _FIXED else _number(message, at)
        if (kind != _LEN and kind not in _FIXED) or at + size > len(message):
            raise ValueError
        if kind == _LEN:
            yield tag >> 3, message[at : at + size]
        at += size


def _number(message: bytes, at: int) -> tuple[int, int]:
    """A varint, and the offset of what follows it."""
    value = shift = 0
    while at < len(message) and shift < 64:  # bits
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            return value, at
    raise ValueError
