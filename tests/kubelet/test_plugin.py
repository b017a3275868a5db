"""Kubelet contract: A3, A4, A7."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import h2.events
import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError
from hypothesis import example, given
from hypothesis import strategies as st

from agent.inventory.lists import Listing
from agent.kubelet import plugin as plugin_module
from agent.kubelet import wire
from agent.kubelet.api.v1beta1 import (
    ContainerPreferredAllocationRequest,
    DevicePluginOptions,
    Empty,
    ListAndWatchResponse,
    NumaNode,
    PreferredAllocationRequest,
    PreferredAllocationResponse,
    PreStartContainerRequest,
    PreStartContainerResponse,
    TopologyInfo,
)
from agent.kubelet.api.v1beta1 import Device as ListedDevice
from agent.kubelet.lock import exclusive
from agent.kubelet.plugin import COALESCE, CREDIT, EncodedList, Plugin
from agent.kubelet.server import SocketServer
from agent.model import HEALTHY, Slot, Snapshot
from backends.base import AllocationRefused
from tests.kubelet.plugins import (
    SICK,
    TOY,
    Client,
    Lists,
    Raw,
    connected,
    device,
    healthy,
    listed,
    more_than_fits,
    nothing,
    received,
    served,
)
from tests.kubelet.transport.test_server import RawClient
from tests.wait import PATIENCE, at_once, limit, pass_time, settled, until

METHODS = (
    "GetDevicePluginOptions",
    "ListAndWatch",
    "Allocate",
    "GetPreferredAllocation",
    "PreStartContainer",
)


@dataclass
class Stage:
    """A served plugin, and a client of it."""

    plugin: Plugin
    lists: Lists
    client: Client
    server: SocketServer


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    plugin = Plugin(TOY, nothing)
    async with served(tmp_path / "toy.sock", plugin) as server, connected(tmp_path / "toy.sock") as client:
        yield Stage(plugin, Lists(plugin), client, server)


# --- ListAndWatch ---


async def test_the_first_list_is_sent_when_there_is_one_and_nothing_before(stage: Stage) -> None:
    async with stage.client.watch() as stream:
        first = asyncio.ensure_future(listed(stream))
        await until(lambda: stage.plugin.streaming)
        await settled()
        assert not first.done()
        stage.lists.put("a", "b")
        assert await first == healthy("ab")


async def test_what_the_kubelet_was_told_earlier_is_never_another_plugins(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kubelet on a slow disk writes into its record what it had from us long before."""
    clock = Clock(monkeypatch)
    stage.lists.put("a", "b")
    async with stage.client.watch() as stream:
        await listed(stream)
        for gone in ("a", "b"):
            clock.now += 3600.0
            pass_time(COALESCE)
            stage.lists.drop(gone)
            await until(lambda it=gone: it not in stage.plugin._sent)  # type: ignore[misc]
        offer = stage.plugin.offer
        assert offer is not None
        assert (offer.healthy, offer.lacks(frozenset("ab"))) == (frozenset(), False)


async def test_an_empty_list_is_a_list(stage: Stage) -> None:
    stage.lists.publish()
    async with stage.client.watch() as stream:
        assert await listed(stream) == {}


