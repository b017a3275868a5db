"""Writes RDMA adapters as lines of a fixture tree (see trees.py), as a kernel lays them out in sysfs and /dev."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.backends.pci_trees import function

COUNTERS = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "local_link_integrity_errors",
    "port_xmit_wait",
)
UVERBS, UMAD, ISSM = 192, 0, 64  # the minors that the kernel begins with; all have the major 231
RDMA_CM = "dev/infiniband/rdma_cm c 10:121\n"


@dataclass(frozen=True)
class PortTree:
    """One port's files."""

    state: str = "4: ACTIVE"
    physical: str = "5: LinkUp"
    link_layer: str = "InfiniBand"
    rate: str = "400 Gb/sec (4X NDR)"
    lid: str = "0x2a"
    counters: Mapping[str, str] = field(default_factory=dict)


ETHERNET = PortTree(link_layer="Ethernet", rate="100 Gb/sec (4X EDR)", lid="0x0")
DOWN = PortTree("1: DOWN", "2: Polling", rate="2.5 Gb/sec (1X)", lid="0x0")


def hca(
    name: str,
    below: str,
    ports: Sequence[PortTree] = (PortTree(),),
    *,
    number: int = 0,
    first_port: int | None = None,
    guid: str = "b83f:d203:00a1:0001",
    netdevs: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    seen: bool = True,
    nodes: bool = True,
) -> str:
    """The lines for an adapter in the directory `below`, under /sys/devices. `number` is that of its uverbs node.

    `first_port` numbers its umad and issm nodes from there; `seen` is false of one in another namespace.
    """
    lines: list[str] = []
    if seen:
        lines += _device("infiniband", name, below)
        path = f"sys/devices/{below}/infiniband/{name}"
        told = {"node_guid": guid, "board_id": "MT_0000000838", "fw_ver": "28.39.1002", "hca_type": "MT4129"}
        lines += [f"{path}/{file} = {value}" for file, value in (told | dict(files or {})).items()]
        for port, tree in enumerate(ports, 1):
            lines += _port(f"{path}/ports/{port}", tree)
    if nodes:
        lines += _node("infiniband_verbs", f"uverbs{number}", below, name, UVERBS + number)
        for port in range(1, len(ports) + 1):
            n = (number if first_port is None else first_port) + port - 1
            lines += _node("infiniband_mad", f"umad{n}", below, name, UMAD + n, port)
            lines += _node("infiniband_mad", f"issm{n}", below, name, ISSM + n, port)
    lines += [f"sys/devices/{below}/net/{netdev}/" for netdev in netdevs]
    return "\n".join(lines) + "\n"


def adapter(
    name: str,
    address: str,
    ports: Sequence[PortTree] = (PortTree(),),
    *,
    below: str = "pci0000:00",
    ids: str = "15b3:1021",
    kind: str = "020700",
    driver: str | None = "mlx5_core",
    numa_node: int | None = 0,
    physical: str | None = None,
    virtual: Sequence[str] = (),
    number: int = 0,
    first_port: int | None = None,
    guid: str = "b83f:d203:00a1:0001",
    netdevs: Sequence[str] = (),
    seen: bool = True,
    subsystem: str = "15b3:0041",
    files: Mapping[str, str] | None = None,
) -> str:
    """A PCI function with its adapter; `files` are further ones of the function."""
    of_function = function(
        address,
        ids,
        below=below,
        subsystem=subsystem,
        kind=kind,
        driver=driver,
        numa_node=numa_node,
        physical=physical,
        virtual=virtual,
        files=files,
    )
    place = f"{below}/{address}"
    return of_function + hca(
        name, place, ports, number=number, first_port=first_port, guid=guid, netdevs=netdevs, seen=seen
    )


def rxe(name: str = "rxe0", netdev: str = "eth0", port: PortTree = ETHERNET, *, number: int = 0) -> str:
    """Soft RoCE on a network interface, as kernels since 5.11 show it."""
    files = {"parent": netdev, "fw_ver": "", "board_id": "", "hca_type": ""}
    return hca(name, "virtual", (port,), number=number, guid="5054:00ff:fe12:3456", files=files)


def exclusive(on: bool = True) -> str:
    """The kernel's mode for namespaces."""
    return f"sys/module/ib_core/parameters/netns_mode = {'N' if on else 'Y'}\n"


def _device(kind: str, name: str, below: str) -> list[str]:
    path = f"sys/devices/{below}/{kind}/{name}"
    up = posixpath.relpath("sys", path)
    return [f"sys/class/{kind}/{name} -> ../../devices/{below}/{kind}/{name}", f"{path}/subsystem -> {up}/class/{kind}"]


def _port(path: str, tree: PortTree) -> list[str]:
    files = {
        "state": tree.state,
        "phys_state": tree.physical,
        "link_layer": tree.link_layer,
        "rate": tree.rate,
        "lid": tree.lid,
    }
    files |= {f"counters/{name}": tree.counters.get(name, "0") for name in COUNTERS}
    return [f"{path}/{name} = {value}" for name, value in files.items()]


def _node(kind: str, name: str, below: str, hca: str, minor: int, port: int | None = None) -> list[str]:
    path = f"sys/devices/{below}/{kind}/{name}"
    lines = [
        *_device(kind, name, below),
        f"{path}/dev = 231:{minor}",
        f"{path}/ibdev = {hca}",
        f"{path}/uevent = MAJOR=231\\nMINOR={minor}\\nDEVNAME=infiniband/{name}",
        f"dev/infiniband/{name} c 231:{minor}",
    ]
    return lines if port is None else [*lines, f"{path}/port = {port}"]
