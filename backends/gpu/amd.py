"""Finds AMD's GPUs and the partitions of those that are divided, and hands them out as ROCm's k8s-device-plugin does.

A divided GPU is its own first partition; the others are platform devices, which kernels name `amdgpu_xcp_1` or
`amdgpu_xcp.1`. /dev/kfd belongs to all GPUs.

Its compute driver's topology (KFD) tells which node is which GPU, and how they are linked. Format:
drivers/gpu/drm/amd/amdkfd/kfd_topology.c; one `name value` a line. A node is told by its DRM device: the PCI function for a GPU
or its first partition, a platform device for each other one (amdgpu_xcp.c). `location_id` alone does not tell: kernels have put
the partition's number into its lowest bits, into its highest four, and nowhere.

AMD's metrics exporter (device-metrics-exporter, with its own thresholds for ECC errors) answers one gRPC call on a socket of the
host. If it is missing or does not answer, no GPU is unhealthy for it.
Source: `metricssvc.proto` and `internal/pkg/exporter/health.go` of ROCm/k8s-device-plugin.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from msgspec.structs import replace

from backends.base import Device, Discovery, Host, HostPath, Link, Problem, Signal, Verdict
from backends.gpu import nodes
from backends.gpu.nodes import Wanted
from backends.gpu.vendor import Attributes, Vendor, described, driver_fault, gpu, is_gpu, part, stripped
from backends.linux import pci, sysfs

if TYPE_CHECKING:
    from h2.connection import H2Connection
    from h2.events import Event


DRIVER: Final = "amdgpu"
KFD: Final = HostPath("/dev/kfd")
PLATFORM: Final = "/devices/platform/"
"""The kernel's events of partitions have such a path."""

TOGETHER: Final = "kfd"
"""The unit for what all GPUs have together."""

WHOLE: Final = "spx"
"""The compute partition of a GPU that is not divided."""

_PARTS: Final[Mapping[str, int]] = {"dpx": 2, "tpx": 3, "qpx": 4}
"""Partitions of a GPU that is divided so (aqua_vanjaram.c); with cpx there is one for each of its XCCs."""

_PARTITIONS: Final = ("current_compute_partition", "current_memory_partition")


