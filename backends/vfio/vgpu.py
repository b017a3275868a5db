"""Virtual GPUs that a driver has made of a function: with another driver they would be gone, under the machine that has one.

NVIDIA's driver gives a virtual function a vGPU type, in `nvidia/current_vgpu_type` (0: none) where the kernel has a vfio of
the vendor's own, else by a mediated device below the function (NVIDIA's vGPU user guide, "Creating an NVIDIA vGPU";
Documentation/driver-api/vfio-mediated-device.rst). Intel's are mediated devices too.
"""

from __future__ import annotations

from typing import Final

from backends.base import Host
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
