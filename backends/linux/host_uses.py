"""Tells what the host itself needs a PCI function for: its screen, its disks, its network, the switches between its GPUs.

This is checked before a function is taken from its driver. What cannot be read counts as needed: a missing file must not
cost a machine its root file system. Files: proc_pid_mountinfo(5); /proc/swaps in proc(5); for routes see `netdevs`.

What the kernel tells of interfaces (net/core/dev.c, netdev_adjacent_sysfs_add): `upper_NAME` is what is made of one (VLAN,
macvlan, ipvlan, bond), in the same network namespace; `master` is the one of these that gets all that it receives (bridge,
bond, team, VRF, ovs-system). Of Open vSwitch it tells no more: a bridge of it, as br-ex, which has the addresses and routes,
is linked to no port (net/openvswitch/vport-netdev.c links ports to ovs-system; vport-internal_dev.c links nothing).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Final, TypeVar

from backends.base import Host, HostPath
from backends.errors import not_short, several
from backends.linux import netdevs, netlink, pci, sysfs
from backends.linux.nodes import NVIDIA_MAJOR, nvidia_minor

_BLOCK: Final = HostPath("/sys/class/block")
_BTRFS: Final = HostPath("/sys/fs/btrfs")
"""Has a directory for each btrfs that is mounted, with the names of all its disks (fs/btrfs/sysfs.c)."""
_MOUNTS: Final = HostPath("/proc/1/mountinfo")
"""The host's own, not those of the container that we may be in."""
_SWAPS: Final = HostPath("/proc/swaps")
_PPPOE: Final = HostPath("/proc/1/net/pppoe")
"""The sessions of PPP over Ethernet: a header, then ID, address and the card's interface in each line (pppoe_seq_show,
drivers/net/ppp/pppoe.c). The kernel links ppp0, which has the route, to no card."""

_NVME_PATH: Final = re.compile(r"nvme(\d+)c\d+n(\d+)")  # the path by one of the controllers that lead to a disk
_ETHERNET: Final = "0200"
MAKE_NO_INTERFACE: Final = frozenset({"uio_pci_generic", "igb_uio", "vp-vdpa", "pci-stub"})
"""Drivers of network cards that make none: for user space, for a vDPA device (drivers/vdpa/virtio_pci/vp_vdpa.c), for nobody
(drivers/pci/pci-stub.c)."""
_NVIDIA, _INFINIBAND = "15b3", "0207"
_SWITCH_MANAGEMENT: Final = b"SMDL=SW_MNG"
"""In the vital product data of the adapters by which Fabric Manager reaches the NVSwitches of an HGX B200 or B300, and in that
of no other: NVIDIA's nvidia-fabricmanager-start.sh chooses them by it. Apart from that they are ConnectX-7 as all others."""
_SWITCH_MANAGEMENT_IDS: Final = ("15b3", "0087")
"""Their subsystem where that data cannot be read (only root may): of all four in the udev database of a DGX B200 in
canonical/checkbox, DISK_SAMSUNG_KIOXIA.txt; its adapters for computing have 15b3:0050."""

_ASKS_NVML: Final = "/gpu/nvml_process.py"

_Thing = TypeVar("_Thing")


def uses(host: Host, function: pci.Function, *, named: bool = False) -> Iterator[str]:
    """What the host needs the function for, each in words that follow its name: `drives the screen`.

    `named`: whether the configuration names this very function; then it may have addresses.
    """
    yield from _screens(host, function)
    if manages_nvswitches(host, function):
        yield "manages the NVSwitches between the GPUs, for Fabric Manager"
    if function.virtual:
        yield f"has {several(len(function.virtual), 'virtual function')}, which would go"
    if number := subfunctions(function):
        yield f"has {several(number, 'subfunction')}, which would go"
    yield from _disks(host, function)
    yield from _networks(host, function, named=named)