class Amd(Vendor):
    """Finds AMD's GPUs and hands them out."""

    group = TOGETHER

    def found(self, function: pci.Function) -> Discovery:
        """The GPU, or its first partition."""
        wanted = (Wanted(KFD), *nodes.drm(self.host, function.path, function.drm))
        unusable = driver_fault(function, DRIVER)
        if not unusable and len(wanted) == 1:
            unusable = "its driver has not made its DRM devices"
        unusable = unusable or nodes.fault(self.host, wanted) or ""
        attributes = self._described(function)
        (identity,) = attributes.get("uuid", (None,))
        return Discovery((stripped(gpu(function, wanted, attributes, identity=identity), unusable),))

    def _described(self, function: pci.Function) -> Attributes:
        read = {
            name: _printable(sysfs.attribute(self.host, function.path / name))
            for name in ("unique_id", "serial_number", "product_name", *_PARTITIONS)
        }
        compute, memory = ((read[name] or "").lower() for name in _PARTITIONS)
        return described(
            function,
            uuid=read["unique_id"],
            serial=read["serial_number"],
            model=read["product_name"],
            compute_partition=compute,
            memory_partition=memory,
            partition=f"{compute}_{memory}" if compute and memory else None,
        )

    def together(self) -> Discovery:
        """The partitions beyond the first ones, and the XGMI links."""
        known = kfd_nodes(self.host)
        return Discovery(tuple(self._partitions(known)), tuple(kfd_links(known)), problems=tuple(self._lost(known)))

    def _partitions(self, known: Iterable[KfdNode]) -> Iterator[Device]:
        """The partitions that KFD assigns to a GPU. The driver makes more than it needs; the others are not in use."""
        whole: dict[str, pci.Function | None] = {}
        for node in known:
            if node.device is None or node.device.name == node.address:
                continue
            if node.address not in whole:
                whole[node.address] = pci.read(self.host, node.address)
            function = whole[node.address]
            if function is not None and is_gpu(function.vendor, function.kind):
                yield self._partition(node.device, function)

    def _lost(self, known: Collection[KfdNode]) -> Iterator[Problem]:
        """A problem for each divided GPU of which not all partitions are found.

        KFD has no node for a partition without a DRM device, but for the same partition of other GPUs of the model.
        """
        by_gpu = defaultdict[str, list[KfdNode]](list)
        for node in known:
            by_gpu[node.address].append(node)
        modes = {it: (sysfs.attribute(self.host, pci.FUNCTIONS / it / _PARTITIONS[0]) or "").lower() for it in by_gpu}
        divided = {it: parts for it, parts in by_gpu.items() if modes[it] not in ("", WHOLE)}
        most = defaultdict[tuple[str, int], int](int)
        for address, parts in divided.items():
            like = modes[address], parts[0].model
            most[like] = max(most[like], len(parts), _PARTS.get(modes[address], 0))
        for address, parts in divided.items():
            found = sum(part.device is not None for part in parts)
            if found < (meant := most[modes[address], parts[0].model]):
                yield Problem(
                    address,
                    f"{found} of {meant} partitions of {address} are found: the others have no DRM device. The kernel's "
                    "log says why; before Linux 6.12 it has room for 64, a server's own screen among them",
                )

    def _partition(self, device: HostPath, function: pci.Function) -> Device:
        wanted = (Wanted(KFD), *nodes.drm(self.host, device, sysfs.names(self.host, device / "drm")))
        unusable = driver_fault(function, DRIVER) or nodes.fault(self.host, wanted) or ""
        attributes = self._described(function)
        told = (*attributes.get("uuid", (function.ids,)), *attributes.get("partition", ()))
        found = part(gpu(function, (), attributes), device.name, wanted, attributes)
        return stripped(replace(found, unit=TOGETHER, identity=" ".join(told)), unusable)

    def probe(self, device: Device) -> Iterator[Signal]:
        """A signal if AMD's metrics exporter finds the GPU unhealthy."""
        whole = f"pci:{device.unit}"
        if whole in device.hardware and exporter_states(self.host).get(device.unit) == UNHEALTHY:
            why = "AMD's metrics exporter finds it unhealthy; its log and its metrics say why"
            yield Signal(whole, "exporter-unhealthy", Verdict.NOW, why)

    def directories(self, addresses: Iterable[str]) -> Iterable[HostPath]:  # noqa: ARG002  # an interface's
        """Where the nodes are."""
        return [KFD.parent, nodes.DRI]

    def concerned(self, path: HostPath, addresses: Sequence[str]) -> Iterable[str]:
        """All GPUs, if the path is a node of theirs."""
        is_node = path in (KFD, KFD.parent, nodes.DRI) or path.parent == nodes.DRI
        return (*addresses, TOGETHER) if is_node else ()


def _printable(text: str | None) -> str | None:
    return text if text and text.isprintable() else None


# --- KFD's topology ---


TOPOLOGY: Final = HostPath("/sys/class/kfd/kfd/topology/nodes")
DRM: Final = HostPath("/sys/class/drm")

_XGMI: Final = 11  # CRAT_IOLINK_TYPE_XGMI in kfd_crat.h
_LINE: Final = re.compile(r"^([a-z_]{1,40}) (\d{1,20})$", re.MULTILINE)


class KfdNode(Struct, frozen=True):
    """A GPU, or a partition of one, in the topology."""

    number: int
    address: str
    """The address of the GPU."""
    device: HostPath | None
    """What has its DRM nodes: the GPU's PCI function, or a partition's platform device; None if it is not there."""
    model: int
    """The PCI device ID."""
    links: Mapping[int, int]
    """Node number → number of XGMI links to it."""


def kfd_nodes(host: Host) -> list[KfdNode]:
    """Every node that is a GPU or a partition, in order; what cannot be read is left out.

    The nodes of a GPU follow each other, its first partition before the others (kgd2kfd_device_init in kfd_device.c).
    """
    numbers = sorted(int(name) for name in sysfs.names(host, TOPOLOGY) if re.fullmatch(r"[0-9]{1,6}", name))
    found, whole = list[KfdNode](), dict[tuple[int, int], str]()
    for number in numbers:
        said = _kfd_properties(host, TOPOLOGY / str(number) / "properties")
        minor = said.get("drm_render_minor", 0)
        if not minor or "location_id" not in said:
            continue  # a CPU
        node = sysfs.device(host, DRM / f"renderD{minor}")
        device = node.parent.parent if node else None
        domain, slot = said.get("domain", 0), said["location_id"] >> 3 & 0x1FFF  # bus and device, without the function
        if device is not None and pci.ADDRESS.fullmatch(device.name):
            whole[domain, slot] = device.name
        address = whole.get((domain, slot), f"{domain:04x}:{slot >> 5:02x}:{slot & 0x1F:02x}.0")
        found.append(KfdNode(number, address, device, said.get("device_id", 0), dict(_links_of(host, number))))
    return found


