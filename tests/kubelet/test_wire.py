from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.kubelet import wire
from agent.kubelet.api import dra, v1
from agent.kubelet.api import v1beta1 as api
from agent.kubelet.wire import (
    ClaimsCall,
    Codec,
    DeviceList,
    EmptyCall,
    Encoded,
    MalformedError,
    PluginOptions,
    PodDevices,
    PreferredRequest,
    PreparedDevice,
    RegistrationStatus,
    allocatable_devices,
    device_head,
    device_tail,
    encode_allocatable,
    encode_allocate,
    encode_health,
    encode_ids,
    encode_options,
    encode_plugin_info,
    encode_preferred,
    encode_prepared,
    encode_register,
    encode_unprepared,
    fields,
    join_list,
    list_item,
    pod_devices,
    read_allocate,
    varint,
)
from backends.base import ContainerEdits, HostPath, Mount, Node

text = st.text(st.characters(codec="utf-8"), max_size=12)
long_text = text | st.integers(120, 70_000).map(lambda size: "x" * size)
numa = st.none() | st.integers(0, 2**63 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
host_paths = text.map(lambda below: HostPath("/" + below))
nodes = st.builds(Node, host_paths, text, text)
mounts = st.builds(Mount, host_paths, text, st.booleans())
env = st.dictionaries(text.filter(bool), long_text, max_size=3)  # betterproto loses an entry that is empty altogether
edits = st.builds(
    ContainerEdits,
    st.lists(nodes, max_size=3).map(tuple),
    st.lists(mounts, max_size=3).map(tuple),
    env,
    env,
    st.lists(text.filter(bool), max_size=3).map(tuple),
)
quick = settings(deadline=None, max_examples=50)


def item(device_id: str, healthy: bool, numa_node: int | None) -> bytes:
    return list_item(device_head(device_id), device_tail(healthy, numa_node))


def read_pods(data: bytes) -> tuple[PodDevices, ...]:
    return tuple(pod_devices(data))


def read_allocatable(data: bytes) -> list[tuple[str, tuple[str, ...]]]:
    return list(allocatable_devices(data))


def device(device_id: str, healthy: bool, numa_node: int | None) -> api.Device:
    made = api.Device(id=device_id, health="Healthy" if healthy else "Unhealthy")
    if numa_node is not None:
        made.topology = api.TopologyInfo(nodes=[api.NumaNode(id=numa_node)])
    return made


@quick
@given(st.lists(st.tuples(long_text, st.booleans(), numa), max_size=8))
def test_a_list_is_written_as_betterproto_writes_it(devices: list[tuple[str, bool, int | None]]) -> None:
    mine = join_list(item(*each) for each in devices)
    assert mine == bytes(api.ListAndWatchResponse(devices=[device(*each) for each in devices]))


@quick
@given(st.lists(st.tuples(long_text, text, st.none() | st.lists(int64, max_size=3)), max_size=8))
def test_a_list_is_read_as_betterproto_wrote_it(devices: list[tuple[str, str, list[int] | None]]) -> None:
    written = [api.Device(id=device_id, health=health) for device_id, health, _ in devices]
    for made, (_, _, ids) in zip(written, devices, strict=True):
        if ids is not None:
            made.topology = api.TopologyInfo(nodes=[api.NumaNode(id=node) for node in ids])
    read = DeviceList.parse(bytes(api.ListAndWatchResponse(devices=written)))
    assert read.devices == tuple((device_id, health, tuple(ids or ())) for device_id, health, ids in devices)


@quick
@given(st.lists(edits, max_size=3))
def test_an_allocate_reply_is_written_as_betterproto_writes_it(containers: list[ContainerEdits]) -> None:
    replies = [
        api.ContainerAllocateResponse(
            envs=dict(each.env),
            mounts=[api.Mount(m.container_path, m.path.text, m.read_only) for m in each.mounts],
            devices=[api.DeviceSpec(n.container_path, n.path.text, n.permissions) for n in each.nodes],
            annotations=dict(each.annotations),
            cdi_devices=[api.CdiDevice(name) for name in each.cdi_devices],
        )
        for each in containers
    ]
    assert encode_allocate(containers) == bytes(api.AllocateResponse(container_responses=replies))


@quick
@given(text, long_text, text, st.booleans(), st.booleans())
def test_a_registration_is_written_as_betterproto_writes_it(
    version: str, endpoint: str, resource: str, pre_start: bool, prefers: bool
) -> None:
    options, theirs = PluginOptions(pre_start, prefers), api.DevicePluginOptions(pre_start, prefers)
    assert encode_options(options) == bytes(theirs)
    assert encode_register(version, endpoint, resource, options) == bytes(
        api.RegisterRequest(version, endpoint, resource, theirs)
    )


@quick
@given(st.lists(long_text, max_size=5))
def test_what_is_handed_on_to_a_standby_is_written_as_betterproto_writes_it(ids: list[str]) -> None:
    assert encode_preferred([ids]) == bytes(api.AllocateRequest([api.ContainerAllocateRequest(ids)]))
    assert encode_ids(ids) == bytes(api.PreStartContainerRequest(ids))


@quick
@given(st.lists(st.lists(long_text, max_size=5), max_size=3))
def test_an_allocate_request_is_read_as_betterproto_wrote_it(containers: list[list[str]]) -> None:
    request = api.AllocateRequest(container_requests=[api.ContainerAllocateRequest(ids) for ids in containers])
    assert read_allocate(bytes(request)) == tuple(map(tuple, containers))


@quick
@given(st.lists(st.tuples(st.lists(long_text), st.lists(text), st.integers(-(2**31), 2**31 - 1)), max_size=3))
def test_a_preference_request_is_read_as_betterproto_wrote_it(
    containers: list[tuple[list[str], list[str], int]],
) -> None:
    wishes = [api.ContainerPreferredAllocationRequest(*each) for each in containers]
    read = wire.read_preferred(bytes(api.PreferredAllocationRequest(wishes)))
    assert read == tuple(PreferredRequest(tuple(a), tuple(m), size) for a, m, size in containers)


@quick
@given(st.lists(st.lists(long_text, max_size=5), max_size=3))
def test_a_preference_is_written_as_betterproto_writes_it(containers: list[list[str]]) -> None:
    replies = [api.ContainerPreferredAllocationResponse(ids) for ids in containers]
    assert encode_preferred(containers) == bytes(api.PreferredAllocationResponse(replies))


@quick
@given(
    st.lists(
        st.tuples(text, text, st.lists(st.tuples(text, st.lists(st.tuples(text, st.lists(text)), max_size=2)))),
        max_size=4,
    )
)
def test_a_pod_list_is_read_as_betterproto_wrote_it(pods: Any) -> None:
    written = v1.ListPodResourcesResponse(
        [
            v1.PodResources(
                name,
                namespace,
                [v1.ContainerResources(c, [v1.ContainerDevices(r, ids) for r, ids in devices]) for c, devices in parts],
            )
            for name, namespace, parts in pods
        ]
    )
    assert read_pods(bytes(written)) == tuple(
        PodDevices(namespace, name, container, resource, tuple(ids))
        for name, namespace, parts in pods
        for container, devices in parts
        for resource, ids in devices
    )


@quick
@given(text, st.lists(text.filter(bool), max_size=2))
def test_what_a_container_has_by_resource_claims_is_read_as_betterproto_wrote_it(claim: str, cdi: list[str]) -> None:
    by_claim = [v1.DynamicResource(claim, "ns", [v1.ClaimResource([v1.CdiDevice(it)], "d", "p", "n") for it in cdi])]
    container = v1.ContainerResources("c", dynamic_resources=by_claim)
    written = v1.ListPodResourcesResponse([v1.PodResources("pod", "ns", [container])])
    assert read_pods(bytes(written)) == (PodDevices("ns", "pod", "c", claim=claim, cdi_devices=tuple(cdi)),)


@quick
@given(st.lists(st.tuples(text, st.lists(text, max_size=2)), max_size=4))
def test_what_can_be_given_out_is_read_as_betterproto_wrote_it(entries: list[tuple[str, list[str]]]) -> None:
    written = v1.AllocatableResourcesResponse([v1.ContainerDevices(name, ids) for name, ids in entries])
    assert read_allocatable(bytes(written)) == [(name, tuple(ids)) for name, ids in entries]


@quick
@given(st.lists(st.tuples(text, st.lists(text, max_size=2)), max_size=4))
def test_a_simulated_kubelet_says_what_can_be_given_out_as_betterproto_would(
    resources: list[tuple[str, list[str]]],
) -> None:
    devices = [v1.ContainerDevices(name, [device]) for name, ids in resources for device in ids if device]
    written = encode_allocatable((name, [device for device in ids if device]) for name, ids in resources)
    assert written == bytes(v1.AllocatableResourcesResponse(devices))


parsers = pytest.mark.parametrize("parse", [DeviceList.parse, read_allocate, read_pods, read_allocatable])


@parsers
@quick
@given(data=st.binary(max_size=200))
def test_bytes_that_are_no_message_raise_only_what_is_said(parse: Callable[[bytes], object], data: bytes) -> None:
    with suppress(MalformedError):
        parse(data)


@parsers
@quick
@given(data=st.data())
def test_a_damaged_message_raises_only_what_is_said(parse: Callable[[bytes], object], data: st.DataObject) -> None:
    whole = bytearray(_sample(parse))
    for at in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[at] = data.draw(st.integers(0, 255))
    with suppress(MalformedError):
        parse(bytes(whole[: data.draw(st.integers(0, len(whole)))]))


def _sample(parse: Callable[[bytes], object]) -> bytes:
    if parse == DeviceList.parse:
        return bytes(api.ListAndWatchResponse([device("gpu-é", True, 300), device("b", False, None)]))
    if parse == read_allocate:
        return bytes(api.AllocateRequest([api.ContainerAllocateRequest(["gpu-é", "b"])]))
    devices = [v1.ContainerDevices("a/b", ["gpu-é", "b"])]
    if parse == read_allocatable:
        return bytes(v1.AllocatableResourcesResponse(devices))
    return bytes(v1.ListPodResourcesResponse([v1.PodResources("p", "n", [v1.ContainerResources("c", devices)])]))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"\x0a", "within a number"),
        (b"\x0a\x05abc", "within a field"),
        (b"\x09\0\0\0", "within a field"),
        (b"\x0d\0\0", "within a field"),
        (b"\x08" + b"\xff" * 10, "more than 64 bits"),
        (b"\x08" + b"\xff" * 9 + b"\x02", "more than 64 bits"),
        (b"\x0b", "wire type 3"),
        (b"\x02\x00", "field number 0"),
        (b"\x08\x01", "a number where a message is due"),
        (b"\x0a\x03\x0a\x01\xff", "not UTF-8"),
    ],
)
def test_what_is_wrong_with_a_message_is_said(data: bytes, what: str) -> None:
    with pytest.raises(MalformedError, match=what):
        read_allocate(data)


