"""Finds the NVIDIA GPU of a machine that shows none on PCI: of Tegra, and of WSL, to which Windows lends its GPUs.

As with NVIDIA's device plugin, all GPUs are one device, which the runtime knows by a name.
Source: its `internal/rm/tegra_manager.go` and `wsl_devices.go`, and `pkg/nvlib/info` of go-nvlib.
"""

from __future__ import annotations

from typing import Final

from backends.base import Device, Host, HostPath
from backends.gpu import detection, nodes
from backends.gpu.nodes import Wanted
from backends.gpu.nvidia import procfs
from backends.linux import sysfs

_DXG: Final = HostPath("/dev/dxg")
_FAMILY: Final = HostPath("/sys/devices/soc0/family")
_RELEASE: Final = HostPath("/etc/nv_tegra_release")


def device(host: Host, unit: str) -> Device | None:
    """The one device of such a machine; None on any other."""
    if nodes.fault(host, [Wanted(_DXG)]) is None:
        return _device("all", unit, [Wanted(_DXG)], platform="wsl")
    if _is_tegra(host) and not procfs.addresses(host):
        return _device("tegra", unit, [], platform="tegra", index="0")
    return None


def _is_tegra(host: Host) -> bool:
    family = sysfs.attribute(host, _FAMILY) or ""
    return family.lower().startswith("tegra") or host.local(_RELEASE).exists()


def _device(key: str, unit: str, wanted: list[Wanted], **more: str) -> Device:
    attributes = {"vendor": (detection.NVIDIA,), **{name: (value,) for name, value in more.items()}}
    return Device(
        key=key,
        unit=unit,
        hardware=frozenset({f"platform:{key}"}),
        identity=key,
        nodes=nodes.handed_out(wanted),
        attributes={**attributes, **nodes.numbers(wanted)},
    )
