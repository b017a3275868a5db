"""grpcio, which has gRPC's own HTTP/2, understands a plugin's socket, and is understood."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from grpclib.const import Cardinality, Handler, Status
from grpclib.exceptions import GRPCError
from grpclib.server import Stream

from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Encoded
from tests.wait import limit

CASES = ("echo", "at_once", "stream", "refusal", "cancel")
BIG = bytes(range(256)) * 16384


class Bytes:
    """A message of any bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def parse(cls, data: bytes) -> Bytes:
        return cls(bytes(data))


class Service:
    def __init__(self) -> None:
        self.given_up = asyncio.Event()

    async def echo(self, stream: Stream[Any, Any]) -> None:
        message = await stream.recv_message()
        assert message is not None
        await stream.send_message(Encoded(message.data))

    async def list(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        for _ in range(3):
            await stream.send_message(Encoded(BIG))

    async def refuse(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        raise GRPCError(Status.FAILED_PRECONDITION, "no: ä %" + "m" * 1990)

    async def broken(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        raise RuntimeError("a bug")

    async def wait(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(Encoded(b"waits"))
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()

    async def given(self, stream: Stream[Any, Any]) -> None:
        await stream.recv_message()
        await self.given_up.wait()
        await stream.send_message(Encoded(b"up"))

    def __mapping__(self) -> dict[str, Handler]:
        one, many = Cardinality.UNARY_UNARY, Cardinality.UNARY_STREAM
        calls = {
            "Echo": (self.echo, one),
            "List": (self.list, many),
            "Refuse": (self.refuse, one),
            "Break": (self.broken, one),
            "Wait": (self.wait, many),
            "Given": (self.given, one),
        }
        return {f"/t/{name}": Handler(call, kind, Bytes, Encoded) for name, (call, kind) in calls.items()}


@pytest.mark.parametrize("case", CASES)
async def test_grpcio_calls_a_plugin(tmp_path: Path, case: str) -> None:
    service = Service()
    server = SocketServer([service], tmp_path / "s")
    await server.open()
    try:
        async with limit(f"grpcio's {case}"):
            client = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.e2e.kubelet.grpcio_client", tmp_path / "s", case),
                cwd=Path(__file__).parents[3],
                stderr=subprocess.PIPE,
            )
            _, errors = await client.communicate()
            assert client.returncode == 0, errors.decode()
    finally:
        await server.shut_down(0)