async def test_the_first_changes_are_sent_at_once_and_further_ones_together(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    pauses = noted_pauses(stage.plugin, monkeypatch)
    stage.lists.put("first")
    async with stage.client.watch() as stream:
        await listed(stream)
        clock.now += CREDIT * COALESCE
        for n in range(CREDIT):
            stage.lists.put(f"a{n}")
            assert f"a{n}" in await listed(stream)
        assert not pauses
        counts = stage.plugin._counts
        for n in range(1, 4):
            sent = counts.updates
            for part in ("x", "y", "z"):
                stage.lists.put(f"{part}{n}")
                await settled()
            clock.now += COALESCE * 0.9
            pauses.clear()
            pass_time(COALESCE)
            await until(lambda: len(pauses) == 1)
            assert counts.updates == sent, "a moment too early"
            clock.now += COALESCE * 0.1000001
            pass_time(COALESCE)
            assert {f"x{n}", f"y{n}", f"z{n}"} <= (await listed(stream)).keys()
            assert counts.updates == sent + 1


def noted_pauses(plugin: Plugin, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long each of its pauses was to be, once it begins."""
    pauses, pause = list[float](), plugin._pause

    async def paused(seconds: float, ending: asyncio.Event) -> None:
        pauses.append(seconds)
        await pause(seconds, ending)

    monkeypatch.setattr(plugin, "_pause", paused)
    return pauses


async def test_a_change_and_its_reverse_within_the_pause_end_right(stage: Stage) -> None:
    stage.lists.put("a", "b")
    async with stage.client.watch() as stream:
        await listed(stream)
        stage.lists.drop("a")
        stage.lists.put("b", health=SICK)
        stage.lists.put("a")
        assert await listed(stream) == {"a": "Healthy", "b": "Unhealthy"}


async def test_a_slow_client_skips_generations(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, ids = Clock(monkeypatch), more_than_fits()
    stage.lists.put(*ids)
    with RawClient(stage.server.path) as slow:
        await slow.ask("/v1beta1.DevicePlugin/ListAndWatch")
        await until(lambda: stage.plugin._sending is not None)
        for n in range(20):
            stage.lists.put(ids[n], health=SICK)
            await settled()
        frames = _Frames(slow)
        assert await frames.next_sick() == []
        for count in (20, 21):  # the second change tells that there was no list between
            clock.now += COALESCE
            pass_time(COALESCE)
            assert await frames.next_sick() == ids[:count]
            clock.now += COALESCE
            pass_time(COALESCE)
            await settled()
            stage.lists.put(ids[count], health=SICK)


class _Frames:
    """The messages that a raw client gets, when it reads at last."""

    def __init__(self, client: RawClient) -> None:
        self._client = client
        self._data = bytearray()

    async def next_sick(self) -> list[str]:
        """The IDs that are not healthy in the next list."""
        return sorted(device_id for device_id, health, _ in (await self._next()).devices if health != "Healthy")

    async def _next(self) -> wire.DeviceList:
        while len(self._data) < 5 or len(self._data) < 5 + int.from_bytes(self._data[1:5]):
            async with limit("the next list"):
                data = await asyncio.get_running_loop().sock_recv(self._client.sock, 1 << 20)
            for event in self._client.h2.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    self._data += event.data
        size = 5 + int.from_bytes(self._data[1:5])
        message, self._data = bytes(self._data[5:size]), self._data[size:]
        return wire.DeviceList.parse(message)


async def test_a_resend_of_the_same_list_is_a_message(stage: Stage) -> None:
    stage.lists.put("a")
    async with stage.client.watch() as stream:
        await listed(stream)
        stage.lists.publish()
        assert await listed(stream) == healthy("a")


async def test_a_second_stream_is_refused_while_one_is_open(stage: Stage) -> None:
    stage.lists.put("a")
    async with stage.client.watch() as stream:
        await listed(stream)
        async with stage.client.watch() as second:
            with pytest.raises(GRPCError) as caught:
                await received(second)
        assert caught.value.status is Status.UNAVAILABLE
        stage.lists.put("b")
        assert await listed(stream) == healthy("ab")
    await until(lambda: not stage.plugin.streaming)
    async with stage.client.watch() as stream:
        assert await listed(stream) == healthy("ab")
    assert stage.plugin.streams == 2


async def test_an_old_stream_takes_no_update_that_is_meant_for_the_new_one(stage: Stage) -> None:
    """As it does in plugins whose streams read from one channel (NVIDIA, GKE, Intel, generic-device-plugin)."""
    async with stage.client.watch() as old:
        stage.lists.put("a")
        await listed(old)
    for name in "bcd":  # nobody reads, and nothing blocks
        stage.lists.put(name)
    await until(lambda: not stage.plugin.streaming)
    async with stage.client.watch() as new:
        assert await listed(new) == healthy("abcd")


async def test_a_stream_that_is_ended_sends_trailers_and_no_other_is_accepted_until_reopened(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(monkeypatch)
    pauses = noted_pauses(stage.plugin, monkeypatch)
    stage.lists.put("a")
    async with stage.client.watch() as stream:
        for device_id in "bcd"[: CREDIT - 1]:
            await listed(stream)
            stage.lists.put(device_id)
        await listed(stream)
        stage.lists.put("last")
        await until(lambda: bool(pauses))
        stage.plugin.end_stream()
        assert await received(stream) is None
        await stream.recv_trailing_metadata()  # raises what is not OK
    async with stage.client.watch() as refused:
        with pytest.raises(GRPCError):
            await received(refused)
    stage.plugin.reopen()
    async with stage.client.watch() as stream:
        assert "last" in await listed(stream)


async def test_a_clients_death_is_seen_at_once(stage: Stage) -> None:
    changes: list[bool] = []
    stage.plugin.on_call = lambda: changes.append(stage.plugin.streaming)
    stage.lists.put("a")
    async with stage.client.watch() as stream:
        await listed(stream)
        stage.client.close()
        await until(lambda: not stage.plugin.streaming)
    assert changes == [True, False]


async def test_a_stalled_client_holds_up_neither_other_calls_nor_the_shutdown(stage: Stage) -> None:
    stage.lists.put(*more_than_fits())
    with RawClient(stage.server.path) as stalled:
        await stalled.ask("/v1beta1.DevicePlugin/ListAndWatch")
        await until(lambda: stage.plugin._sending is not None)
        assert (await stage.client.allocate(more_than_fits()[0])).container_responses
        stage.plugin.end_stream()
        assert not await at_once(stage.server.shut_down())
        assert not stage.plugin.streaming


# --- the list's bytes ---

Operation = tuple[str, str, int | None]


def _in_betterproto(snapshot: Snapshot) -> bytes:
    def one(slot: Slot) -> ListedDevice:
        message = ListedDevice(slot.id, "Healthy" if slot.health.offered else "Unhealthy")
        if slot.device is not None and slot.device.numa_node is not None:
            message.topology = TopologyInfo([NumaNode(slot.device.numa_node)])
        return message

    return bytes(ListAndWatchResponse([one(slot) for slot in snapshot.slots.values()]))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["healthy", "sick", "gone", "tombstone", "skip", "resend", "all"]),
            st.sampled_from(["a", "b", "ü", "long" * 50]),
            st.sampled_from([None, 0, 1, 300]),
        ),
        max_size=30,
    )
)
def test_the_list_equals_betterprotos_after_any_sequence_of_snapshots(operations: list[Operation]) -> None:
    listing, encoded = Listing(TOY), EncodedList()
    for what, device_id, numa in operations:
        if what == "gone":
            listing.drop(device_id)
        elif what == "tombstone":
            listing.write({device_id: Slot(device_id, None, SICK)})
        elif what in ("healthy", "sick"):
            listing.write({device_id: Slot(device_id, device(device_id, numa), HEALTHY if what == "healthy" else SICK)})
        snapshot = listing.snapshot()
        if what == "skip":  # a generation that this list never saw
            continue
        if what == "all":
            snapshot = Snapshot(TOY, snapshot.generation, snapshot.slots, None)
        encoded.apply(snapshot)
        assert sorted(wire.messages(encoded.message(), 1)) == sorted(wire.messages(_in_betterproto(snapshot), 1))
        assert encoded.unhealthy == {it for it, slot in snapshot.slots.items() if not slot.health.offered}


def test_a_flip_encodes_that_device_and_no_other() -> None:
    listing, encoded = Listing(TOY), EncodedList()
    for n in range(100):
        listing.write({f"d{n}": Slot(f"d{n}", device(f"d{n}"), HEALTHY)})
    encoded.apply(listing.snapshot())
    encoded.message()
    listing.write({"d7": Slot("d7", device("d7"), SICK)})
    with (
        patch.object(wire, "device_head", side_effect=AssertionError("a head never changes")),
        patch.object(wire, "list_item", wraps=wire.list_item) as items,
    ):
        encoded.apply(listing.snapshot())
        message = encoded.message()
        assert items.call_count == 1
    assert encoded.message() is message


def test_a_long_list_is_encoded_some_devices_at_a_time_and_what_leaves_meanwhile_is_not_in_it() -> None:
    listing, encoded = Listing(TOY), EncodedList()
    for n in range(5):
        listing.write({f"d{n}": Slot(f"d{n}", device(f"d{n}"), HEALTHY)})
    encoded.apply(listing.snapshot())
    assert not encoded.encode(2)
    listing.drop("d0")
    listing.drop("d1")
    snapshot = listing.snapshot()
    encoded.apply(snapshot)
    while not encoded.encode(2):
        pass
    assert sorted(wire.messages(encoded.message(), 1)) == sorted(wire.messages(_in_betterproto(snapshot), 1))


# --- the other calls ---


async def test_every_method_is_served(stage: Stage) -> None:
    assert set(stage.plugin.__mapping__()) == {f"/v1beta1.DevicePlugin/{name}" for name in METHODS}
    options = await stage.client.call("GetDevicePluginOptions", Empty(), DevicePluginOptions)
    assert options == DevicePluginOptions()
    reply = await stage.client.call("PreStartContainer", PreStartContainerRequest(["a"]), PreStartContainerResponse)
    assert reply == PreStartContainerResponse()
    wish = PreferredAllocationRequest([ContainerPreferredAllocationRequest(["c", "a", "b"], ["b"], 2)])
    preferred = await stage.client.call("GetPreferredAllocation", wish, PreferredAllocationResponse)
    assert preferred.container_responses[0].device_ids == ["b", "a"]


async def test_a_plugin_that_has_a_preference_says_so_and_is_asked_for_each_container(tmp_path: Path) -> None:
    asked: list[wire.PreferredRequest] = []

    async def prefer(request: wire.PreferredRequest) -> tuple[str, ...]:
        asked.append(request)
        return request.available[-request.size :]

    wishes = [ContainerPreferredAllocationRequest(["c", "a"], [], 1), ContainerPreferredAllocationRequest(["b"], [], 1)]
    async with served(tmp_path / "s", Plugin(TOY, nothing, prefer)), connected(tmp_path / "s") as client:
        options = await client.call("GetDevicePluginOptions", Empty(), DevicePluginOptions)
        assert options == DevicePluginOptions(get_preferred_allocation_available=True)
        request = PreferredAllocationRequest(wishes)
        preferred = await client.call("GetPreferredAllocation", request, PreferredAllocationResponse)
    assert [container.device_ids for container in preferred.container_responses] == [["a"], ["b"]]
    assert asked[0] == wire.PreferredRequest(("c", "a"), (), 1)


@pytest.mark.parametrize("method", ["Allocate", "GetPreferredAllocation", "PreStartContainer"])
async def test_a_request_that_names_thousands_of_devices_is_read_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    threads: list[bool] = []
    whole = wire.fields

    def fields(data: bytes) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return whole(data)

    monkeypatch.setattr(wire, "fields", fields)
    async with served(tmp_path / "s", Plugin(TOY, nothing)), connected(tmp_path / "s") as client:
        for number, here in ((10, True), (15_000, False)):
            ids = [f"x{n:05}" for n in range(number)]
            request = wire.encode_ids(ids) if method == "PreStartContainer" else wire.encode_preferred([ids])
            threads.clear()
            await client.call(method, request, Raw)
            assert set(threads) == {here}


async def test_each_container_of_a_call_gets_its_own(tmp_path: Path) -> None:
    async with served(tmp_path / "s", Plugin(TOY, nothing)), connected(tmp_path / "s") as client:
        request = wire.Encoded(b"\x0a\x03\x0a\x01a" + b"\x0a\x03\x0a\x01b")
        reply = await client.call("Allocate", request, _allocate_response())
    assert [container.envs for container in reply.container_responses] == [{"GIVEN": "a"}, {"GIVEN": "b"}]


def _allocate_response() -> type:
    from agent.kubelet.api.v1beta1 import AllocateResponse

    return AllocateResponse


MALFORMED = {
    "cut off": b"\x0a\x05ab",
    "no protobuf": b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
    "a group": b"\x0b\x0c",
    "field number 0": b"\x02\x01a",
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_bytes_are_the_callers_error_and_the_server_goes_on(
    stage: Stage, method: str, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    stage.lists.put("a")
    with caplog.at_level(logging.WARNING), pytest.raises(GRPCError) as caught:
        await stage.client.call(method, wire.Encoded(data), Raw)
    assert caught.value.status is Status.INVALID_ARGUMENT
    assert caught.value.message
    assert caplog.records == []
    assert await stage.client.allocate("a")
    async with stage.client.watch() as stream:
        assert await listed(stream) == healthy("a")


async def test_an_id_that_is_no_text_is_the_callers_error(stage: Stage) -> None:
    with pytest.raises(GRPCError) as caught:
        await stage.client.call("Allocate", wire.Encoded(b"\x0a\x03\x0a\x01\xff"), Raw)
    assert caught.value.status is Status.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "frame", [b"\x00\x00\x00\x00\x09ab", b"\x01\x00\x00\x00\x02ab", b""], ids=["cut off", "compressed", "none at all"]
)
async def test_a_frame_that_is_no_message_is_the_callers_error(
    stage: Stage, frame: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    raw = RawClient(stage.server.path)  # closed by _answer
    headers = [(":method", "POST"), (":scheme", "http"), (":authority", "x")]
    headers += [(":path", "/v1beta1.DevicePlugin/Allocate"), ("te", "trailers"), ("content-type", "application/grpc")]
    raw.h2.send_headers(1, headers, end_stream=not frame)
    if frame:
        raw.h2.send_data(1, frame, end_stream=True)
    with caplog.at_level(logging.WARNING):
        answer = await asyncio.to_thread(_answer, raw)
    assert answer["grpc-status"] == str(Status.INVALID_ARGUMENT.value)
    assert caplog.records == []
    assert await stage.client.allocate("a")


def _answer(raw: RawClient) -> dict[str, str]:
    """The headers of the first answer, read blocking."""
    raw.sock.setblocking(True)
    raw.sock.settimeout(PATIENCE)
    raw.sock.sendall(raw.h2.data_to_send())
    try:
        while data := raw.sock.recv(1 << 16):
            for event in raw.h2.receive_data(data):
                if (found := getattr(event, "headers", None)) is not None:
                    return dict(found)
        raise AssertionError("no answer")
    finally:
        raw.sock.shutdown(socket.SHUT_RDWR)
        raw.sock.close()


# --- before a container starts ---


async def test_the_kubelet_is_told_to_ask_before_a_start_only_where_there_is_something_to_do(tmp_path: Path) -> None:
    asked: list[tuple[str, Sequence[str]]] = []

    async def refuse(resource: str, ids: Sequence[str]) -> None:
        asked.append((resource, ids))
        raise AllocationRefused("It is too hot.")

    for number, hook in enumerate((None, refuse)):
        path = tmp_path / str(number)
        async with served(path, Plugin(TOY, nothing, pre_start=hook)), connected(path) as client:
            options = await client.call("GetDevicePluginOptions", Empty(), DevicePluginOptions)
            assert options.pre_start_required is (hook is not None)
            call = client.call("PreStartContainer", PreStartContainerRequest(["b", "a"]), PreStartContainerResponse)
            if hook is None:
                await call
                continue
            with pytest.raises(GRPCError) as caught:
                await call
            assert (caught.value.status, caught.value.message) == (Status.FAILED_PRECONDITION, "It is too hot.")
    assert asked == [(TOY, ("b", "a"))]


# --- A7.1: what the kubelet was told ---


async def test_an_id_that_left_is_not_given_out_as_long_as_the_kubelet_stands_still(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on with what it believed, asks for that ID, and reads the list that lacks it while its Allocate is answered."""
    clock = Clock(monkeypatch)
    stage.lists.put("a", "b")
    async with stage.client.watch() as stream:
        await listed(stream)
        kubelet = stream._stream.connection._transport
        kubelet.pause_reading()
        for change in (stage.lists.drop, stage.lists.put):
            change("b")
            await until(lambda: stage.plugin._sent.keys() == stage.lists.listing.slots.keys())
        for _ in range(3):
            clock.now += plugin_module.REMEMBERED
            assert not stage.plugin._was_told("b")
        kubelet.resume_reading()
        assert [await listed(stream), await listed(stream)] == [healthy("a"), healthy("ab")]
        for told in (False, False, False, True):
            assert stage.plugin._was_told("b") is told
            clock.now += 0.4 * plugin_module.REMEMBERED


async def test_an_agent_that_stood_still_while_another_took_its_place_gives_nothing(tmp_path: Path) -> None:
    """What the kubelet asked of it meanwhile may have left the other one's lists; a removed directory takes no place."""
    path, given = tmp_path / "lock", list[Sequence[str]]()

    async def give(resource: str, ids: Sequence[str], told: Callable[[str], bool]) -> wire.Encoded:
        given.append(ids)
        if ids == ("a",):
            path.unlink()
        else:
            path.touch()
        return await nothing(resource, ids, told)

    async def start(resource: str, ids: Sequence[str]) -> None:
        given.append(ids)

    async with exclusive(path, print) as lock:
        plugin = Plugin(TOY, give, pre_start=start, lock=lock)
        async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
            await client.allocate("a")
            for _ in range(2):
                with pytest.raises(GRPCError, match="another one serves"):
                    await client.allocate("b")
            with pytest.raises(GRPCError, match="another one serves"):
                await client.call("PreStartContainer", PreStartContainerRequest(["a"]), PreStartContainerResponse)
    assert given == [("a",), ("b",)], "what begins afterwards is not even tried"


async def test_what_leaves_our_list_while_the_agent_after_us_answers_is_not_given(stage: Stage) -> None:
    """That agent has never told the kubelet that it was gone."""

    async def answer(resource: str, ids: Sequence[str]) -> wire.Encoded:
        if "b" in ids:
            stage.lists.drop("b")
            await until(lambda: "b" not in stage.plugin._sent)
        return await nothing(resource, ids, lambda _: True)

    stage.lists.put("a", "b")
    stage.plugin.relay = cast("Any", SimpleNamespace(allocate=answer))
    async with stage.client.watch() as stream:
        await listed(stream)
        await stage.client.allocate("a")
        with pytest.raises(GRPCError, match="was gone while this request waited"):
            await stage.client.allocate("a", "b")


@pytest.mark.parametrize("before", [True, False], ids=["known before", "found out meanwhile"])
async def test_an_allocate_that_meets_another_plugins_registration_is_refused(tmp_path: Path, before: bool) -> None:
    """Its list may lack what would be given; who asks with that list asks us as the plugin before it."""

    async def give(resource: str, ids: Sequence[str], told: Callable[[str], bool]) -> wire.Encoded:
        plugin.silence(True)
        return await nothing(resource, ids, told)

    plugin = Plugin(TOY, give)
    plugin.silence(before)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        if before:
            await client.allocate("a")
            return
        with pytest.raises(GRPCError, match="another plugin has registered"):
            await client.allocate("a")


class Told:
    """An allocation that asks of each ID whether the kubelet was told, and hands nothing out."""

    def __init__(self) -> None:
        self.answers: dict[str, bool] = {}

    async def allocate(self, resource: str, ids: Sequence[str], told: Callable[[str], bool]) -> wire.Encoded:
        self.answers = {device_id: told(device_id) for device_id in ids}
        raise AllocationRefused("Not today.")


async def ask(client: Client, told: Told, *ids: str) -> dict[str, bool]:
    with pytest.raises(GRPCError) as caught:
        await client.allocate(*ids)
    assert (caught.value.status, caught.value.message) == (Status.FAILED_PRECONDITION, "Not today.")
    return told.answers


async def test_only_ids_in_the_last_list_sent_were_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(monkeypatch), Told()
    monkeypatch.setattr(plugin_module, "REMEMBERED", 0.0)
    plugin = Plugin(TOY, told.allocate)
    lists = Lists(plugin)
    with caplog.at_level(logging.WARNING):
        async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
            lists.put("a", "b")
            assert await ask(client, told, "a", "x") == {"a": False, "x": False}
            async with client.watch() as stream:
                await listed(stream)
                assert await ask(client, told, "a", "b", "x") == {"a": True, "b": True, "x": False}
                for n in range(CREDIT - 2):
                    lists.put("b", numa_node=n)
                    await listed(stream)
                lists.drop("a")
                assert await listed(stream) == healthy("b")
                lists.put("a")  # back, but the message that says so waits for its turn
                assert await ask(client, told, "a", "b") == {"a": False, "b": True}
                clock.now += COALESCE * 1.01
                assert await listed(stream) == healthy("ba")
                assert await ask(client, told, "a") == {"a": True}
    assert caplog.records == [], "an expected refusal is no news to grpclib"


class Clock:
    """In place of the plugin's: it stands still, but for what a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(plugin_module, "time", self)
        monkeypatch.setattr(plugin_module, "REMEMBERED", 10 * COALESCE)

    def monotonic(self) -> float:
        return self.now


async def asking(client: Client, plugin: Plugin, told: Told, device_id: str) -> asyncio.Task[dict[str, bool]]:
    """An Allocate that has come to the plugin."""
    task = asyncio.create_task(ask(client, told, device_id))
    await until(lambda: plugin.allocating)
    return task


async def goes_and_comes(clock: Clock, lists: Lists, stream: Any) -> None:
    """The ID `a` leaves the list, and the next one has it again."""
    for change in (lists.drop, lists.put):
        clock.now += COALESCE
        change("a")
        await listed(stream)


async def test_an_id_that_is_back_is_given_once_the_kubelet_can_be_at_no_list_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have asked for the ID before it read the list that lacked it, and crash at our reply."""
    clock, told = Clock(monkeypatch), Told()
    plugin = Plugin(TOY, told.allocate)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        lists.put("a", "b", "c")
        async with client.watch() as stream:
            await listed(stream)
            clock.now += COALESCE
            lists.drop("a")
            await listed(stream)
            assert await ask(client, told, "a") == {"a": False}, "what is gone is not waited for"
            clock.now += COALESCE
            lists.put("a")
            lists.drop("c")
            lists.put("c", "new")  # no list lacked c
            assert await listed(stream) == healthy(["a", "b", "c", "new"])
            assert await ask(client, told, "b", "c", "new") == {"b": True, "c": True, "new": True}
            waits = await asking(client, plugin, told, "a")
            clock.now += 8 * COALESCE
            pass_time(10 * COALESCE)
            await settled()
            assert not waits.done(), "a moment too early"
            clock.now += 2 * COALESCE
            pass_time(10 * COALESCE)
            assert await waits == {"a": True}
            lists.drop("b")
            await listed(stream)
            assert plugin._left.keys() == {"b"}, "what is long past is forgotten"


class Reader:
    """A kubelet's end of a stream: the lists that it was sent, and when."""

    peer = SimpleNamespace(_transport=SimpleNamespace(is_unread=lambda: False))

    def __init__(self, clock: Clock) -> None:
        self.lists: list[tuple[float, frozenset[str]]] = []
        self._clock = clock

    async def recv_message(self) -> wire.Encoded:
        return wire.Encoded()

    async def send_message(self, message: Any) -> None:
        ids = frozenset(device_id for device_id, *_ in wire.DeviceList.parse(bytes(message)).devices)
        self.lists.append((self._clock.now, ids))

    def may_lack(self, device_id: str, now: float) -> bool:
        """Whether the kubelet may be at a list without this ID: the last one, or one sent less than `REMEMBERED` ago."""
        took_away = [
            at
            for (_, before), (at, after) in itertools.pairwise(self.lists)
            if device_id in before and device_id not in after
        ]
        is_recent = any(now - at < plugin_module.REMEMBERED for at in took_away)
        return is_recent or device_id not in self.lists[-1][1]


@example([("a", 60), *[("b", 1)] * 5])
@given(st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0, 1, 2, 5, 60])), max_size=10))
def test_no_id_is_given_that_a_list_the_kubelet_may_be_at_lacks_and_lists_never_come_too_often(
    flips: list[tuple[str, int]],
) -> None:
    """However quickly what leaves the list comes back; the steps are fifths of the pause between lists."""

    async def play() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            clock = Clock(monkeypatch)
            plugin, reader = Plugin(TOY, nothing), Reader(clock)
            lists = Lists(plugin)
            lists.put("a", "b", "c")
            stream = asyncio.ensure_future(plugin.list_and_watch(cast("Any", reader)))
            await turns()
            for device_id, steps in [*flips, ("c", 10)]:
                (lists.drop if device_id in lists.listing.slots else lists.put)(device_id)
                for _ in range(steps):
                    await turns()
                    for asked in "abc":
                        assert plugin._was_told(asked) is not reader.may_lack(asked, clock.now)
                    clock.now += 0.2 * COALESCE
                    pass_time(0.2 * COALESCE)
            assert reader.lists[-1][1] == lists.listing.slots.keys(), "the last list is right"
            for (earlier, _), (later, _) in zip(reader.lists, reader.lists[CREDIT:], strict=False):
                assert later - earlier >= COALESCE * 0.999
            plugin.end_stream()
            await stream

    asyncio.run(play())


