"""Reads /proc/driver/nvidia: the GPUs that NVIDIA's driver has, and how they are divided (MIG).

Formats: nv-procfs.c and nv-caps.c in the driver's open kernel modules, and the chapter "Using the /proc File System
Interface" of its README. The driver's entries come and go without any event.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Problem
from backends.errors import reason_of
from backends.linux import pci, sysfs

GPUS: Final = HostPath("/proc/driver/nvidia/gpus")
CAPABILITIES: Final = HostPath("/proc/driver/nvidia/capabilities")

_LINE: Final = re.compile(r"([A-Z][A-Za-z ]{1,30}):[ \t]*(.*)")
_UUID: Final = re.compile(r"GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_UNKNOWN_UUID: Final = "GPU-????"  # until the GPU is used for the first time
_MINOR: Final = re.compile(r"[0-9]{1,7}")
_ACCESS: Final = re.compile(r"DeviceFileMinor: ([0-9]{1,7})$", re.MULTILINE)


class Information(Struct, frozen=True):
    """A GPU as the driver knows it."""

    model: str | None = None
    uuid: str | None = None
    """None until the driver has started the GPU."""
    minor: int | None = None
    """Of /dev/nvidia<minor>."""
    excluded: bool = False
    """By the driver's parameter NVreg_ExcludedGpus."""
    problems: tuple[Problem, ...] = ()


class Instance(Struct, frozen=True, order=True):
    """A MIG device: a compute instance of a GPU instance."""

    gpu: int
    """The minor number of the GPU."""
    gi: int
    ci: int

    @property
    def gi_name(self) -> str:
        """In the tables of capabilities: `gpu0/gi1`."""
        return f"gpu{self.gpu}/gi{self.gi}"

    @property
    def name(self) -> str:
        """`gpu0/gi1/ci0`."""
        return f"{self.gi_name}/ci{self.ci}"


def information(host: Host, address: str) -> Information | None:
    """What the driver says of one GPU; None if it does not have it, or not yet."""
    path = GPUS / address / "information"
    try:
        text = sysfs.read_bytes(host, path).decode(errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return Information(problems=(Problem(address, f"{path} cannot be read: {reason_of(error)}"),))
    said = {found[1]: found[2].strip() for line in text.splitlines() if (found := _LINE.fullmatch(line))}
    uuid, minor, model = said.get("GPU UUID", ""), said.get("Device Minor", ""), said.get("Model", "")
    wrong = []
    if not _UUID.fullmatch(uuid) and not uuid.startswith(_UNKNOWN_UUID):
        wrong.append(f"{path} has no GPU UUID")
    if not _MINOR.fullmatch(minor):
        wrong.append(f"{path} has no Device Minor")
    return Information(
        model=model if model.isprintable() and model else None,
        uuid=uuid if _UUID.fullmatch(uuid) else None,
        minor=int(minor) if _MINOR.fullmatch(minor) else None,
        excluded=said.get("GPU Excluded") == "Yes",
        problems=tuple(Problem(address, sentence) for sentence in wrong),
    )


def addresses(host: Host) -> list[str]:
    """The GPUs that the driver has, by address."""
    return [name for name in sysfs.names(host, GPUS) if pci.ADDRESS.fullmatch(name)]


def counted(host: Host) -> list[str]:
    """The GPUs in the order of NVIDIA's library (nvmlDeviceGetCount), which leaves out excluded ones."""
    every = sorted(addresses(host), key=lambda address: (len(address), address))  # domains have four digits, or more
    return [address for address in every if not (information(host, address) or Information()).excluded]


def gpu_instances(host: Host, minor: int) -> list[int]:
    """The numbers of the GPU instances of a GPU in MIG mode."""
    return sorted(_numbered(host, CAPABILITIES / f"gpu{minor}" / "mig", "gi"))


def instances(host: Host, minor: int) -> list[Instance]:
    """The MIG devices of a GPU."""
    return [
        Instance(minor, gi, ci)
        for gi in gpu_instances(host, minor)
        for ci in sorted(_numbered(host, CAPABILITIES / f"gpu{minor}" / "mig" / f"gi{gi}", "ci"))
    ]


def capability_minor(host: Host, name: str) -> int | None:
    """The number of the /dev/nvidia-caps/nvidia-cap node for `gpu0/gi1` or `gpu0/gi1/ci0`."""
    gpu, _, instance = name.partition("/")
    found = _ACCESS.match(sysfs.attribute(host, CAPABILITIES / gpu / "mig" / instance / "access") or "")
    return int(found[1]) if found else None


def stamp(host: Host) -> tuple[str, ...]:
    """A value that changes whenever the driver is reloaded, has other GPUs or divides them in another way."""
    try:
        loaded = str(host.local(GPUS).stat().st_ino)
    except OSError:
        loaded = ""
    divided = [name for name in sysfs.names(host, CAPABILITIES) if re.fullmatch(r"gpu\d{1,4}", name)]
    parts = [one.name for name in divided for one in instances(host, int(name.removeprefix("gpu")))]
    return (loaded, *addresses(host), *divided, *parts)


def _numbered(host: Host, directory: HostPath, prefix: str) -> Iterator[int]:
    for name in sysfs.names(host, directory):
        if (number := name.removeprefix(prefix)) != name and number.isdecimal() and number.isascii():
            yield int(number)