def test_fields_of_a_newer_kubelet_are_passed_over() -> None:
    fixed64, fixed32, number, bytes_ = b"\x79" + b"1" * 8, b"\x7d" + b"1" * 4, b"\x78\x01", b"\x7a\x01x"
    newer = fixed64 + fixed32 + number + bytes_
    assert read_allocate(newer + b"\x0a\x05" + b"\x0a\x01a" + number + newer) == (("a",),)
    read = DeviceList.parse(newer + wire._field(1, newer + device_head("a") + newer + device_tail(True, 3) + newer))
    assert read.devices == (("a", "Healthy", (3,)),)


def test_the_last_of_a_repeated_single_field_counts() -> None:
    node = b"\x08\x01\x08\x02"
    twice = device_head("a") + device_head("b") + wire._field(3, wire._field(1, node))
    assert DeviceList.parse(wire._field(1, twice)).devices == (("b", "", (2,)),)
    assert api.NumaNode().parse(node).id == 2


@quick
@given(st.integers(0, 2**64 - 1))
def test_every_number_is_read_as_it_was_written(value: int) -> None:
    assert list(fields(b"\x08" + varint(value))) == [(1, value)]


def test_the_codec_passes_encoded_bytes_and_messages_and_nothing_else() -> None:
    codec = Codec()
    message = api.AllocateRequest([api.ContainerAllocateRequest(["a"])])
    assert codec.encode(Encoded(b"x"), api.AllocateRequest) == b"x"
    assert codec.encode(message, api.AllocateRequest) == bytes(message)
    assert codec.decode(bytes(message), api.AllocateRequest) == message
    assert codec.decode(bytes(message), Encoded) == Encoded(bytes(message))
    assert codec.decode(b"", EmptyCall) == EmptyCall()
    for wrong in (b"plain bytes", api.Empty(), None):
        with pytest.raises(TypeError, match="expected AllocateRequest or Encoded, got"):
            codec.encode(wrong, api.AllocateRequest)


