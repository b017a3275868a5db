"""Creates virtual functions of a card that has none, and undoes what fails half way.

Until they are created one device stands for them, which is listed, unhealthy, and in no pod.
Files: Documentation/ABI/testing/sysfs-bus-pci (sriov_totalvfs, sriov_numvfs, sriov_drivers_autoprobe).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from backends.base import Device, Host, NotReady, Signal, Verdict, assumed
from backends.errors import reason_of, several
from backends.linux import iommu, netdevs, pci, sysfs
from backends.linux.kernel import Kernel
from backends.sriov.options import SriovResource

_SHARED: Final = ("vendor", "subsystem_vendor", "numa_node")
"""Attributes that virtual functions share with their card."""


def asked(resources: Sequence[SriovResource], card: Device) -> tuple[SriovResource, int] | None:
    """The first resource that wants virtual functions of this card, and their number."""
    for resource in resources:
        for name, count in resource.spec.options.create.items():
            if name in (card.key, *card.attributes.get("ifname", ())):
                return resource, count
    return None


def stand_in(card: Device, resource: SriovResource, count: int) -> Device:
    """A device with the attributes of all functions to come; unknown ones are those that the resource selects by."""
    said = card.attributes
    known = {name: said[name] for name in _SHARED if name in said}
    known |= {"physical": (card.key,), "function": ("virtual",), "vf": tuple(map(str, range(count)))}
    if "ifname" in said:
        known["pf"] = said["ifname"][:1]
    selected = {name for table in resource.spec.select for name in table}
    depends = card.depends | {_wanting(card.key)}
    return replace(
        card,
        resource=resource.configured,
        depends=depends,
        attributes=assumed(known, selected - known.keys(), [resource]),
    )


def is_stand_in(device: Device) -> bool:
    """Whether the device stands for virtual functions that are still to be created."""
    return _wanting(device.key) in device.depends


def signal(device: Device) -> Signal:
    """Says why no pod can have it yet."""
    count = len(device.attributes["vf"])
    why = (
        f"{device.key} is to have {several(count, 'virtual function')}: Fairlead makes them while it runs; if it cannot, its log "
        "says why"
    )
    return Signal(_wanting(device.key), "not-created", Verdict.NOW, why)


def _wanting(address: str) -> str:
    """The hardware that signals about functions to come are about; no other backend knows it."""
    return f"vfs:{address}"


class Creator:
    """Creates virtual functions on one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel

    def create(self, address: str, count: int, *, autoprobe: bool) -> None:
        """Create this many of a card that has none. Existing ones are never touched: any may be in use.

        `autoprobe`: whether drivers may bind to them by themselves.

        Raises:
            NotReady: it cannot have them, or the kernel or the driver refuses. All is as it was, as far as can be.
        """
        path = pci.FUNCTIONS / address
        if self._has_all(address, count):
            return
        try:
            if not autoprobe:
                self._kernel.write(path / "sriov_drivers_autoprobe", "0")
            self._kernel.write(path / "sriov_numvfs", str(count))
        except OSError as error:
            self._undo(address, autoprobe=autoprobe)
            raise NotReady(f"{address} cannot get {several(count, 'virtual function')}: {reason_of(error)}") from error
        function = pci.read(self._host, address)
        made = len(function.virtual) if function is not None else 0
        if made != count:
            self._undo(address, autoprobe=autoprobe)
            raise NotReady(
                f"the driver of {address} made {several(made, 'virtual function')}, not {count}; its log (dmesg) says why"
            )

    def _has_all(self, address: str, count: int) -> bool:
        """Whether the card has them already.

        Raises:
            NotReady: they can never be, or not as things are.
        """
        function = pci.read(self._host, address)
        if function is None:
            raise NotReady(f"{address} is gone")
        if len(function.virtual) == count:
            return True
        if function.virtual:
            raise NotReady(different(address, len(function.virtual), count))
        most = sysfs.number(self._host, function.path / "sriov_totalvfs")
        if most is None:
            raise NotReady(f"{address} can have no virtual functions: turn SR-IOV on, in the firmware and in the card")
        if count > most:
            raise NotReady(f"{address} can have {several(most, 'virtual function')}, not {count}")
        if function.driver is None or iommu.is_vfio(function) or not netdevs.names(self._host, function.path):
            raise NotReady(f"{address} has no network interface here: a pod may have it, or it needs its own driver")
        return False

    def _undo(self, address: str, *, autoprobe: bool) -> None:
        """Remove what was just created, unless any of it is in use. Errors are ignored: the first failure is told."""
        function = pci.read(self._host, address)
        with suppress(OSError):
            if function is not None and function.virtual:
                if any(self._is_used(virtual) for virtual in function.virtual):
                    return
                self._kernel.write(pci.FUNCTIONS / address / "sriov_numvfs", "0")
            if not autoprobe:
                self._kernel.write(pci.FUNCTIONS / address / "sriov_drivers_autoprobe", "1")  # as at boot

    def _is_used(self, address: str) -> bool:
        """Whether a pod may have it: it is on vfio, or its interface is in another namespace."""
        function = pci.read(self._host, address)
        if function is None or function.driver is None:
            return False
        return iommu.is_vfio(function) or not netdevs.names(self._host, function.path)


def different(address: str, has: int, wanted: int) -> str:
    """What to do about a card that has another number of virtual functions than is configured."""
    return (
        f"{address} has {several(has, 'virtual function')}, and {wanted} are asked for (create): Fairlead touches none that is there; "
        "when no pod has any, write 0 to sriov_numvfs"
    )