def kfd_links(nodes: Collection[KfdNode]) -> Iterator[Link]:
    """The pairs of GPUs that XGMI joins; partitions of two GPUs are joined as their GPUs are."""
    address = {node.number: node.address for node in nodes}
    pairs: dict[tuple[str, str], int] = {}
    for node in nodes:
        for other, count in node.links.items():
            if other in address and node.address < address[other]:
                pair = node.address, address[other]
                pairs[pair] = max(count, pairs.get(pair, 0))
    for (one, two), count in sorted(pairs.items()):
        yield Link(f"pci:{one}", f"pci:{two}", count)


def _links_of(host: Host, number: int) -> Iterator[tuple[int, int]]:
    directory = TOPOLOGY / str(number) / "io_links"
    for name in sysfs.names(host, directory):
        said = _kfd_properties(host, directory / name / "properties")
        if said.get("type") == _XGMI and "node_to" in said:
            one, all_of_them = said.get("min_bandwidth", 0), said.get("max_bandwidth", 0)
            yield said["node_to"], max(1, all_of_them // one if one else 1)  # the minimum is the bandwidth of one link


def _kfd_properties(host: Host, path: HostPath) -> dict[str, int]:
    text = sysfs.attribute(host, path) or ""
    return {name: int(value) for name, value in _LINE.findall(text)}


# --- AMD's metrics exporter ---


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


def exporter_states(host: Host) -> Mapping[str, str]:
    """PCI address → "healthy", "unhealthy" or "unknown"; empty where no exporter answers."""
    return _exporter_states(host, int(time.monotonic() // _KEPT_FOR))


@functools.lru_cache(maxsize=4)
def _exporter_states(host: Host, _moment: int) -> Mapping[str, str]:
    path = host.local(SOCKET)
    try:
        return dict(_states_in(_exporter_asked(os.fspath(path)))) if path.exists() else {}
    except (OSError, ValueError):  # it may be stopped at any time; health does not depend on it alone
        return {}


def _exporter_asked(path: str) -> bytes:
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
                if _answer_ends(http.receive_data(data), http, answer):
                    return bytes(answer)
            except ProtocolError as error:
                raise ValueError from error


def _answer_ends(events: list[Event], http: H2Connection, answer: bytearray) -> bool:
    from h2.events import DataReceived, StreamEnded, StreamReset  # noqa: PLC0415

    for event in events:
        if isinstance(event, DataReceived) and event.stream_id is not None:
            answer += event.data or b""
            if len(answer) > _MOST_BYTES:
                raise ValueError
            http.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
    return any(isinstance(event, StreamEnded | StreamReset) for event in events)


def _states_in(answer: bytes) -> Iterator[tuple[str, str]]:
    """The address and the health of each GPU in a gRPC message; nothing for an error, whose answer has no message.

    Raises:
        ValueError: it makes no sense.
    """
    for number, state in _fields(answer[5:]):
        if number == _STATE:
            said = {key: value.decode() for key, value in _fields(state)}
            yield said.get(_DEVICE, "").lower(), said.get(_HEALTH, "").lower()


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The fields of a protobuf message that are bytes, texts or messages; others are skipped.

    Source of the kinds: "Message Structure" of protobuf's encoding.

    Raises:
        ValueError: one is of a kind that there is not, or is cut off.
    """
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(message, at)
            continue
        size, at = (_FIXED[kind], at) if kind in _FIXED else _varint(message, at)
        if (kind != _LEN and kind not in _FIXED) or at + size > len(message):
            raise ValueError
        if kind == _LEN:
            yield tag >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A varint, and the offset of what follows it."""
    value = shift = 0
    while at < len(message) and shift < 64:  # bits
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not message[at - 1] & 0x80:
            return value, at
    raise ValueError
