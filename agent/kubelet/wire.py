"""The daemon's protobuf messages, read and written by hand; the simulated kubelet has betterproto's.

betterproto takes 57 us for one device and 189 us for an Allocate reply of four nodes, and a seventh of the daemon's start
to be imported. Here each device's bytes are made once and joined when a list is sent; requests are read field by field. The
tests compare every function with betterproto. Field numbers: kubelet contract, "Wire facts".
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, Self, TypeVar

from grpclib.encoding.base import CodecBase
from msgspec import Struct

from backends.base import ContainerEdits

# --- how protobuf writes numbers and fields ---

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # protobuf wire types


class MalformedError(ValueError):
    """The bytes are no protobuf message."""


def varint(value: int) -> bytes:
    """A non-negative integer as protobuf writes it."""
    out = bytearray()
    while value > 0x7F:
        out.append(0x80 | value & 0x7F)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The integer that begins there, and where the next thing begins.

    Raises:
        MalformedError: it is cut off, or has more than 64 bits.
    """
    value = shift = 0
    while True:
        try:
            byte = data[at]
        except IndexError:
            raise MalformedError("the message ends within a number") from None
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                raise MalformedError("a number has more than 64 bits")
            return value, at
        shift += 7
        if shift > 63:
            raise MalformedError("a number has more than 64 bits")


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order: number, and what it holds; without those of a fixed size.

    Raises:
        MalformedError: the bytes are cut off or no protobuf.
    """
    at, end = 0, len(data)
    while at < end:
        if data[at] < 0x80:  # as mostly
            key, at = data[at], at + 1
        else:
            key, at = read_varint(data, at)
        kind, number = key & 7, key >> 3
        if not number:
            raise MalformedError("there is no field number 0")
        if kind == BYTES:
            if at < end and data[at] < 0x80:  # as mostly
                size, at = data[at], at + 1
            else:
                size, at = read_varint(data, at)
            if at + size > end:
                raise MalformedError("the message ends within a field")
            yield number, data[at : at + size]
            at += size
        elif kind == VARINT:
            value, at = read_varint(data, at)
            yield number, value
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
            if at > end:
                raise MalformedError("the message ends within a field")
        else:
            raise MalformedError(f"wire type {kind} is not used by proto3")


HEALTHY: Final = "Healthy"  # exactly this counts as healthy (kubelet contract: A3)
UNHEALTHY: Final = "Unhealthy"


PLUGIN_SERVICE: Final = "/v1beta1.DevicePlugin/"
"""Before a method's name, in the path of a call to a plugin."""


class Encoded(bytes):
    """The wire form of a whole message."""

    __slots__ = ()


SENSELESS: Final = (MalformedError, AssertionError, NotImplementedError)
"""What grpclib raises where a message makes no sense: what `parse` does, one that is cut off, a compressed one."""

_Message = TypeVar("_Message")


class Codec(CodecBase):
    """Passes `Encoded` through, has a type's own `parse` read a message, leaves the rest to betterproto.

    This is all of ours that knows betterproto: `bytes(message)` writes one of its messages, `FromString` reads one.
    """

    __content_subtype__ = "proto"

    def encode(self, message: object, message_type: type[Any]) -> bytes:
        """The bytes of a message; plain `bytes` are refused, they would be a mistake."""
        if type(message) is Encoded:
            return message
        if not isinstance(message, message_type):
            raise TypeError(f"expected {message_type.__name__} or Encoded, got {type(message).__name__}")
        return bytes(message)

    def decode(self, data: bytes, message_type: type[_Message]) -> _Message:
        """The message in these bytes; an `Encoded` is left to the caller to read, it may be long."""
        if message_type is Encoded:
            return message_type(data)  # type: ignore[call-arg]
        read = getattr(message_type, "FromString", None)  # betterproto's
        return (read or message_type.parse)(data)  # type: ignore[attr-defined, no-any-return]


def messages(data: bytes, wanted: int) -> Iterator[bytes]:
    """The sub-messages (or strings, as bytes) of one repeated field."""
    for number, value in fields(data):
        if number == wanted:
            if not isinstance(value, bytes):
                raise MalformedError(f"field {wanted} is a number where a message is due")
            yield value


def text(value: bytes) -> str:
    """A string field.

    Raises:
        MalformedError: it is not UTF-8.
    """
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise MalformedError("a string is not UTF-8") from None


def strings(data: bytes, wanted: int) -> tuple[str, ...]:
    """The strings of one repeated field."""
    return tuple(text(value) for value in messages(data, wanted))


MOST_IDS: Final = 20_000
"""IDs that a call may name for hardware to be given or started: so many are read in 15 ms, and handled a few at a time."""

MOST_CONTAINERS: Final = 100
"""Containers that a call may be about. A kubelet's is about one (kubelet contract: A4); each has its claims written."""


