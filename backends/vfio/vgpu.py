"""Says what virtual GPUs a driver has made of a function: with another driver they would be gone, under a machine that has one.

NVIDIA's driver gives a virtual function a vGPU type, in `nvidia/current_vgpu_type` (0: none) where the kernel has a vfio of
the vendor's own, else by a mediated device below the function (NVIDIA's vGPU user guide, "Creating an NVIDIA vGPU";
Documentation/driver-api/vfio-mediated-device.rst). Intel's are mediated devices too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.base import Device, Host, Signal, Verdict
from backends.linux import pci, sysfs

_OWN: Final = "nvidia"
_TYPE: Final = "current_vgpu_type"
_MEDIATED: Final = "mdev_supported_types"


def vgpus(host: Host, function: pci.Function) -> str | None:
    """What a driver has made of the function, in words that follow its name; None: nothing. What hides counts as made."""
    try:
        if _TYPE in sysfs.entries(host, function.path / _OWN):
            number = sysfs.attribute(host, function.path / _OWN / _TYPE)
            if number != "0":
                return f"has the vGPU type {number or '(unreadable)'} from the NVIDIA driver"
        types = sysfs.entries(host, function.path / _MEDIATED)
        made = [name for kind in types for name in sysfs.entries(host, function.path / _MEDIATED / kind / "devices")]
    except OSError:
        return "may have virtual GPUs from its driver, which cannot be read"
    return f"has the virtual GPU {made[0]} from the driver {function.driver}" if made else None


def untyped(host: Host, function: pci.Function) -> str:
    """Why a virtual function that NVIDIA's driver has given no type cannot be had; empty of any other function."""
    if function.physical is None or sysfs.number(host, function.path / _OWN / _TYPE) != 0:
        return ""
    return f"it has no vGPU type: write one of {_OWN}/creatable_vgpu_types into {_OWN}/{_TYPE}, both in {function.path}"


def signals(host: Host, device: Device, hardware: str) -> Iterator[Signal]:
    """Has the function another type than it was found with? The kernel may send no event of that."""
    before = "".join(device.attributes.get("vgpu_type", ()))
    function = pci.read(host, device.key) if before else None
    if function is not None and function.vgpu_type != before:
        why = f"{device.key} had the vGPU type {before} and has {function.vgpu_type or 'none'} now"
        yield Signal(hardware, "vgpu-type-changed", Verdict.NOW, why)