async def turns() -> None:
    """Nothing that is played here needs more turns of the loop."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_id_that_leaves_again_while_an_allocate_waits_for_it_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, told = Clock(monkeypatch), Told()
    plugin = Plugin(TOY, told.allocate)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        lists.put("a", "b")
        async with client.watch() as stream:
            await listed(stream)
            await goes_and_comes(clock, lists, stream)
            waits = await asking(client, plugin, told, "a")
            await goes_and_comes(clock, lists, stream)
            clock.now += 8 * COALESCE
            pass_time(10 * COALESCE)
            await settled()
            assert not waits.done(), "it is remembered from its second leaving"
            lists.drop("a")
            await listed(stream)
            pass_time(10 * COALESCE)
            assert await waits == {"a": False}


async def test_an_id_of_a_name_that_another_plugin_takes_while_an_allocate_waits_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelet has the other plugin's list by then, and would crash at our reply."""
    clock = Clock(monkeypatch)
    plugin = Plugin(TOY, nothing)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        lists.put("a", "b")
        async with client.watch() as stream:
            await listed(stream)
            await goes_and_comes(clock, lists, stream)
            waits = asyncio.create_task(client.allocate("a"))
            await until(lambda: plugin.allocating)
            plugin.silence(True)
            clock.now += 11 * COALESCE
            pass_time(10 * COALESCE)
            with pytest.raises(GRPCError, match=r"another plugin has registered example\.com/toy while"):
                await waits