def _each_containers_ids(containers: Iterable[bytes]) -> tuple[tuple[str, ...], ...]:
    """The IDs that each names in its field 1.

    Raises:
        MalformedError: there are more than `MOST_IDS`, or `MOST_CONTAINERS`; what follows these is not read.
    """
    found: list[tuple[str, ...]] = []
    left = MOST_IDS
    for container in containers:
        ids = tuple(text(value) for value in itertools.islice(messages(container, 1), left + 1))
        left -= len(ids)
        if left < 0 or len(found) == MOST_CONTAINERS:
            raise MalformedError(f"it names more than {MOST_IDS:,} devices, or {MOST_CONTAINERS} containers")
        found.append(ids)
    return tuple(found)


def _field(number: int, value: bytes) -> bytes:
    size = len(value)
    return bytes((number << 3 | BYTES, size)) + value if size < 0x80 else _long_field(number, value)


def _long_field(number: int, value: bytes) -> bytes:
    return bytes((number << 3 | BYTES,)) + varint(len(value)) + value


def _string(number: int, value: str) -> bytes:
    return _field(number, value.encode()) if value else b""


class EmptyCall(Struct, frozen=True):
    """An Empty; betterproto takes any bytes for one."""

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a request, whatever fields it has."""
        if data:
            for _ in fields(data):
                pass
        return cls()


# --- RegisterRequest{version=1, endpoint=2, resource_name=3, options=4}; DevicePluginOptions{pre_start_required=1,
# get_preferred_allocation_available=2} ---


class PluginOptions(NamedTuple):
    """What the kubelet is to ask for."""

    pre_start: bool = False
    """Before each start of a container."""
    preferred_allocation: bool = False
    """Which devices a pod should get."""


def encode_options(options: PluginOptions) -> Encoded:
    """The options by themselves, as GetDevicePluginOptions answers."""
    pre_start = b"\x08\x01" if options.pre_start else b""
    return Encoded(pre_start + (b"\x10\x01" if options.preferred_allocation else b""))


def encode_register(version: str, endpoint: str, resource: str, options: PluginOptions) -> Encoded:
    """A RegisterRequest; betterproto takes 110 us, a tenth of a registration where there are 100."""
    said = _string(1, version) + _string(2, endpoint) + _string(3, resource)
    return Encoded(said + _field(4, encode_options(options)))


# --- ListAndWatchResponse{devices=1}; Device{ID=1, health=2, topology=3} ---


_FIRST: Final = tuple(bytes((1 << 3 | BYTES, size)) for size in range(0x80))
"""What goes before a field 1 of so many bytes: written thousands of times where a device has many tokens."""


def device_head(device_id: str) -> bytes:
    """The part of a device that never changes; keep it as long as the ID is listed."""
    raw = device_id.encode()
    return _FIRST[len(raw)] + raw if 0 < len(raw) < 0x80 else _string(1, device_id)


@functools.lru_cache(maxsize=256)
def device_tail(healthy: bool, numa_node: int | None) -> bytes:
    """The part that changes: TopologyInfo{nodes=1}, NUMANode{ID=1}, left out where the node is unknown (A5)."""
    health = _string(2, HEALTHY if healthy else UNHEALTHY)
    if numa_node is None:
        return health
    node = b"\x08" + varint(numa_node) if numa_node else b""
    return health + _field(3, _field(1, node))


def list_item(head: bytes, tail: bytes) -> bytes:
    """One device as it stands in a list."""
    device = head + tail
    return _FIRST[len(device)] + device if len(device) < 0x80 else _long_field(1, device)


def join_list(items: Iterable[bytes]) -> Encoded:
    """The ListAndWatchResponse made of these items."""
    return Encoded(b"".join(items))


class DeviceList(Struct, frozen=True):
    """A ListAndWatchResponse as its receiver reads it: (ID, health, NUMA nodes) in their order."""

    devices: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a list; 10,000 devices take a second in betterproto and 60 ms here."""
        return cls(tuple(_parse_device(item) for item in messages(data, 1)))


def _parse_device(item: bytes) -> tuple[str, str, tuple[int, ...]]:
    device_id = health = ""
    nodes: list[int] = []
    for number, value in fields(item):
        if isinstance(value, int):
            continue
        if number == 1:
            device_id = text(value)
        elif number == 2:
            health = text(value)
        elif number == 3:
            nodes.extend(_parse_node(node) for node in messages(value, 1))
    return device_id, health, tuple(nodes)


def _parse_node(node: bytes) -> int:
    found = 0
    for number, value in fields(node):
        if number == 1 and isinstance(value, int):
            found = _signed(value)
    return found


def _signed(value: int) -> int:
    """An int32 or int64: negative ones are in two's complement, of 64 bits both."""
    return value - (1 << 64) if value >> 63 else value


