"""Checks the device nodes of GPUs: which there should be, and whether they are there and lead to the GPU. Links them in /dev/char."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import Struct

from backends.base import Device, Host, HostPath, Node, Signal, Verdict
from backends.linux import sysfs
from backends.linux.kernel import explained
from backends.linux.nodes import NoNodeError, device_node

DRI: Final = HostPath("/dev/dri")

_DRM: Final = re.compile(r"card\d+|renderD\d+")  # not controlD64, and not the connectors


class Wanted(Struct, frozen=True):
    """A node that a GPU should have."""

    path: HostPath
    number: str = ""
    """`c:195:0`; empty if that is not known."""


def drm(host: Host, device: HostPath, names: Iterable[str]) -> list[Wanted]:
    """The nodes that the kernel names for a device's children in `drm`."""
    found = []
    for name in names:
        if _DRM.fullmatch(name):
            node = sysfs.node(host, device / "drm" / name)
            found.append(Wanted(node.path, node.number) if node else Wanted(DRI / name))
    return found


def fault(host: Host, wanted: Iterable[Wanted], roots: Sequence[HostPath] = ()) -> str | None:
    """What is wrong with the first node that cannot be used; None if all can, in /dev or below another root."""
    return next((why for one in wanted if (why := _fault(host, one.path, one.number, roots)) is not None), None)


def handed_out(wanted: Sequence[Wanted]) -> tuple[Node, ...]:
    """The nodes as a container gets them, at the same paths as on the host."""
    return tuple(Node(one.path, one.path.text, "rw") for one in wanted)


def numbers(wanted: Sequence[Wanted]) -> dict[str, tuple[str, ...]]:
    """The attribute with the number of each node, by which `signals` checks them later."""
    return {"node_numbers": tuple(one.number for one in wanted)}


def signals(host: Host, device: Device, hardware: str, roots: Sequence[HostPath] = ()) -> Iterator[Signal]:
    """A signal for each node of a device, made with `handed_out` and `numbers`, that is missing or wrong."""
    told = device.attributes.get("node_numbers", ())
    for node, number in zip(device.nodes, told, strict=True):
        if (why := _fault(host, node.path, number, roots)) is not None:
            yield Signal(hardware, "node-missing", Verdict.NOW, why)


def _fault(host: Host, path: HostPath, number: str, roots: Sequence[HostPath]) -> str | None:
    try:
        found = _plain_number(host, path) or device_node(host, path).number
        why = f"{path} is {found}, but the driver says {number}" if number and found != number else None
    except NoNodeError as error:
        why = error.sentence
    if why is None or not roots:
        return why
    if any(found == (number or found) for _, found in below(host, path, roots)):
        return None
    return f"{why}, nor is it below {' or '.join(map(str, roots))}"


def below(host: Host, path: HostPath, roots: Sequence[HostPath]) -> Iterator[tuple[HostPath, str]]:
    """Where the node lies below these roots instead, and its number as `DeviceNode.number`."""
    for root in roots:
        if (number := _plain_number(host, elsewhere := HostPath(f"{root}{path}"))) is not None:
            yield elsewhere, number


def _plain_number(host: Host, path: HostPath) -> str | None:
    """As `DeviceNode.number`, of a node that is no link: nearly always, and five times faster."""
    try:
        found = os.lstat(host.spell(path))
    except OSError:
        return None
    device = found.st_rdev
    return f"c:{os.major(device)}:{os.minor(device)}" if stat.S_ISCHR(found.st_mode) else None


# --- links in /dev/char ---


def link_in_dev_char(host: Host, device: Device, roots: Sequence[HostPath]) -> None:
    """Make the links in /dev/char that udev does not make for NVIDIA's nodes, where there is none yet.

    `systemctl daemon-reload` makes systemd write the device rules of containers again, for which it looks devices up in
    /dev/char/<major>:<minor>. Without the link a container loses its GPU. `nvidia-ctk system create-dev-char-symlinks` makes
    the same links.

    Raises:
        NotReady: a link cannot be made.
    """
    for node in device.nodes:
        found = _char_number(host, node.path, roots)
        if found is None:
            continue
        number, target = found
        link = host.dev / "char" / number
        with explained(f"/dev/char/{number} cannot be made"):
            link.parent.mkdir(exist_ok=True)
            try:
                link.symlink_to(target)
            except FileExistsError:  # it may be another GPU's too, which is adopted at the same moment
                if not link.is_symlink():
                    raise


def _char_number(host: Host, path: HostPath, roots: Sequence[HostPath]) -> tuple[str, str] | None:
    """`195:0`, and what a link with that name leads to."""
    try:
        return device_node(host, path).number.removeprefix("c:"), f"..{path.text.removeprefix('/dev')}"
    except NoNodeError:
        found = next(below(host, path, roots), None)
        return (found[1].removeprefix("c:"), found[0].text) if found else None