async def test_an_id_that_is_back_is_given_a_second_after_the_last_record_of_a_kubelet_whose_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes a record at each list that it reads, and may only now be on its way to the one that lacked the ID."""
    clock, told, written = Clock(monkeypatch), Told(), itertools.count()
    number = next(written)
    plugin = Plugin(TOY, told.allocate, record=lambda: number)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        lists.put("a", "b")
        async with client.watch() as stream:
            await listed(stream)
            await goes_and_comes(clock, lists, stream)
            waits = await asking(client, plugin, told, "a")
            for _ in range(3):
                clock.now += 8 * COALESCE
                number = next(written)
                pass_time(10 * COALESCE)
                await settled()
                assert not waits.done()
            clock.now += 11 * COALESCE
            pass_time(10 * COALESCE)
            assert await waits == {"a": True}


async def test_an_id_that_left_in_a_list_that_says_nothing_of_changes_is_remembered_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, plugin = Clock(monkeypatch), Plugin(TOY, nothing)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        lists.put("a", "b")
        async with client.watch() as stream:
            await listed(stream)
            clock.now += COALESCE
            lists.listing.drop("a")
            lists.listing.snapshot()  # never published
            lists.publish()
            assert await listed(stream) == healthy("b")
            clock.now += COALESCE
            lists.put("a")
            await listed(stream)
            assert (plugin._was_told("a"), plugin._was_told("b")) == (False, True)


async def test_another_stream_is_another_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(monkeypatch), Told()
    plugin = Plugin(TOY, told.allocate)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin), connected(tmp_path / "s") as client:
        lists.put("a", "b")
        async with client.watch() as stream:
            await listed(stream)
            clock.now += COALESCE
            lists.drop("a")
            await listed(stream)
        await until(lambda: not plugin.streaming)
        lists.put("a")
        async with client.watch() as stream:
            await listed(stream)
            assert await ask(client, told, "a") == {"a": True}


async def test_an_id_that_returns_with_the_list_under_way_was_not_told(tmp_path: Path) -> None:
    told = Told()
    plugin = Plugin(TOY, told.allocate)
    lists = Lists(plugin)
    async with served(tmp_path / "s", plugin) as server, connected(tmp_path / "s") as client:
        lists.put("a", "b", *more_than_fits())
        lists.drop("a")
        with RawClient(tmp_path / "s") as stalled:
            await stalled.ask("/v1beta1.DevicePlugin/ListAndWatch")
            await until(lambda: plugin._sending is not None)
            assert await ask(client, told, "b") == {"b": False}, "nothing has been sent as a whole yet"
            plugin._sent = {**lists.listing.slots, "a": Slot("a", device("a"), HEALTHY)}  # as of a list before
            lists.put("a")
            assert await ask(client, told, "a", "b") == {"a": False, "b": True}
            server.reset_connections()


async def test_a_kubelet_that_goes_while_an_allocate_is_being_answered_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked, gone = asyncio.Event(), asyncio.Event()

    async def allocate(*_: object) -> wire.Encoded:
        asked.set()
        with suppress(asyncio.CancelledError):  # as a timeout does that comes at the same time
            await asyncio.Event().wait()
        gone.set()
        return wire.Encoded()

    plugin = Plugin(TOY, allocate)
    Lists(plugin).put("a")
    async with served(tmp_path / "toy.sock", plugin):
        with caplog.at_level(logging.WARNING):
            async with connected(tmp_path / "toy.sock") as client:
                call = asyncio.ensure_future(client.allocate("a"))
                async with limit():
                    await asked.wait()
            async with limit():
                await gone.wait()
            await settled()
            await asyncio.gather(call, return_exceptions=True)
    assert caplog.records == []