# --- AllocateRequest{container_requests=1}; ContainerAllocateRequest{devices_ids=1} ---


def read_allocate(data: bytes) -> tuple[tuple[str, ...], ...]:
    """An AllocateRequest: the IDs that each container asks for.

    Raises:
        MalformedError: it is none, or asks for more than `MOST_IDS` or `MOST_CONTAINERS`.
    """
    return _each_containers_ids(messages(data, 1))


# --- PreferredAllocationRequest{container_requests=1} with {available=1, must_include=2, size=3} ---


class PreferredRequest(Struct, frozen=True):
    """One container's request: what may be chosen, what must be, and how many in all."""

    available: tuple[str, ...]
    must_include: tuple[str, ...]
    size: int


def read_preferred(data: bytes) -> tuple[PreferredRequest, ...]:
    """A PreferredAllocationRequest, by containers; 10,000 IDs take 37 ms in betterproto.

    Raises:
        MalformedError: it is none, or there are more containers than `MOST_CONTAINERS`.
    """
    containers = tuple(itertools.islice(messages(data, 1), MOST_CONTAINERS + 1))
    if len(containers) > MOST_CONTAINERS:
        raise MalformedError(f"it names more than {MOST_CONTAINERS} containers")
    return tuple(_parse_preferred(container) for container in containers)


def _parse_preferred(container: bytes) -> PreferredRequest:
    available: list[str] = []
    must_include: list[str] = []
    size = 0
    for number, value in fields(container):
        if number == 3 and isinstance(value, int):
            size = _signed(value)
        elif number in (1, 2) and isinstance(value, bytes):
            (available if number == 1 else must_include).append(text(value))
    return PreferredRequest(tuple(available), tuple(must_include), size)


def encode_preferred(containers: Iterable[Iterable[str]]) -> Encoded:
    """The PreferredAllocationResponse{container_responses=1} with {deviceIDs=1}; an AllocateRequest is the same on the wire."""
    return Encoded(b"".join(_field(1, encode_ids(ids)) for ids in containers))


# --- PreStartContainerRequest{devices_ids=1} ---


def read_ids(data: bytes) -> tuple[str, ...]:
    """The IDs of a PreStartContainerRequest.

    Raises:
        MalformedError: it is none, or there are more than `MOST_IDS`.
    """
    (ids,) = _each_containers_ids([data])
    return ids


def encode_ids(ids: Iterable[str]) -> Encoded:
    """The PreStartContainerRequest for these IDs."""
    return Encoded(b"".join(_field(1, device_id.encode()) for device_id in ids))


# --- AllocateResponse{container_responses=1} ---


def encode_allocate(containers: Iterable[ContainerEdits]) -> Encoded:
    """The AllocateResponse{container_responses=1} that hands these edits out."""
    said = bytearray()
    for edits in containers:
        parts = [_map(1, edits.env)]
        parts += [
            _field(2, _string(1, m.container_path) + _string(2, m.path.text) + (b"\x18\x01" if m.read_only else b""))
            for m in edits.mounts
        ]
        parts += [
            _field(3, _string(1, n.container_path) + _string(2, n.path.text) + _string(3, n.permissions))
            for n in edits.nodes
        ]
        parts.append(_map(4, edits.annotations))
        parts += [_field(5, _string(1, name)) for name in edits.cdi_devices]
        said += _field(1, b"".join(parts))
    return Encoded(said)


def _map(number: int, entries: Mapping[str, str]) -> bytes:
    # an entry is a message {key=1, value=2}
    return b"".join(_field(number, _string(1, key) + _string(2, value)) for key, value in entries.items())


# --- podresources v1: ListPodResourcesResponse{pod_resources=1}, and what it holds ---


class PodDevices(Struct, frozen=True, gc=False):
    """The IDs of one resource that one container holds, or what it has by a ResourceClaim."""

    namespace: str
    pod: str
    container: str
    resource: str = ""
    """Empty for what is had by a claim."""
    ids: tuple[str, ...] = ()
    claim: str = ""
    """The ResourceClaim's name; its namespace is the pod's."""
    cdi_devices: tuple[str, ...] = ()
    """What the container runtime is told for it."""


def pod_devices(data: bytes) -> Iterator[PodDevices]:
    """Read a ListPodResourcesResponse, which has an entry for each device; betterproto takes 22 ms for 110 pods.

    CPUs and memory are passed over.
    """
    return (entry for pod in messages(data, 1) for entry in _parse_pod(pod))


