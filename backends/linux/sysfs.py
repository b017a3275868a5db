"""Reads what sysfs says of one device: attributes, uevent properties, where its links lead, its device nodes.

Missing means unknown: whatever is missing, unreadable or garbage is None or empty, and no exception (but see `entries`),
unless this process ran out of something. Links are followed here and not by the kernel: one that leads elsewhere than
straight into /sys/devices counts as missing. What is read every few seconds of every device is read by the names in a
directory that is opened once (`opened_directory`), which takes half as long as by whole paths.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath
from backends.errors import not_short

DEVICES: Final = HostPath("/sys/devices")
ATTRIBUTE_BYTES: Final = 4096
"""The most that sysfs has in an attribute: a page."""

_NUMBER: Final = re.compile(r"\d{1,10}:\d{1,10}")


class KernelNode(Struct, frozen=True, order=True):
    """A device node as the kernel names it: what should be in /dev, not what is."""

    subsystem: str
    path: HostPath
    number: str
    """As in `DeviceNode.number`: `c:188:0`."""


def read_bytes(host: Host, path: HostPath) -> bytes:
    """The first page of a file.

    Raises:
        OSError: it cannot be read; ENOENT or ENODEV where the device has gone.
    """
    try:
        file = os.open(host.spell(path), os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise not_short(error) from None
    try:
        return os.read(file, ATTRIBUTE_BYTES)
    finally:
        os.close(file)


def attribute(host: Host, path: HostPath) -> str | None:
    """The text of an attribute, without the white space around it."""
    try:
        return read_bytes(host, path).decode(errors="replace").strip()
    except OSError:
        return None


def text(host: Host, path: HostPath) -> str | None:
    """The whole text of a file in /proc, which may be longer than an attribute; None if it cannot be read."""
    try:
        return host.local(path).read_text(errors="replace")
    except OSError as error:
        not_short(error)
        return None


def number(host: Host, path: HostPath) -> int | None:
    """The whole number in an attribute, if it is one."""
    text = attribute(host, path) or ""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None


def properties(host: Host, device: HostPath) -> dict[str, str]:
    """The properties in the device's `uevent`."""
    lines = (attribute(host, device / "uevent") or "").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def entries(host: Host, directory: HostPath) -> list[str]:
    """The names in a directory such as /sys/class/rtc, in order; none where there is no directory.

    Raises:
        OSError: it is there and cannot be read.
    """
    try:
        return sorted(os.listdir(host.spell(directory)))  # noqa: PTH208  # names are all we want
    except FileNotFoundError:
        return []
    except OSError as error:
        raise not_short(error) from None


def names(host: Host, directory: HostPath) -> list[str]:
    """As `entries`; none where the directory cannot be read."""
    try:
        return entries(host, directory)
    except OSError:
        return []


def linked_name(host: Host, link: HostPath) -> str | None:
    """The last component of the target of a link such as `driver` or `subsystem`."""
    try:
        return posixpath.basename(os.readlink(host.spell(link))) or None  # noqa: PTH115  # a name is all we want
    except OSError:
        return None


def target(host: Host, link: HostPath) -> HostPath | None:
    """The device that a link in /sys/class, /sys/bus or /sys/dev points to, whether or not it is there."""
    try:
        text = os.readlink(host.spell(link))  # noqa: PTH115  # it is put together below, by the host's names
    except OSError:
        return None
    path = posixpath.normpath(f"{link.parent}/{text}")
    return HostPath(path) if path.startswith(f"{DEVICES}/") else None


def device(host: Host, link: HostPath) -> HostPath | None:
    """The device that a link points to; None if there is none."""
    found = target(host, link)
    return found if found is not None and os.path.isdir(host.spell(found)) else None  # noqa: PTH112  # as `Host.spell`


def above(device: HostPath) -> Iterator[HostPath]:
    """The device, its parent, and so on to the root of its tree."""
    while device.text.startswith(f"{DEVICES}/"):
        yield device
        device = device.parent


def numa_node(host: Host, device: HostPath) -> int | None:
    """The NUMA node of the nearest device above that knows one; None where the kernel says -1."""
    found = next((n for up in above(device) if (n := number(host, up / "numa_node")) is not None), -1)
    return found if found >= 0 else None


def node(host: Host, device: HostPath) -> KernelNode | None:
    """The device's own node, if it has one."""
    numbers = attribute(host, device / "dev")
    if numbers is None or not _NUMBER.fullmatch(numbers):
        return None
    subsystem = linked_name(host, device / "subsystem") or ""
    path = node_path(properties(host, device))
    return KernelNode(subsystem, path, f"{'b' if subsystem == 'block' else 'c'}:{numbers}") if path else None


def node_path(properties: Mapping[str, str]) -> HostPath | None:
    """The path of the node that these properties name."""
    name = properties.get("DEVNAME", "")
    if not name.isprintable() or not {"", ".", ".."}.isdisjoint(name.split("/")):
        return None
    return HostPath(f"/dev/{name}")


def nodes_below(host: Host, device: HostPath, is_another: Callable[[str], bool]) -> Iterator[KernelNode]:
    """The nodes of a device and of all below it, without devices below that `is_another` takes by their names."""
    if (own := node(host, device)) is not None:
        yield own
    for name in _directories(host, device):
        if not is_another(name):
            yield from nodes_below(host, device / name, is_another)


def _directories(host: Host, device: HostPath) -> list[str]:
    """The directories in a device's directory that may have nodes: not `power`, and no endpoints of USB."""
    try:
        with os.scandir(host.spell(device)) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as error:
        not_short(error)
        return []
    return sorted(name for name in names if name != "power" and not name.startswith("ep_"))


# --- in a directory that is opened once ---


_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe in a fixture tree must not block us

_DIRECTORY: Final = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


@contextmanager
def opened_directory(path: str) -> Iterator[int]:
    """A directory, open for reading files in it; the kernel follows links to it.

    Raises:
        OSError: there is none, or it may not be entered.
    """
    directory = _open(path, _DIRECTORY)
    try:
        yield directory
    finally:
        os.close(directory)


def read_in(directory: int, name: str) -> bytes:
    """The content of a small file, without the white space around it.

    Raises:
        OSError: it cannot be read.
    """
    file = open_in(directory, name)
    try:
        return os.read(file, ATTRIBUTE_BYTES).strip()
    finally:
        os.close(file)


def open_in(directory: int, name: str) -> int:
    """Open a small file for reading.

    Raises:
        OSError: it cannot be opened.
    """
    return _open(name, _FLAGS, directory)


def _open(path: str, flags: int, directory: int | None = None) -> int:
    try:
        return os.open(path, flags, dir_fd=directory)
    except OSError as error:
        raise not_short(error) from None


def text_in(directory: int, name: str) -> bytes | None:
    """As `read_in`; None if it cannot be read."""
    try:
        return read_in(directory, name)
    except OSError:
        return None
