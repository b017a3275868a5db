"""Reads RDMA adapters (InfiniBand, RoCE, iWARP) from sysfs: their places, names, ports and device nodes.

A *place* is where adapters are: a PCI function (`0000:3b:00.0`) or a device on one (`0000:3b:00.0/mlx5_core.sf.4`), which in
switchdev mode may have several. Software adapters (rxe, siw) and those on no PCI bus have their own name as place (`rxe0`).
A name may change, a place does not.

The kernel knows by itself what is read here; what it asks the firmware for is in `infiniband/ports`. Missing means
unknown. Files: Documentation/ABI/stable/sysfs-class-infiniband.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Problem
from backends.linux import pci, sysfs

INFINIBAND: Final = HostPath("/sys/class/infiniband")
VERBS: Final = HostPath("/sys/class/infiniband_verbs")
NODES: Final = HostPath("/dev/infiniband")
"""All nodes lie in it, under their own names (`uverbs_devnode`, `umad_devnode` and `ucma_misc` in the kernel)."""
RDMA_CM: Final = NODES / "rdma_cm"
NETNS_MODE: Final = HostPath("/sys/module/ib_core/parameters/netns_mode")

_KINDS: Final = ("issm", "umad", "uverbs")  # in the order of the plugins that this replaces
_DIRECTORIES: Final = ("infiniband_mad", "infiniband_verbs")
_NODE: Final = re.compile(rf"({'|'.join(_KINDS)})(\d{{1,6}})")
_NUMBER: Final = re.compile(r"\d{1,10}:\d{1,10}")
_GUID: Final = re.compile(r"(?:[0-9a-f]{4}:){3}[0-9a-f]{4}")
_NO_GUID: Final = "0000:0000:0000:0000"  # of a virtual function that has been given none


class Port(Struct, frozen=True, order=True):
    """One port of an adapter."""

    hca: str
    number: int
    link_layer: str
    """`InfiniBand`, `Ethernet`, or "" if unknown."""

    def __str__(self) -> str:
        return f"{self.hca} port {self.number}"


class Hca(Struct, frozen=True):
    """An adapter in our network namespace."""

    name: str
    """`mlx5_0`, or as udev renamed it."""
    ports: tuple[Port, ...]
    node_guid: str = ""
    """`0c42:a103:0065:1a5e`; this and the rest are "" if unknown."""
    board_id: str = ""
    fw_ver: str = ""
    hca_type: str = ""


class RdmaNode(Struct, frozen=True):
    """A character device of an adapter as the kernel names it: what should be in /dev, not what is."""

    kind: str
    """`uverbs`, and of each port `umad` and `issm`."""
    path: HostPath
    number: str
    """Major and minor, `231:192`; "" if unknown."""
    hca: str
    """"" if unknown."""


class Adapter(Struct, frozen=True):
    """The adapters at one place, with their nodes."""

    place: str
    path: HostPath
    """The directory that its HCAs, nodes and interfaces are in."""
    address: str | None
    """The PCI function it is, or is on; None for software and off the PCI bus."""
    hcas: tuple[str, ...]
    """Those in our network namespace."""
    away: tuple[str, ...]
    """HCAs with nodes here that cannot be seen: another network namespace has them, or they are being removed."""
    nodes: tuple[RdmaNode, ...]
    netdevs: tuple[str, ...]
    """`ib0`, `eth3`."""
    subfunction: str | None = None
    """The number given to `devlink port add … sfnum`, or else its name; None if it is no subfunction."""
    problems: tuple[Problem, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of all its HCAs, visible or away."""
        return (*self.hcas, *self.away)


def places(host: Host) -> list[str]:
    """All places with an adapter, or with the node of one.

    Raises:
        OSError: the adapters cannot be listed; a host without RDMA has none.
    """
    found: dict[str, None] = {}
    for name in sysfs.entries(host, INFINIBAND):
        if (path := sysfs.device(host, INFINIBAND / name)) is not None:
            found[_place(host, path)] = None
    for name in sysfs.entries(host, VERBS):
        if (path := sysfs.device(host, VERBS / name)) is not None:
            place = _place_on_pci(_base(path)) or ""
            if place in found:
                continue
            hca = _adapter_name(host, path)
            if not place or _is_software(host, _base(path) / "infiniband" / hca):
                place = hca
            found[place] = None
    return sorted(found.keys() - {""})


def read(host: Host, place: str) -> Adapter | None:
    """The adapters at a place; None if there is none, and no node that names its adapter.

    A node that names none is being removed: the kernel has forgotten its adapter (ibdev_show in uverbs_main.c).

    Raises:
        OSError: a directory is there and cannot be listed.
    """
    base = _directory(host, place)
    if base is None:
        return None
    on_pci = _is_on_pci(place)
    seen = sysfs.entries(host, base / "infiniband")
    mine = [n for n in seen if (not _is_software(host, base / "infiniband" / n) if on_pci else n == place)]
    problems: list[Problem] = []
    nodes = [
        node
        for node in _nodes(host, base, mine, place, problems)
        if node.hca in mine or (node.hca not in seen if on_pci else node.hca == place)
    ]
    away = tuple(dict.fromkeys(node.hca for node in nodes if node.hca and node.hca not in mine))
    if not mine and not away:
        return None
    return Adapter(
        place=place,
        path=base,
        address=place.partition("/")[0] if on_pci else None,
        hcas=tuple(mine),
        away=away,
        nodes=tuple(sorted(nodes, key=_order)),
        netdevs=tuple(
            sysfs.entries(host, base / "net") if on_pci else _netdevs_below(host, base / "infiniband" / place)
        ),
        subfunction=_subfunction(host, base) if "/" in place else None,
        problems=tuple(problems),
    )


