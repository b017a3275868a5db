"""Finds the device node that a path in the host's /dev leads to, with links followed inside the host's own tree.

The kernel would follow an absolute link into the tree of this process, which in a container is not the host's. So each link
is read and followed here. What a node stands for, sysfs tells (`behind`).
"""

from __future__ import annotations

import enum
import os
import posixpath
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Node, Signal, Verdict
from backends.errors import not_short, reason_of
from backends.linux import pci, sysfs, usb

MOST_LINKS: Final = 40
"""Links followed before a path counts as a loop (the kernel's MAXSYMLINKS)."""

_TREES: Final = ("dev", "sys", "proc", "run")  # seen elsewhere, each on its own (`Host`): no link of the root's

_KINDS: Final = {
    stat.S_IFREG: "a plain file",
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class DeviceNode(Struct, frozen=True):
    """A device node as one look found it."""

    path: HostPath
    """Where it lies once all links are followed."""
    block: bool
    major: int
    minor: int
    via: frozenset[HostPath] = frozenset()
    """The paths that links on the way pointed to; none where there was no link."""

    @property
    def number(self) -> str:
        """`c:10:232`: type, major and minor number."""
        return f"{'b' if self.block else 'c'}:{self.major}:{self.minor}"


class Fault(enum.Enum):
    """Why a path leads to no device node."""

    MISSING = enum.auto()
    DANGLING = enum.auto()  # a link whose target is missing
    DIRECTORY = enum.auto()
    OTHER = enum.auto()  # a plain file, a socket, a loop, a way out of /dev
    UNREADABLE = enum.auto()


class NoNodeError(Exception):
    """The path leads to no device node; the sentence says why."""

    def __init__(self, fault: Fault, sentence: str) -> None:
        super().__init__(sentence)
        self.fault = fault
        self.sentence = sentence


def device_node(host: Host, path: HostPath) -> DeviceNode:
    """The node that `path`, in the host's /dev, leads to.

    Raises:
        NoNodeError: it leads to none, or out of /dev.
    """
    status, real, via = _follow(host, path)
    kind = stat.S_IFMT(status.st_mode)
    if kind not in (stat.S_IFCHR, stat.S_IFBLK):
        fault = Fault.DIRECTORY if kind == stat.S_IFDIR else Fault.OTHER
        raise NoNodeError(fault, f"{_led(path, via)} is {_KINDS.get(kind, 'something else')}, not a device node")
    device = status.st_rdev
    return DeviceNode(real, kind == stat.S_IFBLK, os.major(device), os.minor(device), frozenset(via))


def is_device_node(host: Host, path: HostPath) -> bool:
    """Whether `path`, in the host's /dev, leads to a node."""
    try:
        device_node(host, path)
    except NoNodeError:
        return False
    return True


def missing(host: Host, hardware: str, nodes: Iterable[Node]) -> Iterator[Signal]:
    """A signal about `hardware` for each of these nodes that is missing or no device node."""
    for node in nodes:
        try:
            device_node(host, node.path)
        except NoNodeError as error:
            yield Signal(hardware, "node-missing", Verdict.NOW, error.sentence)


def links_to_file(host: Host, path: HostPath) -> frozenset[HostPath]:
    """Every path that a link points to on the way from `path` to its target, anywhere on the host.

    Raises:
        NoNodeError: it leads to nothing at all.
    """
    return frozenset(_follow(host, path, anywhere=True)[2])


def directory(host: Host, path: HostPath, *, anywhere: bool = False) -> HostPath | None:
    """The directory that `path`, in the host's /dev or `anywhere`, leads to; None if it leads to none.

    Raises:
        NoNodeError: it cannot be read, or leads out of /dev where it must not.
    """
    try:
        status, real, _ = _follow(host, path, anywhere=anywhere)
    except NoNodeError as error:
        if error.fault in (Fault.MISSING, Fault.DANGLING):
            return None
        raise
    return real if stat.S_ISDIR(status.st_mode) else None


def nodes_below(host: Host, path: HostPath, most: int) -> list[tuple[HostPath, DeviceNode]]:
    """The nodes in a directory of the host's /dev and in those below it, by name.

    Links in it are skipped, as container runtimes do.

    Raises:
        NoNodeError: there is no such directory, it cannot be listed, or it has more than `most` entries.
    """

    def fail(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise _fault(error, path, []) from None

    if (real := directory(host, path)) is None:
        raise NoNodeError(Fault.MISSING, f"{path} does not exist")
    top, seen, found = _local(host, real.text.split("/")[1:]), 0, list[tuple[HostPath, DeviceNode]]()
    for at, directories, names in os.walk(top, onerror=fail):
        if (seen := seen + len(directories) + len(names)) > most:
            raise NoNodeError(Fault.OTHER, f"{path} has more than {most:,} entries; name the nodes that are needed")
        for name in names:
            with suppress(FileNotFoundError):
                status = os.lstat(f"{at}/{name}")
                if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
                    below, device, is_block = f"{at[len(top) :]}/{name}", status.st_rdev, stat.S_ISBLK(status.st_mode)
                    node = DeviceNode(HostPath(f"{real}{below}"), is_block, os.major(device), os.minor(device))
                    found.append((HostPath(f"{path}{below}"), node))
    return sorted(found, key=lambda one: one[0])


def numa_node(host: Host, node: DeviceNode) -> int | None:
    """The NUMA node of the hardware behind a device node; None where sysfs does not know it."""
    attribute = f"dev/{'block' if node.block else 'char'}/{node.major}:{node.minor}/device/numa_node"
    try:
        with open(f"{host.sys}/{attribute}") as file:  # noqa: PTH123  # pathlib doubles the cost, and there may be 10,000 nodes
            found = int(file.read())
    except (FileNotFoundError, ValueError):
        return None
    except OSError as error:
        not_short(error)
        return None
    return found if found >= 0 else None


def _follow(host: Host, path: HostPath, *, anywhere: bool = False) -> tuple[os.stat_result, HostPath, list[HostPath]]:
    """The status of what lies at the end of all links, its path, and each path that a link pointed to."""
    at: list[str] = []  # the components walked, none of them a link
    ahead = path.text.split("/")[::-1]
    via: list[HostPath] = []
    status = None  # of what lies at `at`, where it was asked for
    try:
        while ahead:
            part = ahead.pop()
            if part in ("", "."):
                continue
            status = None
            if part == "..":
                del at[-1:]
                continue
            at.append(part)
            if at[0] != "dev" and not anywhere:
                break
            if len(at) == 1 and part in _TREES:
                continue
            local = _local(host, at)
            status = os.lstat(local)
            if stat.S_ISLNK(status.st_mode):
                status, target = None, os.readlink(local)  # noqa: PTH115  # strings: this runs for each of 10,000 nodes
                del at[0 if target.startswith("/") else -1 :]
                ahead += target.split("/")[::-1]
                via.append(HostPath(posixpath.normpath("/".join(("/dev/..", *at, *ahead[::-1])))))
                if len(via) > MOST_LINKS:
                    raise NoNodeError(Fault.OTHER, f"{path} is a loop of symbolic links")
        if not anywhere and at[:1] != ["dev"]:
            raise NoNodeError(Fault.OTHER, f"{_led(path, via)} leads out of /dev")
        status = status or os.stat(_local(host, at))  # noqa: PTH116  # as above
        return status, HostPath("/" + "/".join(at)), via
    except OSError as error:
        raise _fault(error, path, via) from None


def _local(host: Host, at: list[str]) -> str:
    """A path of the host, given as its components, where this process sees it."""
    if at[:1] == ["dev"]:  # nearly always, and ten times faster than by `Host.local`
        return "/".join((os.fspath(host.dev), *at[1:]))
    return os.fspath(host.local(HostPath("/" + "/".join(at))))


def _fault(error: OSError, path: HostPath, via: list[HostPath]) -> NoNodeError:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        reason = reason_of(error)
        return NoNodeError(Fault.UNREADABLE, f"{_led(path, via)} cannot be read: {reason}")
    if via:
        return NoNodeError(Fault.DANGLING, f"{path} is a link to {via[-1]}, which does not exist")
    return NoNodeError(Fault.MISSING, f"{path} does not exist")


def _led(path: HostPath, via: list[HostPath]) -> str:
    return f"{path}, a link to {via[-1]}," if via else str(path)


# --- what is behind a node ---


_NVIDIA: Final = HostPath("/proc/driver/nvidia/gpus")
NVIDIA_MAJOR: Final = 195
"""Of /dev/nvidia0 and so on (Documentation/admin-guide/devices.txt). Their driver makes no devices in sysfs; their numbers
follow the order in which it finds the GPUs."""
_SOFTWARE: Final = "/sys/devices/virtual/"
_DISKS: Final = f"{_SOFTWARE}nvme-subsystem/"
"""Where disks are that several NVMe controllers may lead to, as most of servers are (drivers/nvme/host/multipath.c)."""
_SCSI_HOST: Final = re.compile(r"host\d+")
_OWN_IDS: Final = ("wwid", "cid", "serial", "unique_id")
"""Attributes that tell one piece from another of its model: of disks and NVMe namespaces (drivers/scsi/scsi_sysfs.c,
drivers/nvme/host/sysfs.c), memory cards (drivers/mmc/core/mmc.c), NVMe controllers, and AMD's GPUs (amdgpu_pm.c)."""
_PARTS: Final = ("name", "index", "port_number", "partition", "nsid")
"""Attributes that tell one part of a piece from another: of I2C adapters, cameras (video4linux), ports of a serial
adapter (drivers/usb/serial/bus.c), partitions, NVMe namespaces."""


class Behind(Struct, frozen=True):
    """What stands behind a node, as far as sysfs tells."""

    identity: str = ""
    """Its IDs, its serial, and which part of it the node is: `0403:6001:A50285BI 1.0`; empty if nothing is known."""
    place: frozenset[str] = frozenset()
    """As `Device.place`: the USB port, the PCI function or the platform device; of a disk behind a SCSI host, or several NVMe controllers, itself."""


def behind(host: Host, node: DeviceNode) -> Behind:
    """What stands behind a node."""
    link = f"/sys/dev/{'block' if node.block else 'char'}/{node.major}:{node.minor}"
    path = sysfs.device(host, HostPath(link))
    if path is None and node.major == NVIDIA_MAJOR and not node.block:
        return _nvidia(host, node.minor)
    if path is None or (path.text.startswith(_SOFTWARE) and not path.text.startswith(_DISKS)):
        return Behind()
    own: list[str] = []
    parts: list[str] = []
    disk = False
    for up in sysfs.above(path):
        if usb.is_port(up.name):
            return Behind(" ".join((usb.identity(host, up), *own, *parts)), usb.places(host, up))
        names = frozenset(sysfs.names(host, up))
        own += [] if own else [f"{it}={text}" for it in _OWN_IDS if it in names and (text := _text(host, up / it))][:1]
        if pci.ADDRESS.fullmatch(up.name):
            place = frozenset((f"pci:{up.name}",)) if not disk else frozenset(own)
            return Behind(" ".join((pci.identity(host, up), *own, *parts)), place)
        if sysfs.linked_name(host, up / "subsystem") == "platform":
            place = frozenset((f"platform:{up.name}",)) if not disk else frozenset(own)
            return Behind(" ".join((up.name, *own, *parts)), place)
        parts += (text for it in _PARTS if it in names and (text := _text(host, up / it)))
        parts += (up.name.partition(":")[2],) if usb.is_interface(up.name) else ()
        disk = disk or _SCSI_HOST.fullmatch(up.name) is not None
    return Behind(" ".join((*own, *parts)), frozenset(own)) if own and path.text.startswith(_DISKS) else Behind()


def _nvidia(host: Host, minor: int) -> Behind:
    """The GPU with this minor number, by what its driver says in /proc."""
    for address in sysfs.names(host, _NVIDIA):
        if nvidia_minor(host, address) == str(minor):
            function = sysfs.device(host, pci.FUNCTIONS / address)  # its UUID is unknown until it is used first
            return Behind(pci.identity(host, function) if function else "", frozenset((f"pci:{address}",)))
    return Behind()


def nvidia_minor(host: Host, address: str) -> str | None:
    """The minor number of the node of NVIDIA's GPU at this address, by what its driver says in /proc; None if it says none."""
    lines = (sysfs.text(host, _NVIDIA / address / "information") or "").splitlines()
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return said.get("Device Minor")


def _text(host: Host, path: HostPath) -> str:
    text = sysfs.attribute(host, path) or ""
    return text if text.isprintable() else ""
