"""An s390 machine with crypto cards, as lines of a fixture tree (see trees.py), and its kernel's zcrypt nodes."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from backends.base import Device, Grant, Host, HostPath, Resource, ResourceSpec
from backends.cex import Apqn, Cex, CexOptions, CexResource
from backends.linux.kernel import Kernel
from tests.backends.crashes import Fuse
from tests.backends.trees import plant, planted_host
from tests.nodes import make_node

MACHINE = "IBM-3931-0000000000012345"
BUS = """
sys/bus/ap/ap_interrupts = 1
sys/bus/ap/ap_max_domain_id = 84
sys/bus/ap/ap_max_adapter_id = 63
sys/bus/ap/poll_thread = 0
sys/bus/ap/poll_timeout = 1500000
sys/bus/ap/drivers/cex4card/
sys/bus/ap/drivers/cex4queue/
sys/bus/ap/drivers/vfio_ap/
sys/class/zcrypt/create =
sys/class/zcrypt/destroy =
proc/sysinfo = Manufacturer:         IBM\\nType:                 3931\\nModel:  704 A01\\nSequence Code:        0000000000012345\\nLPAR Type: 9\\nVM00 Control Program Type: KVM\\nType: 1
"""  # a file is one line


def card(number: int, kind: str, domains: Sequence[int] = (6, 7), driver: str = "cex4queue") -> str:
    """A card with its queues."""
    name = f"card{number:02x}"
    at = f"sys/devices/ap/{name}"
    states = {"load": "3", "online": "1", "config": "1", "chkstop": "0"}
    states |= {"pendingq_count": "2", "request_count": "4711", "requestq_count": "1"}
    files = {"ap_functions": "0x92800000", "depth": "8", "hwtype": "14", "raw_hwtype": "14", "type": kind, **states}
    files["serialnr"] = f"93AACP{number:02}"
    lines = [f"{at}/{name_} = {value}" for name_, value in files.items()]
    lines.append(f"{at}/driver -> ../../../bus/ap/drivers/cex4card")
    for domain in domains:
        queue = f"{at}/{number:02x}.{domain:04x}"
        lines += [f"{queue}/{key} = {value}" for key, value in states.items()]
        lines += [f"{queue}/interrupt = Interrupts enabled.", f"{queue}/reset = No reset operation."]
        lines.append(f"{queue}/driver -> ../../../../bus/ap/drivers/{driver}")
    return "\n".join(lines) + "\n"


def machine(domains: Sequence[int] = (6, 7)) -> str:
    """Two cards: an EP11 coprocessor and a CCA one of the generation before."""
    return BUS + card(1, "CEX8P", domains) + card(2, "CEX7C", domains)


def resource(name: str = "cex.s390.ibm.com/set", *apqns: tuple[int, int] | Apqn, **options: Any) -> CexResource:
    every = [one if isinstance(one, Apqn) else Apqn(*one) for one in apqns or ((1, 6),)]
    return Resource(name, ResourceSpec("cex", CexOptions(every, **options)))


def backend(root: Path, tree: str, *resources: CexResource) -> tuple[Cex, ZcryptKernel]:
    host = planted_host(root, tree)
    kernel = ZcryptKernel(host)
    return Cex(host, resources or (resource(),), kernel), kernel


def devices(found: Cex) -> list[Device]:
    return [device for unit in found.units() for device in found.discover(unit).devices]


def granted(found: Cex, wanted: CexResource, *ids: str) -> list[Grant]:
    """The grants of these IDs of a resource."""
    listed = {
        one: device for device in devices(found) if device.resource == wanted.name for one in found.ids(wanted, device)
    }
    return [Grant(one, listed[one]) for one in ids]


class ZcryptKernel(Kernel):
    """Makes, masks and destroys nodes as written to it."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.host = host
        self.fuse = Fuse()
        self.open: set[str] = set()
        """Names of nodes that a container has open."""
        self.written: list[tuple[str, str]] = []
        self.makes_nodes = True
        """Whether the node is in /dev as soon as it is made."""
        self._minor = 0

    @property
    def nodes(self) -> dict[str, tuple[str, ...]]:
        """Name → its masks of cards, domains and ioctls."""
        every = self._place.glob("*")
        return {at.name: tuple((at / f).read_text().strip() for f in ("apmask", "aqmask", "ioctlmask")) for at in every}

    @property
    def _place(self) -> Path:
        return self.host.sys / "devices/virtual/zcrypt"

    def write(self, path: HostPath, text: str) -> None:
        self.fuse.step()
        self.written.append((path.text, text))
        if path.name == "create":
            self.create(text.strip())
        elif path.name == "destroy":
            self.destroy(text.strip())
        else:
            super().write(path, text)
        self.fuse.step()

    def create(self, name: str) -> None:
        if (self._place / name).exists():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        none = f"0x{0:064x}"
        plant(
            self.host.root,
            "".join(f"sys/devices/virtual/zcrypt/{name}/{f} = {none}\n" for f in ("apmask", "aqmask", "ioctlmask")),
        )
        self._minor += 1
        if self.makes_nodes:
            make_node(self.host.dev / name, "c", 245, self._minor)

    def destroy(self, name: str) -> None:
        if name in self.open:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        if not (self._place / name).exists():
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        (self.host.dev / name).unlink(missing_ok=True)
        shutil.rmtree(self._place / name)

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        return is_so()