def hcas(host: Host, adapter: Adapter) -> tuple[Hca, ...]:
    """What sysfs tells of each HCA of an adapter, in many files that `read` leaves out."""
    return tuple(_hca(host, adapter.path / "infiniband" / name) for name in adapter.hcas)


def place_of(devpath: str) -> str:
    """The place by the path of an adapter or of its node: `/devices/…/0000:3b:00.0/infiniband/mlx5_0`.

    Off the PCI bus it is the name of the device, which is a place only if it is an adapter.
    """
    path = HostPath(devpath)
    return _place_on_pci(_base(path)) or path.name


def is_exclusive(host: Host) -> bool:
    """Whether an adapter is in one network namespace at a time (`rdma system set netns exclusive`)."""
    return sysfs.attribute(host, NETNS_MODE) == "N"


# --- places ---


def _base(device: HostPath) -> HostPath:
    """The directory with `infiniband/`, `infiniband_verbs/` and so on, in which a device of such a class lies."""
    return device.parent.parent


def _place_on_pci(base: HostPath) -> str | None:
    parts = base.text.split("/")
    last = max((n for n, part in enumerate(parts) if pci.ADDRESS.fullmatch(part)), default=None)
    return None if last is None else "/".join(parts[last:])


def _place(host: Host, hca: HostPath) -> str:
    return hca.name if _is_software(host, hca) else _place_on_pci(_base(hca)) or hca.name


def _is_on_pci(place: str) -> bool:
    return pci.ADDRESS.fullmatch(place.partition("/")[0]) is not None


def _is_software(host: Host, hca: HostPath) -> bool:
    """Whether an adapter is rxe, which has the file `parent` and until Linux 5.11 lay in the hardware of its interface."""
    return host.local(hca / "parent").is_file()


def _directory(host: Host, place: str) -> HostPath | None:
    if _is_on_pci(place):
        address, _, rest = place.partition("/")
        function = sysfs.device(host, pci.FUNCTIONS / address)
        return function / rest if function and rest else function
    if (path := sysfs.device(host, INFINIBAND / place)) is not None:
        return _base(path)
    for name in sysfs.entries(host, VERBS):
        path = sysfs.device(host, VERBS / name)
        if path is not None and _adapter_name(host, path) == place:
            return _base(path)
    return None


# --- reading ---


def _hca(host: Host, path: HostPath) -> Hca:
    numbers = sorted(int(name) for name in sysfs.entries(host, path / "ports") if name.isdecimal() and len(name) < 4)
    guid = _word(host, path / "node_guid").lower()
    return Hca(
        name=path.name,
        ports=tuple(Port(path.name, n, _link_layer(_word(host, path / f"ports/{n}/link_layer"))) for n in numbers),
        node_guid=guid if _GUID.fullmatch(guid) and guid != _NO_GUID else "",
        board_id=_word(host, path / "board_id"),
        fw_ver=_word(host, path / "fw_ver"),
        hca_type=_word(host, path / "hca_type"),
    )


def _link_layer(text: str) -> str:
    return text if text in ("InfiniBand", "Ethernet") else ""


def _nodes(host: Host, base: HostPath, hcas: list[str], place: str, problems: list[Problem]) -> Iterator[RdmaNode]:
    """Every node in the directory, of any adapter."""
    for directory in _DIRECTORIES:
        for name in sysfs.entries(host, base / directory):
            if (found := _NODE.fullmatch(name)) is None:
                continue
            device = base / directory / name
            number = _word(host, device / "dev")
            if number and not _NUMBER.fullmatch(number):
                problems.append(Problem(place, f"{device}/dev says {number!r}, which is no device number"))
                number = ""
            hca = _adapter_name(host, device) or (hcas[0] if len(hcas) == 1 else "")
            yield RdmaNode(found[1], NODES / name, number, hca)


def _order(node: RdmaNode) -> tuple[int, int, str]:
    return _KINDS.index(node.kind), len(node.path.name), node.path.name


def _netdevs_below(host: Host, hca: HostPath) -> Iterable[str]:
    """The interface under a software adapter: rxe names it, siw's first address does."""
    found = _word(host, hca / "parent") or _word(host, hca / "ports/1/gid_attrs/ndevs/0")
    return (found,) if found else ()


def _subfunction(host: Host, base: HostPath) -> str:
    number = sysfs.number(host, base / "sfnum")
    return base.name if number is None else str(number)


def _adapter_name(host: Host, node: HostPath) -> str:
    """The adapter that a node names; "" if it names none, or what could be no name (IB_DEVICE_NAME_MAX is 64)."""
    name = _word(host, node / "ibdev")
    return "" if name in (".", "..") or "/" in name or len(name) >= 64 else name


def _word(host: Host, path: HostPath) -> str:
    """The text of an attribute that is one printable line; else ""."""
    text = sysfs.attribute(host, path) or ""
    return text if text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text else ""
