"""AMD's metrics exporter as a witness of health: a gRPC server on a socket of the host."""

from __future__ import annotations

import asyncio
import itertools
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError
from grpclib.server import Server, Stream
from h2.config import H2Configuration
from h2.connection import H2Connection

from backends.base import Verdict
from backends.gpu import Gpu, amd
from backends.gpu.amd import SOCKET, exporter_states
from tests.backends.gpu.gpus import backend, devices, resource
from tests.backends.machines import MI210, MI300X, mi210_server, mi300x_cpx

AMD = resource("amd.com/gpu", select={"vendor": ("1002",)})


@pytest.fixture
def root() -> Iterator[Path]:
    """Short enough for the path of a socket below it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def forgetful() -> None:
    amd._exporter_states.cache_clear()


class Bytes(CodecBase):
    __content_subtype__ = "proto"

    def encode(self, message: Any, message_type: Any) -> bytes:
        return bytes(message)

    def decode(self, data: bytes, message_type: Any) -> Any:
        return data


class Exporter:
    """What it answers."""

    def __init__(self, answer: bytes | Status) -> None:
        self._answer = answer

    def __mapping__(self) -> dict[str, Handler]:
        return {"/metricssvc.MetricsService/List": Handler(self._list, Cardinality.UNARY_UNARY, bytes, bytes)}

    async def _list(self, stream: Stream[Any, Any]) -> None:
        assert await stream.recv_message() == b""
        if isinstance(self._answer, Status):
            raise GRPCError(self._answer, "no")
        await stream.send_message(self._answer)


@asynccontextmanager
async def exporting(root: Path, answer: bytes | Status) -> AsyncIterator[None]:
    server, path = Server([Exporter(answer)], codec=Bytes()), root / SOCKET.text[1:]
    path.parent.mkdir(parents=True)
    await server.start(path=str(path))
    yield
    server.close()
    await server.wait_closed()


def text(number: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    assert len(data) < 1 << 14
    size = bytes([len(data)]) if len(data) < 1 << 7 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
    return bytes([number << 3 | 2]) + size + data


def state(address: str, health: str) -> bytes:
    workloads = [text(4, f"pod {n} of some namespace with a long name") for n in range(8)]
    return text(1, b"".join([text(1, "0"), text(2, "uuid"), text(3, health), *workloads, text(5, address)]))


def unhealthy(gpu: Gpu) -> list[str]:
    """The hardware of which its word is taken, in the order of the devices that were probed."""
    said = [signal for _, device in sorted(devices(gpu).items()) for signal in gpu.probe(device)]
    assert all(it.verdict is Verdict.NOW for it in said if it.reason == "exporter-unhealthy")
    return [it.hardware for it in said if it.reason == "exporter-unhealthy"]


async def test_what_the_exporter_finds_unhealthy_is_unhealthy_and_nothing_else(root: Path) -> None:
    gpu = backend(root, mi210_server(), AMD)
    answer = state(MI210[0], "healthy") + state(MI210[1], "unhealthy") + state(MI210[2], "unknown")
    async with exporting(root, answer):
        assert await asyncio.to_thread(unhealthy, gpu) == [f"pci:{MI210[1]}"]


async def test_a_divided_gpu_is_as_the_exporter_says_of_the_whole(root: Path) -> None:
    gpu = backend(root, mi300x_cpx(), AMD)
    async with exporting(root, state(MI300X.upper(), "unhealthy")):
        assert await asyncio.to_thread(unhealthy, gpu) == [f"pci:{MI300X}"], "on which the partitions depend"


@pytest.mark.parametrize(
    "answer", [b"", b"\x08\x01", b"\x0a\x7f", b"\xff" * 12, text(1, text(3, b"\xff")), Status.INTERNAL]
)
async def test_an_answer_without_sense_says_nothing(root: Path, answer: bytes | Status) -> None:
    gpu = backend(root, mi210_server(), AMD)
    async with exporting(root, answer):
        assert await asyncio.to_thread(exporter_states, gpu.host) == {}


async def test_a_later_exporters_further_fields_hide_no_unhealthy_gpu(root: Path) -> None:
    gpu, further = backend(root, mi210_server(), AMD), b"\x30\x07" + b"\x39" + bytes(8) + b"\x45" + bytes(4)
    known = text(3, "unhealthy") + text(5, MI210[1])
    async with exporting(root, further + text(1, further + known + further)):
        assert await asyncio.to_thread(exporter_states, gpu.host) == {MI210[1]: "unhealthy"}


def test_where_its_directory_may_not_be_seen_nothing_is_said(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = backend(root, mi210_server(), AMD)

    def refuse(_: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    assert exporter_states(gpu.host) == {}


def test_where_there_is_no_exporter_nothing_is_said(root: Path) -> None:
    assert unhealthy(backend(root, mi210_server(), AMD)) == []


@pytest.mark.parametrize("speech", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b""])
async def test_what_speaks_something_else_says_nothing(root: Path, speech: bytes) -> None:
    gpu, path = backend(root, mi210_server(), AMD), root / SOCKET.text[1:]
    path.parent.mkdir(parents=True)

    async def speak(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(speech)
        writer.close()

    async with await asyncio.start_unix_server(speak, path):
        assert await asyncio.to_thread(exporter_states, gpu.host) == {}


async def test_one_that_hangs_is_not_waited_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, path = backend(root, mi210_server(), AMD), root / SOCKET.text[1:]
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(amd, "_DEADLINE", 0.01)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        assert await asyncio.to_thread(exporter_states, gpu.host) == {}


async def test_one_that_talks_without_end_is_not_listened_to_for_longer(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, path = backend(root, mi210_server(), AMD), root / SOCKET.text[1:]
    path.parent.mkdir(parents=True)
    monkeypatch.setattr(amd, "time", SimpleNamespace(monotonic=itertools.count(step=0.5).__next__))
    pings = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal pings
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        with suppress(ConnectionError):  # the client has closed
            while pings < 1000 and (data := await reader.read(1 << 16)):
                http.receive_data(data)
                http.ping(bytes(8))
                pings += 1
                writer.write(http.data_to_send())
        writer.close()

    async with await asyncio.start_unix_server(talk, path):
        assert await asyncio.to_thread(exporter_states, gpu.host) == {}
    assert 0 < pings < 10
