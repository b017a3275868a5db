"""Makes what a container gets of a queue, and removes it: a zcrypt node that leads to it alone, and a /sys without other cards.

To write a name to `create` of the class zcrypt makes a node. Its three masks say which cards, domains and ioctls it may use; at
first they permit nothing (drivers/s390/crypto/zcrypt_api.c). Masks are written whole, not bit by bit, which also corrects a
node that was made and never got its masks.

The tools in a container (libica, opencryptoki, lszcrypt) look for cards in /sys, and would find cards that their node does not
lead to. A plan (path → contents) is compared with the existing tree, and only files that differ are replaced: a container
may have the directories mounted, and then sees the new files.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from backends.base import Host, HostPath, Mount, NotReady
from backends.cex import queues
from backends.errors import reason_of
from backends.linux import sysfs
from backends.linux.kernel import Kernel, explained
from backends.linux.nodes import is_device_node

# --- nodes ---


NODES: Final = HostPath("/sys/devices/virtual/zcrypt")
EVERYTHING: Final = f"0x{'f' * 64}"
"""A mask with all its 256 bits."""

_APPEARS: Final = 6.4  # seconds, as long as IBM's plugin waits for udev; a claim has 10
_MODE: Final = 0o666  # a container's user need not be root


def mask(bit: int) -> str:
    """A mask with one of its 256 bits set, as sysfs writes it: the leftmost digit has the bits 0 to 3."""
    return f"0x{1 << (255 - bit):064x}"


def node(device_id: str) -> HostPath:
    """The node of an ID."""
    return HostPath(f"/dev/zcrypt-{device_id}")


class Nodes:
    """Makes and destroys the nodes of one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel

    def make(self, device_id: str, adapter: int, domain: int) -> None:
        """Make the node of an ID, or check that it leads to its queue.

        Raises:
            NotReady: it cannot be made. What was made is destroyed again.
        """
        name = node(device_id).name
        is_new = not self._host.local(NODES / name).is_dir()
        try:
            if is_new:
                self._write(queues.ZCRYPT / "create", name)
            if not self._kernel.wait(lambda: is_device_node(self._host, node(device_id)), _APPEARS):
                raise NotReady(f"{node(device_id)} did not appear in {_APPEARS:g} s")
            with explained(f"{node(device_id)} cannot be opened to every user"):
                self._host.local(node(device_id)).chmod(_MODE)
            for file, wanted in (("apmask", mask(adapter)), ("aqmask", mask(domain)), ("ioctlmask", EVERYTHING)):
                if sysfs.attribute(self._host, NODES / name / file) != wanted:
                    self._write(NODES / name / file, wanted)
        except NotReady:
            if is_new:
                with suppress(NotReady):  # the release destroys it
                    self.destroy(device_id)
            raise

    def destroy(self, device_id: str) -> None:
        """Destroy the node of an ID; nothing if there is none.

        Raises:
            NotReady: it is open, or the kernel refuses.
        """
        name = node(device_id).name
        if not self._host.local(NODES / name).is_dir():
            return
        try:
            self._kernel.write(queues.ZCRYPT / "destroy", name)
        except OSError as error:
            if error.errno == errno.ENODEV:  # it is gone already
                return
            why = "it is still open" if error.errno == errno.EBUSY else reason_of(error)
            raise NotReady(f"{node(device_id)} cannot be destroyed: {why}") from error

    def _write(self, path: HostPath, text: str) -> None:
        with explained(f"{path} refuses {text!r}"):
            self._kernel.write(path, f"{text}\n")


# --- the shadow of /sys ---


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
        found.append(Mount(queues.DEVICES / card / queue, f"/sys/bus/ap/devices/{queue}", read_only=True))
    return tuple(found)


def plan_shadow(host: Host, card: str, queue: str, *, live: bool) -> Plan:
    """The files and links of a tree.

    Raises:
        NotReady: a file that has to be copied cannot be read.
    """
    adapter, domain = int(card[4:], 16), queues.domain_of(queue)
    found: dict[str, Entry] = dict(_copies(host, queues.BUS, "bus/ap", _BUS_COPIES, _BUS_IF_THERE))
    made = {"ap_adapter_mask": mask(adapter), "ap_usage_domain_mask": mask(domain), "ap_domain": str(domain)}
    made |= {"ap_control_domain_mask": f"0x{0:064x}", "apmask": EVERYTHING, "aqmask": EVERYTHING}
    found |= {f"bus/ap/{name}": f"{text}\n".encode() for name, text in made.items()}
    real, at = queues.DEVICES / card, f"devices/ap/{card}"
    counters: Mapping[str, Entry] = {name: Link(f"{queue}/{name}") for name in _UNUSED} if live else _UNUSED
    for path, below, copies, if_there, up, driver, states in (
        (real, at, _CARD_COPIES, _CARD_IF_THERE, "../../..", "cex4card", counters),
        (real / queue, f"{at}/{queue}", _QUEUE_COPIES, _QUEUE_IF_THERE, "../../../..", queues.QUEUE_DRIVER, _UNUSED),
    ):
        found |= _copies(host, path, below, copies, if_there)
        found |= {f"{below}/{name}": state for name, state in states.items()} | {f"{below}/load": b"0\n"}
        found[f"{below}/driver"] = Link(f"{up}/bus/ap/drivers/{driver}")
        found[f"{below}/subsystem"] = Link(f"{up}/bus/ap")
        own = at.removeprefix("devices/ap/") if path == real else f"{card}/{queue}"
        found[f"bus/ap/devices/{path.name}"] = Link(f"../../../devices/ap/{own}")
        found[f"bus/ap/drivers/{driver}/{path.name}"] = Link(f"../../../../devices/ap/{own}")
    return found


def build_shadow(host: Host, device_id: str, wanted: Plan) -> None:
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


def remove_shadow(host: Host, device_id: str) -> None:
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
