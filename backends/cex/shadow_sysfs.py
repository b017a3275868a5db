"""Builds the /sys that a container sees of the AP bus: one card and one queue, as if the machine had no others.

The tools in a container (libica, opencryptoki, lszcrypt) look for cards in /sys, and would find cards that their node does not
lead to. A plan (path → contents) is compared with the existing tree, and only files that differ are replaced: a container
may have the directories mounted, and then sees the new files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from backends.base import Host, HostPath, Mount, NotReady
from backends.cex import ap_bus
from backends.cex.zcrypt_nodes import EVERYTHING, mask
from backends.errors import reason_of
from backends.linux import sysfs
from backends.linux.kernel import explained

BASE: Final = HostPath("/run/fairlead/shadowsysfs")

_BUS_COPIES: Final = ("ap_interrupts", "ap_max_domain_id", "poll_thread", "poll_timeout")
_CARD_COPIES: Final = ("ap_functions", "depth", "hwtype", "raw_hwtype", "type")
_QUEUE_COPIES: Final = ("interrupt", "reset")
_BUS_IF_THERE: Final = ("ap_max_adapter_id",)
_CARD_IF_THERE: Final = ("API_ordinalnr", "FW_version", "op_modes", "serialnr")
_QUEUE_IF_THERE: Final = ("mkvps", "op_modes")
_UNUSED: Final = {"online": b"1\n", "pendingq_count": b"0\n", "request_count": b"0\n", "requestq_count": b"0\n"}
"""The state and counters of an unused queue. With `live` a card's are links to those of the queue, which is mounted there."""


class Link(NamedTuple):
    """A symbolic link."""

    target: str


Entry = bytes | Link
Plan = Mapping[str, Entry]
"""Path below the tree's root → what is there; directories follow from it."""


def tree(device_id: str) -> HostPath:
    """The root of an ID's tree."""
    return BASE / f"sysfs-{device_id}"


def mounts(device_id: str, card: str, queue: str, *, live: bool) -> tuple[Mount, ...]:
    """What a container gets of an ID's tree, in an order that a runtime can mount."""
    root = tree(device_id)
    found = [Mount(root / below, f"/sys/{below}", read_only=True) for below in ("bus/ap", "devices/ap")]
    if live:
        found.append(Mount(ap_bus.DEVICES / card / queue, f"/sys/bus/ap/devices/{queue}", read_only=True))
    return tuple(found)


def plan(host: Host, card: str, queue: str, *, live: bool) -> Plan:
    """The files and links of a tree.

    Raises:
        NotReady: a file that has to be copied cannot be read.
    """
    adapter, domain = int(card[4:], 16), ap_bus.domain(queue)
    found: dict[str, Entry] = dict(_copies(host, ap_bus.BUS, "bus/ap", _BUS_COPIES, _BUS_IF_THERE))
    made = {"ap_adapter_mask": mask(adapter), "ap_usage_domain_mask": mask(domain), "ap_domain": str(domain)}
    made |= {"ap_control_domain_mask": f"0x{0:064x}", "apmask": EVERYTHING, "aqmask": EVERYTHING}
    found |= {f"bus/ap/{name}": f"{text}\n".encode() for name, text in made.items()}
    real, at = ap_bus.DEVICES / card, f"devices/ap/{card}"
    counters: Mapping[str, Entry] = {name: Link(f"{queue}/{name}") for name in _UNUSED} if live else _UNUSED
    for path, below, copies, if_there, up, driver, states in (
        (real, at, _CARD_COPIES, _CARD_IF_THERE, "../../..", "cex4card", counters),
        (real / queue, f"{at}/{queue}", _QUEUE_COPIES, _QUEUE_IF_THERE, "../../../..", ap_bus.QUEUE_DRIVER, _UNUSED),
    ):
        found |= _copies(host, path, below, copies, if_there)
        found |= {f"{below}/{name}": state for name, state in states.items()} | {f"{below}/load": b"0\n"}
        found[f"{below}/driver"] = Link(f"{up}/bus/ap/drivers/{driver}")
        found[f"{below}/subsystem"] = Link(f"{up}/bus/ap")
        own = at.removeprefix("devices/ap/") if path == real else f"{card}/{queue}"
        found[f"bus/ap/devices/{path.name}"] = Link(f"../../../devices/ap/{own}")
        found[f"bus/ap/drivers/{driver}/{path.name}"] = Link(f"../../../../devices/ap/{own}")
    return found


def build(host: Host, device_id: str, wanted: Plan) -> None:
    """Make the tree of an ID as planned; existing directories are kept, since a container may have them mounted.

    Raises:
        NotReady: it cannot be written, as a whole at least.
    """
    root = host.local(tree(device_id))
    with explained(f"{tree(device_id)} cannot be written"):
        there = dict(_read(root))
        for below in there.keys() - wanted.keys():
            (root / below).unlink()
        for below, entry in wanted.items():
            if there.get(below) != entry:
                _put(root / below, entry)
        for directory in (root, *(path for path in root.rglob("*") if path.is_dir() and not path.is_symlink())):
            directory.chmod(0o755)


def remove(host: Host, device_id: str) -> None:
    """Remove an ID's tree; nothing if there is none.

    Raises:
        NotReady: it cannot be removed.
    """
    import shutil  # noqa: PLC0415  # a millisecond of a start, for what happens after a pod

    root = host.local(tree(device_id))
    with explained(f"{tree(device_id)} cannot be removed"):
        if root.exists():
            shutil.rmtree(root)


def _copies(
    host: Host, path: HostPath, below: str, names: Iterable[str], if_there: Iterable[str]
) -> Iterator[tuple[str, bytes]]:
    for name in (*names, *if_there):
        try:
            yield f"{below}/{name}", sysfs.read_bytes(host, path / name)
        except OSError as error:
            if name in names:
                raise NotReady(f"{path / name} cannot be read: {reason_of(error)}") from error


def _read(root: Path) -> Iterator[tuple[str, Entry]]:
    for at, directories, files in os.walk(root):
        for path in (Path(at, name) for name in (*directories, *files)):
            below = path.relative_to(root).as_posix()
            if path.is_symlink():
                yield below, Link(os.fspath(path.readlink()))
            elif not path.is_dir():
                yield below, path.read_bytes()


def _put(path: Path, entry: Entry) -> None:
    """Replace what is there in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    if isinstance(entry, Link):
        fresh.symlink_to(entry.target)
    else:
        fresh.write_bytes(entry)
        fresh.chmod(0o444)  # independent of the umask, as the modes of directories
    fresh.rename(path)
