"""Reads subfunctions: devices of the auxiliary bus that a driver makes of a part of its PCI function.

Files: Documentation/networking/devlink/devlink-port.rst ("Subfunction"), Documentation/driver-api/auxiliary_bus.rst.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from backends.base import Device, Host, HostPath
from backends.interface.written import assumed
from backends.linux import host_uses, netdevs, pci, rdma, sysfs
from backends.sriov.functions import Attributes, Seen, link, of_interfaces
from backends.sriov.options import UNSEEN_WHEN_AWAY, SriovResource

BUS: Final = HostPath("/sys/bus/auxiliary/devices")
NAME: Final = re.compile(r"[\w-]+\.sf\.[0-9]+")
"""`mlx5_core.sf.2`: the driver, the kind of device, and a number of the kernel."""


def names(host: Host) -> list[str]:
    """The names of all subfunctions.

    Raises:
        OSError: they cannot be listed.
    """
    return [name for name in sysfs.entries(host, BUS) if NAME.fullmatch(name)]


def look(host: Host, resources: Sequence[SriovResource], name: str) -> Seen | None:
    """The subfunction of that name; None if it is gone, or on no PCI function."""
    path = sysfs.device(host, BUS / name) if NAME.fullmatch(name) else None
    function = pci.read(host, path.parent.name) if path is not None else None
    if path is None or function is None:
        return None
    wants_rdma = any(resource.spec.options.rdma for resource in resources)
    adapter = rdma.read(host, f"{function.address}/{name}") if wants_rdma else None
    number = sysfs.number(host, path / "sfnum")
    called = name if number is None else f"sf{number}"
    attributes = {key: values for key, values in _attributes(host, path, function, number, adapter) if values}
    above = function.physical or function.address
    device = Device(
        key=name,
        unit=name,
        hardware=frozenset((f"aux:{name}", f"rdma:{function.address}-{called}")),  # as the backend infiniband calls it
        depends=frozenset((function.hardware, f"pci:{above}", link(above))),
        identity=f"{function.ids} {called}",
        place=frozenset((f"sf:{function.address}-{called}",)),  # its name is the next one's after a boot
        numa_node=function.numa_node,
        ancestry=(*function.ancestry, function.address),
        attributes=assumed(attributes, UNSEEN_WHEN_AWAY, resources),
    )
    why = host_uses.uplink(host, netdevs.names(host, path), sure=True)
    has_driver = sysfs.linked_name(host, path / "driver") is not None
    return Seen(
        device, "auxNetDevice", has_driver, f"it {why}" if why else "", adapter=adapter, problems=function.problems
    )


def _attributes(
    host: Host, path: HostPath, function: pci.Function, number: int | None, adapter: rdma.Adapter | None
) -> Attributes:
    yield from function.subfunction_attributes().items()
    yield "function", ("subfunction",)
    yield "physical", (function.physical or function.address,)
    yield "sfnum", () if number is None else (str(number),)
    above = sysfs.target(host, function.path / "physfn") if function.physical else function.path
    yield from of_interfaces(host, netdevs.names(host, path), above)
    if adapter is not None:
        yield "hca", adapter.names