@pytest.mark.parametrize("parse", [read_allocate, wire.read_ids])
def test_a_call_that_names_more_devices_than_any_pod_is_not_read_to_its_end(
    parse: Callable[[bytes], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def text(value: bytes) -> str:
        read.append(value)
        return value.decode()

    monkeypatch.setattr(wire, "text", text)
    ids = [f"x{n}" for n in range(60_000)]
    with pytest.raises(MalformedError, match="names more than 20,000 devices"):
        parse(wire.encode_preferred([ids]) if parse is read_allocate else wire.encode_ids(ids))
    assert len(read) == wire.MOST_IDS + 1
    for each in (read_allocate, wire.read_preferred):
        assert len(each(wire.encode_preferred([["a"]] * wire.MOST_CONTAINERS))) == wire.MOST_CONTAINERS
        with pytest.raises(MalformedError, match=r"(or|than) 100 containers"):
            each(wire.encode_preferred([[]] * 101))
    many = tuple(f"x{n}" for n in range(wire.MOST_IDS))
    assert wire.read_ids(wire.encode_ids(many)) == many
    assert read_allocate(wire.encode_preferred([many[:9], many[9:]])) == (many[:9], many[9:])


names = text.filter(bool)
prepared = st.builds(PreparedDevice, names, text, text, text, st.lists(names, max_size=3).map(tuple))


@quick
@given(text, text, text, st.lists(names, max_size=3), st.booleans())
def test_the_registration_of_a_driver_is_written_and_read_as_betterproto_does(
    kind: str, name: str, endpoint: str, versions: list[str], is_registered: bool
) -> None:
    info = dra.PluginInfo(kind, name, endpoint, versions)
    assert encode_plugin_info(kind, name, endpoint, versions) == bytes(info)
    status = bytes(dra.RegistrationStatus(is_registered, name))
    assert RegistrationStatus.parse(status) == RegistrationStatus(is_registered, name)


@quick
@given(st.lists(st.tuples(text, text, text), max_size=4))
def test_claims_are_read_as_betterproto_wrote_them(claims: list[tuple[str, str, str]]) -> None:
    assert ClaimsCall.parse(bytes(dra.Claims([dra.Claim(*it) for it in claims]))).claims == tuple(claims)


@quick
@given(st.dictionaries(names, st.tuples(st.lists(prepared, max_size=3), long_text), max_size=3))
def test_what_became_of_claims_is_read_by_betterproto_as_it_was_written(
    claims: dict[str, tuple[list[PreparedDevice], str]],
) -> None:
    read = dra.PreparedClaims.FromString(encode_prepared(claims)).claims
    told = {
        uid: (
            [
                PreparedDevice(request, it.pool_name, it.device_name, it.share_id or "", tuple(it.cdi_device_ids))
                for it in answer.devices
                for request in it.request_names
            ],
            answer.error,
        )
        for uid, answer in read.items()
    }
    assert told == claims
    errors = {uid: error for uid, (_, error) in claims.items()}
    ended = dra.UnpreparedClaims.FromString(encode_unprepared(errors)).claims
    assert {uid: it.error for uid, it in ended.items()} == errors


@quick
@given(st.lists(st.tuples(names, names, st.booleans(), st.integers(1, 2**40), st.integers(1, 1000), text), max_size=3))
def test_the_health_of_devices_is_written_as_betterproto_writes_it(
    devices: list[tuple[str, str, bool, int, int, str]],
) -> None:
    ours, theirs = b"", []
    for pool, device, is_well, at, lasts, message in devices:
        ours += encode_health(pool, device, is_well=is_well, at=at, lasts=lasts, message=message)
        health = dra.HealthStatus(dra.HealthStatus.HEALTHY if is_well else dra.HealthStatus.UNHEALTHY)
        identity = dra.DeviceIdentifier(pool, device)
        theirs.append(
            dra.DeviceHealth(
                identity, health, last_updated_time=at, health_check_timeout_seconds=lasts, message=message
            )
        )
    assert ours == bytes(dra.HealthList(theirs))


@pytest.mark.parametrize("data", [b"\x0a\x02\x08\x01", b"\x0a\x03\x0a\x01\xff", b"\x0a\x05\x0a", b"\x08\x01"])
def test_claims_that_make_no_sense_are_malformed(data: bytes) -> None:
    with pytest.raises(MalformedError):
        ClaimsCall.parse(data)