def busy_disks(host: Host, function: pci.Function) -> Iterator[str]:
    """The disks that something has opened for itself alone, found by trying the same; in the same words.

    It finds uses that no list shows: ZFS, further disks of btrfs, a database on the bare disk, a mount in a pod.
    """
    for name, path in _blocks(host, function).items():
        node = sysfs.node(host, path)
        if node is None:
            continue
        try:
            os.close(os.open(host.local(node.path), os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError as error:
            if not_short(error).errno == errno.EBUSY:
                yield f"has the disk {name}, which something uses"


def opened_by(host: Host, function: pci.Function, *, even_by_a_question: bool = False) -> str | None:
    """Which process has a GPU of NVIDIA's driver open, in words that follow the name of the GPU; None if none is seen.

    The driver does not let go of such a GPU, nor does it say so: the write to `unbind` first takes the GPU from its list, and then
    waits for ever ("Attempting to remove device ... with non-zero usage count!", nv_pci_remove_helper in kernel-open/nvidia/nv-pci.c).
    A reset would leave a GPU that the driver believes to be initialized; once the last process has closed it, it is not. The
    process is often nvidia-persistenced. A question of ours to NVIDIA's library ends by itself, and so counts only where that is asked.
    Seen are those of the host's /proc whose files we may read (CAP_SYS_PTRACE).
    """
    if function.driver != "nvidia":
        return None
    minor = nvidia_minor(host, function.address)
    if minor is None or not minor.isdecimal():
        return None
    proc, node, number = HostPath("/proc"), f"nvidia{minor}", os.makedev(NVIDIA_MAJOR, int(minor))
    for process in filter(str.isdecimal, sysfs.names(host, proc)):
        files = proc / process / "fd"
        if any(_is_open(host, files / name, node, number) for name in sysfs.names(host, files)):
            command = sysfs.text(host, proc / process / "cmdline") or ""
            is_ours = _ASKS_NVML in command
            if is_ours and "\0events\0" not in command and not even_by_a_question:
                continue
            named = (
                "Fairlead, which asks NVIDIA's library," if is_ours else sysfs.attribute(host, proc / process / "comm")
            )
            return f"is open in {named or 'a process'} (process {process}), which its driver would wait for"
    return None


def _is_open(host: Host, file: HostPath, node: str, number: int) -> bool:
    """Whether an open file is the node: one of that name, and with that number, since everybody may have a file of that name."""
    if sysfs.linked_name(host, file) != node:
        return False
    try:
        found = host.local(file).stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == number


def subfunctions(function: pci.Function) -> int:
    """How many subfunctions are made of it; they go when it gets another driver, or moves into a pod."""
    return sum(".sf." in name for name in function.entries)  # mlx5_core.sf.2, of the auxiliary bus


def manages_nvswitches(host: Host, function: pci.Function) -> bool:
    """Whether a function is an adapter whose only port leads to the NVSwitches of the GPUs here, and to no network."""
    if function.vendor != _NVIDIA or not function.kind.startswith(_INFINIBAND) or function.physical is not None:
        return False
    try:
        data = _vital_data(host, function.path, function.binding)
    except OSError:
        data = b""
    if not data:  # it is empty where the kernel makes no sense of it
        return (function.subsystem_vendor, function.subsystem_device) == _SWITCH_MANAGEMENT_IDS
    return _SWITCH_MANAGEMENT in data


@lru_cache(maxsize=256)
def _vital_data(host: Host, path: HostPath, _binding: str) -> bytes:
    """The function's VPD, read once: it never changes, and the kernel fetches it in steps of four bytes (pci/vpd.c)."""
    return sysfs.read_bytes(host, path / "vpd")


# --- screens ---


def _screens(host: Host, function: pci.Function) -> Iterator[str]:
    if function.boot_display:
        yield "drives the screen of the firmware and the console (boot_vga)"
    for card in function.drm:
        for connector in sysfs.names(host, function.path / "drm" / card):
            status, enabled = (
                sysfs.attribute(host, function.path / "drm" / card / connector / name) for name in ("status", "enabled")
            )
            if status == "connected" or (status, enabled) == ("unknown", "enabled"):  # some cables cannot tell
                yield f"drives the screen at {connector}"


# --- disks ---


def _disks(host: Host, function: pci.Function) -> Iterator[str]:
    blocks = _blocks(host, function)
    if not blocks:
        return
    mounts = _mounted(host)
    if mounts is None:
        yield f"has the disk {min(blocks)}, and what is mounted cannot be read in {_MOUNTS}"
        return
    swaps, backed = _swapped_to(host), _backed(host)
    for name, path in blocks.items():
        yield from _uses_of(host, name, path, mounts, swaps, backed)


def _uses_of(
    host: Host,
    name: str,
    path: HostPath,
    mounts: Mapping[str, str],
    swaps: frozenset[str],
    backed: Mapping[str, Sequence[HostPath]],
) -> Iterator[str]:
    """What a disk or partition is used for, itself or through what is made of it (dm, md, a loop device)."""

    def made_of(disk: HostPath) -> Iterator[HostPath]:
        yield from _holders(host, disk)
        yield from backed.get(disk.name, ())

    made_of_it = {above.name: above for above in _all_above(path, made_of)}
    for block, at in {name: path, **made_of_it}.items():
        where = f"has the disk {name}" + (f", part of {block}" if block != name else "")
        number = sysfs.attribute(host, at / "dev") or ""
        if (mount := mounts.get(number) or mounts.get(f"/dev/{block}")) is not None:
            yield f"{where}, which is mounted at {mount}"
            return
        if block in swaps:
            yield f"{where}, which is swapped to"
            return
    if made_of_it:
        yield f"has the disk {name}, part of {min(made_of_it)}"
    elif any(name in sysfs.names(host, _BTRFS / volume / "devices") for volume in sysfs.names(host, _BTRFS)):
        yield f"has the disk {name}, part of a mounted btrfs"


def _blocks(host: Host, function: pci.Function) -> dict[str, HostPath]:
    """The disks and partitions below a function, and those that its NVMe controller is a path to."""
    every = {
        name: path for name in sysfs.names(host, _BLOCK) if (path := sysfs.device(host, _BLOCK / name)) is not None
    }
    below = [name for name, path in every.items() if path.text.startswith(f"{function.path}/")]
    heads = {f"nvme{found[1]}n{found[2]}" for name in below if (found := _NVME_PATH.fullmatch(name)) is not None}
    tops = tuple(f"{every[head]}/" for head in heads & every.keys())
    return {name: path for name, path in every.items() if name in below or f"{path}/".startswith(tops)}


def _holders(host: Host, disk: HostPath) -> Iterator[HostPath]:
    """What is made of a disk or partition."""
    for holder in sysfs.names(host, disk / "holders"):
        yield sysfs.device(host, _BLOCK / holder) or _BLOCK / holder


def _backed(host: Host) -> dict[str, list[HostPath]]:
    """Disk or partition → the loop and zram devices on it, which are not among its holders.

    Files: loop/backing_file (drivers/block/loop.c), backing_dev (drivers/block/zram).
    """
    found: dict[str, list[HostPath]] = {}
    for name in sysfs.names(host, _BLOCK):
        file = {"loop": "loop/backing_file", "zram": "backing_dev"}.get(name[:4])
        below = sysfs.attribute(host, _BLOCK / name / file) if file is not None else None
        if below is not None and below.startswith("/dev/"):
            found.setdefault(below.rpartition("/")[2], []).append(sysfs.device(host, _BLOCK / name) or _BLOCK / name)
    return found


def _mounted(host: Host) -> dict[str, str] | None:
    """Device number or source → mount point, of everything mounted."""
    mounts = sysfs.text(host, _MOUNTS)
    if mounts is None:
        return None
    found: dict[str, str] = {}
    for fields in map(str.split, mounts.splitlines()):
        if len(fields) < 5:
            continue
        found.setdefault(fields[2], fields[4])
        if "-" in fields[:-2]:
            found.setdefault(fields[fields.index("-") + 2], fields[4])
    return found


def _swapped_to(host: Host) -> frozenset[str]:
    """The names of the block devices that are swap space."""
    lines = (sysfs.text(host, _SWAPS) or "").splitlines()
    return frozenset(line.split()[0].rpartition("/")[2] for line in lines if line.startswith("/dev/"))


# --- networks ---


def _networks(host: Host, function: pci.Function, *, named: bool) -> Iterator[str]:
    names = _interfaces(host, function)
    if not names:
        if (
            function.kind.startswith(_ETHERNET)
            and function.driver is not None
            and function.driver not in MAKE_NO_INTERFACE
        ):
            yield "is a network card whose interface cannot be seen: a pod may have it, or /sys is not the host's own"
        return
    routes = netdevs.routes(host)
    if (why := uplink(host, names, routes)) is not None:
        yield why
    elif not named:
        yield from addresses(host, names, routes)
        for name in names:
            if made := _uppers(host, name):
                yield f"has the network interface {name}, of which {made[0]} is made"


def uplink(host: Host, names: Sequence[str], routes: netdevs.Routes | None = None, *, sure: bool = False) -> str | None:
    """Why the host would lose its network with these interfaces.

    They are, or something made of them is, a part of a bridge, a bond or the like, or a default route leads through it.
    The words follow the name of the hardware; None if nothing is so. `routes` are read unless a caller has them. If they
    cannot be, one may lead through them, which counts unless `sure`.
    """
    if not names:
        return None
    routes = routes or netdevs.routes(host)
    over_ppp = routes is not None and any(name.startswith("ppp") for name in routes.default)
    sessions = _pppoe(host) if over_ppp else set()
    for name, member in _chains(host, names):
        if member in sessions:
            return f"carries the default route, through {member} and PPPoE"
        if routes is not None and member in routes.default:
            return f"carries the default route, through {name}" + (f" and {member}" if member != name else "")
    if (why := membership(host, names)) is not None or routes is not None or sure:
        return why
    return f"has the network interface {names[0]}, and the routes cannot be read in {netlink.ROUTES}"


def _pppoe(host: Host) -> set[str]:
    """The interfaces over which PPPoE sessions go."""
    return {line.split()[-1] for line in (sysfs.text(host, _PPPOE) or "").splitlines()[1:] if line.strip()}


def membership(host: Host, names: Sequence[str]) -> str | None:
    """What these interfaces, or those made of them, are a part of, up or down; in the same words."""
    for name, member in _chains(host, names):
        if (master := sysfs.linked_name(host, netdevs.CLASS / member / "master")) is not None:
            through = f", through {member}" if member != name else ""
            return f"has the network interface {name}, which is part of {master}{through}"
    return None


def addresses(host: Host, names: Sequence[str], routes: netdevs.Routes | None = None) -> Iterator[str]:
    """Which of these interfaces the host itself talks through, in the same words; none if the routes cannot be read."""
    routes = routes or (netdevs.routes(host) if names else None)
    for name, member in _chains(host, names):
        if routes is not None and member in routes.every:
            made = f" and {member}, made of it" if member != name else ""
            yield f"has an address or a route of the host at the network interface {name}{made}"


def _chains(host: Host, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Each interface with itself, and with each that is made of it."""
    return ((name, member) for name in names for member in (name, *_all_above(name, partial(_uppers, host))))


def _interfaces(host: Host, function: pci.Function) -> list[str]:
    """The interfaces below it, however deep (a virtio card's are)."""
    below = (
        name
        for name in sysfs.names(host, netdevs.CLASS)
        if (path := sysfs.device(host, netdevs.CLASS / name)) is not None and path.text.startswith(f"{function.path}/")
    )
    return sorted({*function.net, *below})


def _uppers(host: Host, name: str) -> list[str]:
    """What is made of an interface: bonds, bridges, VLANs."""
    entries = sysfs.names(host, netdevs.CLASS / name)
    return [entry.removeprefix("upper_") for entry in entries if entry.startswith("upper_")]


def _all_above(below: _Thing, above: Callable[[_Thing], Iterable[_Thing]]) -> Iterator[_Thing]:
    """What is made of a thing, of that in turn, and so on; each once."""
    todo, seen = [below], {below}
    while todo:
        for one in above(todo.pop()):
            if one not in seen:
                seen.add(one)
                todo.append(one)
                yield one
