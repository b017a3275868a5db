"""Checks Onload: its nodes, its character devices in /proc/devices, the version of its module.

Files: proc(5) for /proc/devices; the names are those that Onload's own modules register (onload, onload_cplane and
onload_epoll by the module onload, sfc_char and sfc_affinity by modules of the same names).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import Final

from backends.base import Host, HostPath, Node, Signal, Verdict
from backends.errors import not_short, reason_of
from backends.linux import sysfs
from backends.solarflare.options import SolarflareOptions

DEV: Final = HostPath("/dev")
MAIN: Final = DEV / "onload"
"""Without it a container has no Onload."""

_REQUIRED: Final = ("onload", "onload_cplane", "onload_epoll")
NODES: Final = tuple(DEV / name for name in (*_REQUIRED, "sfc_char", "sfc_affinity"))
"""In the order of Solarflare's own plugin."""

SETTLE: Final = 5.0
"""Seconds for which `onload_tool reload` may take modules and nodes away."""

_DEVICES: Final = HostPath("/proc/devices")
_VERSION: Final = HostPath("/sys/module/onload/version")
_LINE: Final = re.compile(r"\s*([0-9]{1,4}) (\S+)")
_PERMISSIONS: Final = "mrw"  # those of Solarflare's own plugin


def nodes(host: Host) -> tuple[Node, ...]:
    """The nodes that are there; all cards share them."""
    there = (path for path in NODES if host.local(path).exists())
    return tuple(Node(path, path.text, _PERMISSIONS, shared=True) for path in there)


def version(host: Host) -> str | None:
    """The version of the loaded module onload; None if it is not loaded."""
    return sysfs.attribute(host, _VERSION) or None


def signals(host: Host, hardware: str, options: SolarflareOptions) -> Iterator[Signal]:
    """What is wrong with Onload, told of one card."""
    majors = _majors(host)
    if majors is not None and (missing := [name for name in _REQUIRED if name not in majors]):
        why = f"{_DEVICES} has no {' and no '.join(missing)}: load Onload's modules (onload_tool reload)"
        yield Signal(hardware, "onload-missing", Verdict.DELAYED, why, after=SETTLE)
    for path in NODES:
        if (fault := _fault(host, path, majors)) is not None:
            reason, why = fault
            yield Signal(hardware, reason, Verdict.DELAYED, why, after=SETTLE)
    found = version(host)
    if options.onload_version is not None and found is not None and found != options.onload_version:
        why = f"the module onload is of version {found}, not {options.onload_version}"
        yield Signal(hardware, "onload-version", Verdict.DEGRADED, why)
    for library in options.libraries:
        if not host.local(HostPath(library)).exists():
            yield Signal(
                hardware, "library-missing", Verdict.NOW, f"{library}, which containers are to get, is missing"
            )


def _fault(host: Host, path: HostPath, majors: dict[str, int] | None) -> tuple[str, str] | None:
    """What is wrong with a node; those of sfc_char and sfc_affinity may be missing."""
    try:
        found = host.local(path).stat()
    except FileNotFoundError:
        return ("node-missing", f"{path} does not exist") if path.name in _REQUIRED else None
    except OSError as error:
        return "node-missing", f"{path} cannot be used: {reason_of(not_short(error))}"
    if not stat.S_ISCHR(found.st_mode):
        return "not-a-device", f"{path} is not a character device"
    kernels, its = (majors or {}).get(path.name), os.major(found.st_rdev)
    if kernels is not None and its != kernels:
        return "wrong-node", f"{path} has the major number {its}, and the kernel's is {kernels}"
    return None


def _majors(host: Host) -> dict[str, int] | None:
    """Name → major number of every kind of character device; None if the list cannot be read."""
    if (text := sysfs.text(host, _DEVICES)) is None:
        return None
    characters = text.partition("Block devices:")[0]
    return {found[2]: int(found[1]) for line in characters.splitlines() if (found := _LINE.fullmatch(line))}
