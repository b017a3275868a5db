"""Makes an agent on one node that has every kind of hardware at once: 24 resources, 1,302 devices.

8 GPUs; 4 HCAs with 64 VFs each, a third of them for RDMA, a third as interfaces, a third on vfio-pci; 16 APQNs in 4 sets; 4
cards with 5 mediated devices each, of a type per card; kvm, tun and vhost-net.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from bench.processes import Agent, Offer
from tests.backends.cex import cex_trees
from tests.backends.machines import hgx_h100, nvidia_gpu
from tests.backends.mdev.mdev_trees import made, parent
from tests.backends.rdma_trees import RDMA_CM
from tests.backends.sriov.sriov_trees import CONNECTX, ROUTES, Card, vfio_function
from tests.backends.trees import plant

RESOURCES: Final = 24
DEVICES: Final = 1_302
SIZE: Final = f"{RESOURCES}, {DEVICES:,} devices"
"""What figures of it are told by."""

_TOKENS: Final = 334  # of each node
_NODES: Final = {"kvm": ("kvm", "10:232"), "tun": ("net/tun", "10:200"), "vhost-net": ("vhost-net", "10:238")}
_HCAS: Final = ("0e", "2e", "8e", "ae")  # their buses
_KINDS: Final = {"rdma": (0, 21), "netdev": (22, 42), "vfio": (43, 63)}
"""What an HCA's VFs are, first and last."""
_DOMAINS: Final = range(6, 14)  # of each of the two cards
_MDEV_PARENTS: Final = ("20", "21", "a0", "a1")  # their buses
_MDEVS: Final = 5  # of each parent
_FIRST_GROUP: Final = 100  # of the IOMMU, beyond the GPUs'


def make(home: Path, resync: str = "5m") -> Agent:
    """The agent, not started, its node's trees below `home`."""
    agent = Agent(home, list(_offers()), resync)
    plant(home, ROUTES + RDMA_CM + hgx_h100() + cex_trees.machine(_DOMAINS) + "dev/vfio/vfio c 10:196\n")
    plant(home, "".join(f"dev/{path} c {numbers}\n" for path, numbers in _NODES.values()))
    for number, bus in enumerate(_HCAS):
        plant(home, _hca(number, bus))
    for number, bus in enumerate(_MDEV_PARENTS):
        plant(home, _mdev_parent(number, bus))
    return agent


def _offers() -> Iterator[Offer]:
    yield Offer("nvidia.com/gpu", backend="gpu", options='select = { device = "2330" }\n')
    for number in range(len(_HCAS)):
        for kind, (first, last) in _KINDS.items():
            options = f'select = {{ pf = "ens{number}np0", vf = "{first}-{last}" }}\n'
            options += "rdma = true\n" if kind == "rdma" else ""
            yield Offer(f"bench.example/{kind}-{number}", backend="sriov", options=options)
    every = [(adapter, domain) for adapter in (1, 2) for domain in _DOMAINS]
    for number in range(4):
        apqns = ", ".join(f"{{ adapter = {a}, domain = {d} }}" for a, d in every[number * 4 : number * 4 + 4])
        yield Offer(f"cex.s390.ibm.com/set-{number}", backend="cex", options=f"apqns = [{apqns}]\n")
    for number in range(len(_MDEV_PARENTS)):
        yield Offer(
            f"bench.example/vgpu-{number}", backend="mdev", options=f'select = {{ type = "{_type(number)}" }}\n'
        )
    for name, (path, _) in _NODES.items():
        yield Offer(f"devices.kubevirt.io/{name}", f"/dev/{path}", count=_TOKENS)


def _hca(number: int, bus: str) -> str:
    netdev = f"ens{number}np0"
    card: Card = replace(
        CONNECTX, address=f"0000:{bus}:00.0", netdev=netdev, numa_node=number // 2, first_adapter=64 * number
    )
    first, last = _KINDS["vfio"]
    given_away = range(first, last + 1)
    group = _FIRST_GROUP + 64 * number
    return card.tree(bare=given_away) + "".join(vfio_function(card, vf, group + vf) for vf in given_away)


def _type(number: int) -> str:
    return f"GRID T4-{number + 1}Q"


def _mdev_parent(number: int, bus: str) -> str:
    below, address = f"pci0000:{bus}", f"0000:{bus}:00.0"
    path, kind = f"{below}/{address}", f"nvidia-{230 + number}"
    gpu = nvidia_gpu(address, 8 + number, ids="10de:1eb8", model="Tesla T4", below=below, numa_node=number // 2)
    group = _FIRST_GROUP + 64 * len(_HCAS) + _MDEVS * number
    uuids = [f"4b20d080-1b54-4048-85b3-{number:06x}{one:06x}" for one in range(_MDEVS)]
    devices = "".join(made(path, uuid, kind, group + one) for one, uuid in enumerate(uuids))
    return gpu + parent(path, {kind: (_type(number), 16 - _MDEVS)}) + devices
