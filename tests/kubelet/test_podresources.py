from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import grpclib
import pytest
from grpclib.const import Cardinality, Handler, Status

from agent.kubelet import witnesses
from agent.kubelet.api.v1 import (
    ContainerDevices,
    ContainerResources,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    PodResources,
)
from agent.kubelet.server import SocketServer
from agent.kubelet.wire import Encoded, PodDevices
from agent.kubelet.witnesses import PodResourcesError, list_pods
from tests.kubelet.transport.test_floods import EMPTY_DATA, PING, UNKNOWN
from tests.wait import PATIENCE, at_once, limit, pass_time

SETTINGS = b"\0\0\0\x04\0\0\0\0\0"

Answer = Callable[["grpclib.server.Stream[Any, Any]"], Awaitable[None]]


class Lister:
    """A podresources service that answers as it is told."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __mapping__(self) -> dict[str, Handler]:
        handler = Handler(self._answer, Cardinality.UNARY_UNARY, ListPodResourcesRequest, ListPodResourcesResponse)
        return {"/v1.PodResourcesLister/List": handler}


@asynccontextmanager
async def kubelet(path: Path, answer: Answer) -> AsyncIterator[SocketServer]:
    server = SocketServer([Lister(answer)], path)
    await server.open()
    try:
        yield server
    finally:
        await server.shut_down(0.1)


def sends(message: Any) -> Answer:
    async def answer(stream: grpclib.server.Stream[Any, Any]) -> None:
        await stream.recv_message()
        await stream.send_message(message)

    return answer


def refuses(status: Status, message: str) -> Answer:
    async def answer(stream: grpclib.server.Stream[Any, Any]) -> None:
        raise grpclib.GRPCError(status, message)

    return answer


async def cut_off(stream: grpclib.server.Stream[Any, Any]) -> None:
    await stream.recv_message()
    await stream.send_initial_metadata()
    await stream._stream.send_data(b"\0\0\0\0\x10abc")
    await stream.send_trailing_metadata(status=Status.DATA_LOSS)


async def test_every_container_of_every_pod_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "kubelet.sock"
    gpus = ContainerDevices(resource_name="nvidia.com/gpu", device_ids=["a", "b"])
    nics = ContainerDevices(resource_name="x/nic", device_ids=["n"])
    reply = ListPodResourcesResponse(
        pod_resources=[
            PodResources("one", "default", [ContainerResources("main", [gpus, nics]), ContainerResources("side", [])]),
            PodResources("two", "kube-system", [ContainerResources("main", [nics])]),
        ]
    )
    async with kubelet(path, sends(reply)) as server:
        assert await list_pods(path, 5) == [
            PodDevices("default", "one", "main", "nvidia.com/gpu", ("a", "b")),
            PodDevices("default", "one", "main", "x/nic", ("n",)),
            PodDevices("kube-system", "two", "main", "x/nic", ("n",)),
        ]
        assert await server.wait_disconnected(PATIENCE)


async def test_a_kubelet_without_pods_lists_nothing(tmp_path: Path) -> None:
    async with kubelet(tmp_path / "s", sends(ListPodResourcesResponse())):
        assert await list_pods(tmp_path / "s", 5) == []


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("missing", "no kubelet answers at .*/missing: No such file or directory"),
        ("dead", "Connection refused"),
        ("x" * 120, "too long"),
    ],
)
async def test_a_place_where_no_kubelet_is_is_told_in_a_sentence(tmp_path: Path, name: str, sentence: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
        with pytest.raises(PodResourcesError, match=sentence):
            await list_pods(tmp_path / name, 5)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (refuses(Status.RESOURCE_EXHAUSTED, "too often"), "refused to list its pods' devices: too often"),
        (refuses(Status.UNIMPLEMENTED, "unknown service"), "does not serve podresources v1"),
        # it sees the deadline pass before we do
        (refuses(Status.DEADLINE_EXCEEDED, "deadline exceeded"), "did not answer at .* within 5 s"),
        (sends(Encoded(b"\x0a\xff")), "is no pod list: the message ends within a"),
        (cut_off, "is no pod list"),
    ],
)
async def test_an_answer_that_is_no_list_is_told_in_a_sentence(tmp_path: Path, answer: Answer, sentence: str) -> None:
    async with kubelet(tmp_path / "s", answer):
        with pytest.raises(PodResourcesError, match=sentence):
            await list_pods(tmp_path / "s", 5)


async def test_a_kubelet_that_never_answers_is_told_in_a_sentence(tmp_path: Path) -> None:
    async def never(stream: grpclib.server.Stream[Any, Any]) -> None:
        pass_time(5)
        await asyncio.Event().wait()

    async with kubelet(tmp_path / "s", never) as server:
        with pytest.raises(PodResourcesError, match=r"did not answer at .* within 5 s"):
            await list_pods(tmp_path / "s", 5)
        assert await server.wait_disconnected(PATIENCE)


async def test_a_socket_that_accepts_and_says_nothing_is_told_in_a_sentence(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "s"))
        mute.listen()
        with pytest.raises(PodResourcesError, match="did not answer"):
            await at_once(list_pods(tmp_path / "s", 5))


async def test_a_kubelet_that_hangs_up_is_told_in_a_sentence(tmp_path: Path) -> None:
    async def hang_up(stream: grpclib.server.Stream[Any, Any]) -> None:
        server.reset_connections()
        await asyncio.Event().wait()

    async with kubelet(tmp_path / "s", hang_up) as server:
        with pytest.raises(PodResourcesError, match="ended the call"):
            await list_pods(tmp_path / "s", 5)


@pytest.mark.parametrize("hangs_up", [True, False])
async def test_who_asks_is_not_taken_for_cancelled_when_the_kubelet_hangs_up_or_is_late(
    tmp_path: Path, hangs_up: bool
) -> None:
    """The daemon itself asks at its start: counted as cancelled, it would not end well at its stop."""

    async def hang(stream: grpclib.server.Stream[Any, Any]) -> None:
        if hangs_up:
            server.reset_connections()
        await asyncio.Event().wait()

    async with kubelet(tmp_path / "s", hang) as server:
        with anyio.CancelScope() as scope:
            with pytest.raises(PodResourcesError):
                await at_once(list_pods(tmp_path / "s", 5))
            scope.cancel()
            await anyio.sleep_forever()
        assert scope.cancelled_caught
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]


async def test_a_socket_that_speaks_no_http2_is_told_in_a_sentence(tmp_path: Path) -> None:
    def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_unix_server(babble, tmp_path / "s")
    with pytest.raises(PodResourcesError):
        await list_pods(tmp_path / "s", 5)
    server.close()


async def test_an_answer_without_an_end_is_cut_off(tmp_path: Path) -> None:
    async with kubelet(tmp_path / "s", sends(Encoded(b"\x0a\x00" * (witnesses.ANSWER_BYTES // 2 + 1)))):
        with pytest.raises(PodResourcesError, match="more than 16 MiB"):
            await list_pods(tmp_path / "s", PATIENCE)


@pytest.mark.parametrize("frame", [PING, EMPTY_DATA, UNKNOWN, SETTINGS], ids=["ping", "data", "unknown", "settings"])
async def test_a_flood_of_frames_is_cut_off(tmp_path: Path, frame: bytes) -> None:
    async def flood(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            writer.write(SETTINGS)
            while True:
                writer.write(frame * 10_000)
                await writer.drain()

    server = await asyncio.start_unix_server(flood, tmp_path / "s")
    with pytest.raises(PodResourcesError, match=r"more than 4,096 frames|ended the call"):
        async with limit("the end of the flood"):
            await list_pods(tmp_path / "s", 10 * PATIENCE)
    server.close()
