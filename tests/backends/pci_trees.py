"""Writes PCI functions as lines of a fixture tree (see trees.py), as a kernel lays them out in sysfs."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence


def function(
    address: str,
    ids: str = "10de:2330",
    *,
    below: str = "pci0000:00",
    subsystem: str = "10de:16c1",
    kind: str = "030200",
    driver: str | None = None,
    numa_node: int | None = 0,
    group: int | None = None,
    physical: str | None = None,
    virtual: Sequence[str] = (),
    drm: Iterable[str] = (),
    infiniband: Iterable[str] = (),
    net: Iterable[str] = (),
    vfio: Iterable[str] = (),
    files: Mapping[str, str] | None = None,
) -> str:
    """The lines for one function. `below` is its place under /sys/devices: `pci0000:3a/0000:3a:00.0`.

    `physical` and `virtual` are addresses beside it; `files` are further attributes, by their names.
    """
    path = f"sys/devices/{below}/{address}"
    vendor, device = ids.upper().split(":")
    lines = [
        f"sys/bus/pci/devices/{address} -> ../../../devices/{below}/{address}",
        f"{path}/uevent = {_uevent(address, vendor, device, subsystem.upper(), kind, driver)}",
        f"{path}/subsystem -> {_up(path)}/bus/pci",
    ]
    if numa_node is not None:
        lines.append(f"{path}/numa_node = {numa_node}")
    if driver is not None:
        lines += [
            f"sys/bus/pci/drivers/{driver}/bind = ",
            f"sys/bus/pci/drivers/{driver}/unbind = ",
            f"sys/bus/pci/drivers/{driver}/{address} -> ../../../../devices/{below}/{address}",
            f"{path}/driver -> {_up(path)}/bus/pci/drivers/{driver}",
        ]
    if group is not None:
        groups = "sys/kernel/iommu_groups"
        lines += [
            f"{groups}/{group}/devices/{address} -> ../../../../devices/{below}/{address}",
            f"{path}/iommu_group -> {_up(path)}/kernel/iommu_groups/{group}",
        ]
    if physical is not None:
        lines.append(f"{path}/physfn -> ../{physical}")
    lines += [f"{path}/virtfn{number} -> ../{one}" for number, one in enumerate(virtual)]
    children = {"drm": drm, "infiniband": infiniband, "net": net, "vfio-dev": vfio}
    lines += [f"{path}/{kind_}/{name}/" for kind_, names in children.items() for name in names]
    lines += [f"sys/class/net/{name} -> ../../devices/{below}/{address}/net/{name}" for name in net]
    lines += [f"{path}/{name} = {value}" for name, value in (files or {}).items()]
    return "\n".join(lines) + "\n"


def _up(path: str) -> str:
    """From a function's directory to /sys."""
    return posixpath.relpath("sys", path)


def _uevent(address: str, vendor: str, device: str, subsystem: str, kind: str, driver: str | None) -> str:
    """One line of a fixture tree; `\\n` is spelled out there."""
    said = {"DRIVER": driver, "PCI_CLASS": kind.upper().lstrip("0"), "PCI_ID": f"{vendor}:{device}"}
    said |= {"PCI_SUBSYS_ID": subsystem, "PCI_SLOT_NAME": address}
    return "\\n".join(f"{key}={value}" for key, value in said.items() if value is not None)