def _parse_pod(pod: bytes) -> Iterator[PodDevices]:
    name = "".join(strings(pod, 1)[-1:])
    namespace = "".join(strings(pod, 2)[-1:])
    for container in messages(pod, 3):
        container_name = "".join(strings(container, 1)[-1:])
        for devices in messages(container, 2):
            resource = "".join(strings(devices, 1)[-1:])
            yield PodDevices(namespace, name, container_name, resource, strings(devices, 2))
        for claimed in messages(
            container, 5
        ):  # DynamicResource{claim_name=2, claim_resources=4{cdi_devices=1{name=1}}}
            named = (it for device in messages(claimed, 4) for cdi in messages(device, 1) for it in strings(cdi, 1))
            claim = "".join(strings(claimed, 2)[-1:])
            yield PodDevices(namespace, name, container_name, claim=claim, cdi_devices=tuple(named))


def encode_allocatable(resources: Iterable[tuple[str, Iterable[str]]]) -> Encoded:
    """The AllocatableResourcesResponse{devices=1} of a simulated kubelet, one entry for each healthy device.

    betterproto takes 45 us for each, on the loop that the demo's agent runs on, too: 45 ms after each list for a thousand tokens.
    """
    return Encoded(
        b"".join(_field(1, _string(1, name) + _string(2, device)) for name, ids in resources for device in ids)
    )


def allocatable_devices(data: bytes) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Read an AllocatableResourcesResponse, what pods may be given: a resource and some of its healthy devices each."""
    for entry in messages(data, 1):
        yield "".join(strings(entry, 1)[-1:]), strings(entry, 2)


# --- DRA: RegistrationStatus{plugin_registered=1, error=2}; PluginInfo{type=1, name=2, endpoint=3, supported_versions=4} ---


class RegistrationStatus(NamedTuple):
    """Whether the kubelet has registered a plugin."""

    is_registered: bool
    error: str

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read it."""
        found = dict(fields(data))
        return cls(bool(found.get(1)), _text_in(found, 2))


def _text_in(found: Mapping[int, int | bytes], number: int) -> str:
    value = found.get(number, b"")
    if isinstance(value, int):
        raise MalformedError(f"field {number} is a number where a string is due")
    return text(value)


def encode_plugin_info(kind: str, name: str, endpoint: str, versions: Iterable[str]) -> Encoded:
    """What a plugin is, as its registration socket says."""
    said = [_string(1, kind), _string(2, name), _string(3, endpoint), *(_string(4, it) for it in versions)]
    return Encoded(b"".join(said))


# --- NodePrepareResourcesRequest and NodeUnprepareResourcesRequest{claims=1}, Claim{namespace=1, uid=2, name=3}; v1 and
# v1beta1 are the same on the wire ---


class ClaimsCall(NamedTuple):
    """The claims that are to be prepared, or not to be any more: namespace, UID and name of each."""

    claims: tuple[tuple[str, str, str], ...]

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read a request."""
        found = (dict(fields(it)) for it in messages(data, 1))
        return cls(tuple((_text_in(it, 1), _text_in(it, 2), _text_in(it, 3)) for it in found))


class PreparedDevice(NamedTuple):
    """One device of a claim that is ready."""

    request: str
    pool: str
    device: str
    share: str
    """Its `shareID`; empty where it has none."""
    cdi_devices: tuple[str, ...]
    """What the container runtime is told for it."""


def encode_prepared(claims: Mapping[str, tuple[Iterable[PreparedDevice], str]]) -> Encoded:
    """A NodePrepareResourcesResponse{claims=1}: by their UIDs, the devices of claims{devices=1, error=2}, and what failed.

    Device{request_names=1, pool_name=2, device_name=3, cdi_device_ids=4, share_id=5}.
    """
    said = {
        uid: b"".join(_field(1, _prepared(it)) for it in devices) + _string(2, error)
        for uid, (devices, error) in claims.items()
    }
    return Encoded(b"".join(_field(1, _string(1, uid) + _field(2, it)) for uid, it in said.items()))


def _prepared(it: PreparedDevice) -> bytes:
    cdi = b"".join(_string(4, name) for name in it.cdi_devices)
    return _string(1, it.request) + _string(2, it.pool) + _string(3, it.device) + cdi + _string(5, it.share)


def encode_unprepared(errors: Mapping[str, str]) -> Encoded:
    """A NodeUnprepareResourcesResponse{claims=1}: by the claims' UIDs, what failed{error=1}."""
    return Encoded(b"".join(_field(1, _string(1, uid) + _field(2, _string(1, it))) for uid, it in errors.items()))


def encode_health(pool: str, device: str, *, is_well: bool, at: int, lasts: int, message: str) -> bytes:
    """A NodeWatchResourcesResponse of one device; such messages one after the other are one.

    Device{device=1{pool_name=1, device_name=2}, health=2, last_updated_time=3, health_check_timeout_seconds=4, message=5}.
    """
    told = b"\x10\x01" if is_well else b"\x10\x02"
    times = b"\x18" + varint(at) + b"\x20" + varint(lasts)
    return _field(1, _field(1, _string(1, pool) + _string(2, device)) + told + times + _string(5, message))
