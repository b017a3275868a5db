"""Network cards with virtual functions as lines of a fixture tree (see trees.py), as a kernel lays them out in sysfs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from backends.linux import pci
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import ETHERNET, RDMA_CM, hca

ROUTES = "proc/1/net/route = Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"


class Card(Struct, frozen=True):
    """A physical function, and how its virtual ones lie behind it."""

    address: str
    netdev: str
    ids: str
    virtual_ids: str
    driver: str
    virtual_driver: str
    offset: int
    virtual: int = 64
    numa_node: int = 0
    rdma: bool = False
    first_adapter: int = 2
    """The number of the first virtual function's RDMA adapter."""
    kind: str = "020000"
    link: str = "up"
    flags: str = "0x1003"

    @property
    def below(self) -> str:
        return f"pci0000:{self.address[5:7]}"

    def vf(self, number: int) -> str:
        """The address of a virtual function."""
        place = pci.routing_id(self.address) + self.offset + number
        return f"0000:{place >> 8:02x}:{place >> 3 & 31:02x}.{place & 7}"

    def vf_path(self, number: int) -> str:
        return f"sys/devices/{self.below}/{self.vf(number)}"

    def tree(self, *, bare: Sequence[int] = ()) -> str:
        """All lines; of the virtual functions in `bare`, which their tests write themselves, none but the link."""
        files = {"sriov_offset": str(self.offset), "sriov_stride": "1", "sriov_totalvfs": "128"}
        files |= {"sriov_numvfs": str(self.virtual), "sriov_drivers_autoprobe": "1", "acpi_index": "3"}
        files |= interface(self.netdev, self.kind, self.link, self.flags)
        every = [self.vf(number) for number in range(self.virtual)]
        tree = self._function(self.address, self.ids, self.driver, virtual=every, net=[self.netdev], files=files)
        tree += "".join(self.virtual_function(number) for number in range(self.virtual) if number not in bare)
        return tree

    def virtual_function(self, number: int, driver: str | None = "", **more: Any) -> str:
        """One virtual function's lines, with its interface and RDMA adapter where it has its own driver."""
        own = driver == ""
        name = f"{self.netdev}v{number}"
        if own:
            more = {"net": [name], "files": interface(name, self.kind, "down", "0x1002"), **more}
        bound = self.virtual_driver if own else driver
        tree = self._function(self.vf(number), self.virtual_ids, bound, physical=self.address, **more)
        if own and self.rdma:
            adapter = self.first_adapter + number
            tree += hca(f"mlx5_{adapter}", f"{self.below}/{self.vf(number)}", (ETHERNET,), number=adapter)
        return tree

    def _function(self, address: str, ids: str, driver: str | None, **more: Any) -> str:
        return function(address, ids, below=self.below, kind=self.kind, driver=driver, numa_node=self.numa_node, **more)


E810 = Card("0000:3b:00.0", "ens1f0", "8086:1592", "8086:1889", "ice", "iavf", offset=8)
CONNECTX = Card("0000:5e:00.0", "ens2f0np0", "15b3:101d", "15b3:101e", "mlx5_core", "mlx5_core", 2, rdma=True)


def subfunction(card: Card, index: int, number: int, *, rdma: bool = False) -> str:
    """An auxiliary device of a card, with its interface: `mlx5_core.sf.<index>`, its sfnum `number`."""
    name, netdev = f"{card.driver}.sf.{index}", f"en3f0s{number}"
    place = f"{card.below}/{card.address}/{name}"
    at = f"sys/devices/{place}"
    told = {"sfnum": str(number), **interface(netdev, card.kind, "up", "0x1003")}
    lines = [
        f"sys/bus/auxiliary/devices/{name} -> ../../../devices/{place}",
        f"{at}/driver -> ../../../../bus/auxiliary/drivers/mlx5_core.sf",
        f"sys/class/net/{netdev} -> ../../devices/{place}/net/{netdev}",
        *(f"{at}/{file} = {value}" for file, value in told.items()),
    ]
    return "\n".join(lines) + "\n" + (hca(f"mlx5_{index}", place, (ETHERNET,), number=index) if rdma else "")


def vdpa_device(card: Card, number: int, name: str, driver: str, node: str) -> str:
    """A vDPA device of a virtual function, and what vhost_vdpa makes of it."""
    at = f"{card.vf_path(number)}/{name}"
    lines = [
        f"sys/bus/vdpa/devices/{name} -> ../../../devices/{card.below}/{card.vf(number)}/{name}",
        f"{at}/driver -> ../../../../bus/vdpa/drivers/{driver}",
        *([f"{at}/{node}/", f"dev/{node} c 510:3"] if driver == "vhost_vdpa" else ()),
    ]
    return "\n".join(lines) + "\n"


def interface(name: str, kind: str, link: str, flags: str) -> dict[str, str]:
    """The files of an interface, for `pci_trees.function`."""
    told = {"operstate": link, "flags": flags, "type": "32" if kind.startswith("0207") else "1", "dev_port": "0"}
    return {f"net/{name}/{file}": value for file, value in told.items()}


def vfio_function(card: Card, number: int, group: int, *, noiommu: bool = False) -> str:
    """A virtual function on vfio-pci, with its group's nodes."""
    tree = card.virtual_function(number, "vfio-pci", group=group)
    if noiommu:
        tree += f"sys/kernel/iommu_groups/{group}/name = vfio-noiommu\n"
    return tree + f"dev/vfio/{'noiommu-' if noiommu else ''}{group} c 240:{group}\n"


def small(card: Card, virtual: int = 4) -> Card:
    """The same card with fewer virtual functions."""
    return replace(card, virtual=virtual)


def everything() -> str:
    """Both cards, routes that lead elsewhere, and what is on every node."""
    return ROUTES + RDMA_CM + E810.tree() + CONNECTX.tree()
