"""The keys of a `chardev` resource and of its groups, and what is wrong with impossible values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Literal, TypeAlias, TypeVar

import msgspec

from backends.base import Resource
from backends.interface.patterns import complaint
from backends.linux.globs import is_glob

_Item = TypeVar("_Item")
_Path: TypeAlias = tuple[str | int, ...]

MOST_TOKENS: Final = 205_019
"""No kubelet accepts a list of more: it reads 4 MiB (kubelet contract: A1), in which so many of the shortest IDs fit."""


_NOBODY: Final = (1 << 32) - 1
"""chown(2) takes it for "as it is"."""


class PathOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which nodes or files, and how a container gets them."""

    path: str
    """On the host; may be a glob. Nodes lie below /dev, a mount anywhere. A group's only path may be a directory of nodes."""
    permissions: str | None = None
    """Of a node: r, w, m; by default KubeVirt's: "rw" on a host with cgroup v1, "rwm" with v2."""
    mount_path: str | None = None
    """The path in the container, by default the host's; after a trailing "/" comes the node's own name."""
    type: Literal["device", "mount"] = "device"
    """A device node, or any file or directory, which is bind-mounted."""
    read_only: bool = False
    """Of a mount."""
    optional: bool = False
    """Whether there is a device also where this path matches nothing."""
    limit: int = 1
    """In how many bundles one match may be, if another path matches more."""
    pattern: str | None = None
    """Of a glob's matches, those in whose path below /dev this regular expression finds something."""
    shared: bool = False
    """Whether other resources may name this node too. Then none owns it; its health counts for all."""


class GroupOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which devices, found in one way, and how containers get them."""

    paths: list[PathOption] = []
    """Several make bundles: devices of one match of each path (see `pairing`)."""
    count: int = 1
    """Tokens: how many containers may have one node or bundle at a time."""
    usb: UsbOption | list[UsbOption] = []
    """USB devices; a list takes what any of them takes. Of `paths`, `usb` and `match` there is one."""
    together: Literal["all", "each"] | None = None
    """Of USB devices: all that are selected are one device, or those are one that each selector has one of."""
    match: MatchOption | list[MatchOption] = []
    """Devices by what the kernel and udev say of them; a list takes what any of them takes."""
    nodes: str | list[str] = "usb"
    """Of a USB device: which kinds of its nodes, by subsystem ("usb" for its own in /dev/bus/usb), or "all"."""
    id: Literal["serial", "port"] | None = None
    """Of a USB device: what names it; by default its serial if it has one, else the port it is plugged in."""
    permissions: str | None = None
    """Of the nodes of USB devices, by default "rw", and of matches, by default as in `paths`."""
    owner: int | None = None
    """The user, and the group of the same number, to whom the nodes of USB devices belong while a pod holds them."""
    shared: bool = False
    """Whether other groups and resources may take these USB devices. Then none owns them; their health counts for all."""


class CharDevOptions(GroupOptions, frozen=True, forbid_unknown_fields=True):
    """The keys of a `chardev` resource: those of its one group, or several groups."""

    groups: list[GroupOptions] = []
    """Each is found in its own way; the devices of all of them are the resource's."""


CharDevResource = Resource[CharDevOptions]

_ONE_GROUP: Final = CharDevOptions()


def complaints(resource: CharDevResource) -> Iterator[tuple[_Path, str]]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    if resource.spec.replicas != 1:
        yield ("replicas",), "is not for device nodes; say count, the number of tokens of each node or bundle"
    if not options.groups:
        yield from _group_complaints(options)
        return
    for key in GroupOptions.__struct_fields__:
        if getattr(options, key) != getattr(_ONE_GROUP, key):
            yield (key,), "is beside groups; say it in each group that it is for"
    for index, group in enumerate(options.groups):
        yield from ((("groups", index, *path), why) for path, why in _group_complaints(group))


def _group_complaints(options: GroupOptions) -> Iterator[tuple[_Path, str]]:
    yield from _key_complaints(options)
    yield from _usb_key_complaints(options)
    yield from _item_complaints(options)


def _key_complaints(options: GroupOptions) -> Iterator[tuple[_Path, str]]:
    """What is wrong with the keys that a group has once."""
    ways = [way for way in ("paths", "usb", "match") if getattr(options, way)]
    if not ways:
        yield ("paths",), "has no path; name one, or say usb or match"
    if len(ways) > 1:
        yield (ways[1],), f"is beside {ways[0]}; there is one of paths, usb and match, and several make groups"
    if not 1 <= options.count <= MOST_TOKENS:
        yield ("count",), f"is {options.count}; it must be from 1 to {MOST_TOKENS}"
    if options.permissions is not None and options.paths:
        yield ("permissions",), "belongs to each path: { path = …, permissions = … }"
    if options.permissions is not None and (why := _permissions_complaint(options.permissions)):
        yield ("permissions",), why


def _usb_key_complaints(options: GroupOptions) -> Iterator[tuple[_Path, str]]:
    """What is wrong with the keys for USB devices."""
    if not options.usb and options.nodes != "usb":
        yield ("nodes",), "is for usb; other devices have the nodes that are named"
    if not options.nodes:
        yield ("nodes",), 'is empty; name kinds of nodes such as "tty", or "all"'
    if not options.usb and options.id is not None:
        yield ("id",), "is for usb; other devices are named by their node"
    if not options.usb and options.together is not None:
        yield ("together",), "is for usb; several paths are a bundle as they are"
    if not options.usb and options.shared:
        yield ("shared",), "is for usb; a path says it in its table: { path = …, shared = true }"
    if options.owner is not None and not options.usb:
        yield ("owner",), "is for usb; let a udev rule set the owner of other nodes"
    elif options.owner is not None and not 0 <= options.owner < _NOBODY:
        yield ("owner",), f"is {options.owner}; a user's number is from 0 to {_NOBODY - 1}"
    if options.owner is not None and options.shared:
        yield ("owner",), "is beside shared; a node belongs to one user, until no pod of one resource has it"
    selectors = listed("usb", options.usb)
    if options.together == "all" and options.id is not None:
        yield ("id",), 'is for single sticks; with together = "all" the device is named after what selects them'
    if options.together == "each" and options.usb and len(selectors) == 1:
        yield ("together",), 'is "each" and there is one selector; each stick that it takes is a device as it is'


def _item_complaints(options: GroupOptions) -> Iterator[tuple[_Path, str]]:
    """What is wrong with what there may be several of."""
    for index, option in enumerate(options.paths):
        yield from ((("paths", index, key), why) for key, why in _complaints(option))
    for at, selector in listed("usb", options.usb):
        yield from (((*at, *below), why) for below, why in usb_complaints(selector))
    if options.together == "each":
        yield from _overlaps(listed("usb", options.usb))
    for at, match in listed("match", options.match):
        yield from (((*at, *below), why) for below, why in match_complaints(match))


def _overlaps(selectors: list[tuple[_Path, UsbOption]]) -> Iterator[tuple[_Path, str]]:
    """Selectors of which each has to have a stick of its own, and two would take the same."""
    for n, (at, selector) in enumerate(selectors):
        for _, before in selectors[:n]:
            if may_take_one_stick(before, selector):
                yield at, 'may take the same sticks as one before it; with together = "each" they must differ'


def listed(key: str, written: _Item | list[_Item]) -> list[tuple[_Path, _Item]]:
    """The items of a key that may have one or a list of them, each with its path in the resource."""
    if isinstance(written, list):
        return [((key, index), item) for index, item in enumerate(written)]
    return [((key,), written)]


def _complaints(option: PathOption) -> Iterator[tuple[str, str]]:
    """What is wrong with a path, key by key."""
    if why := _path_complaint(option.path) or _place_complaint(option):
        yield "path", why
    if option.permissions is not None and option.type == "mount":
        yield "permissions", "is for nodes; a mount has read_only"
    elif option.permissions is not None and (why := _permissions_complaint(option.permissions)):
        yield "permissions", why
    if option.mount_path is not None and (why := _path_complaint(option.mount_path)):
        yield "mount_path", why
    if option.read_only and option.type == "device":
        yield "read_only", "is for mounts; a node without w in its permissions can only be read"
    if option.shared and option.type == "mount":
        yield "shared", "is for nodes; every mount is shared as it is"
    if option.limit < 1:
        yield "limit", f"is {option.limit}; it must be 1 or more"
    if option.pattern is not None and (why := _pattern_complaint(option)):
        yield "pattern", why


def _pattern_complaint(option: PathOption) -> str | None:
    assert option.pattern is not None
    if option.type == "mount" or not is_glob(option.path):
        return "is for nodes whose path has wildcards; it chooses among what they match"
    return complaint(option.pattern)


def _place_complaint(option: PathOption) -> str | None:
    path = option.path
    if option.type == "device" and not path.startswith("/dev/"):
        return f'{path!r} is not below /dev, where the nodes are; a file or directory has type = "mount"'
    if path.endswith("/") and option.type == "mount":
        return f"{path!r} ends with a slash; leave it out"
    if path.endswith("/"):
        return f"{path!r} ends with a slash; {path[:-1]!r} is all nodes below it as one device, {path + '*'!r} one each"
    if "**" in path:
        return f"{path!r} has '**'; write one '*' for each directory between"
    return None


def _path_complaint(path: str) -> str | None:
    if not path.startswith("/"):
        return f"{path!r} is not an absolute path"
    if not path.isprintable():
        return f"{path!r} has a character that cannot be printed"
    parts = path.rstrip("/").split("/")[1:]
    if ".." in parts or "." in parts:
        return f"{path!r} has '..' or '.' in it; write the path straight"
    if "" in parts or path.endswith("//"):
        return f"{path!r} has an empty name between two slashes"
    return None


def _permissions_complaint(permissions: str) -> str | None:
    if not permissions:
        return "is empty; write one or more of r, w, m, or leave it out"
    if unknown := sorted(set(permissions) - set("rwm")):
        return f"{permissions!r} has {', '.join(map(repr, unknown))}; only r (read), w (write), m (mknod) are known"
    if len(set(permissions)) < len(permissions):
        return f"{permissions!r} has a letter twice"
    return None


# --- what `usb` and `match` select devices by ---


Complaint = tuple[tuple[str, ...], str]
"""The key inside the selector, and a sentence that follows it."""

_USB_ID: Final = re.compile(r"(0x)?[0-9a-f]{1,4}", re.IGNORECASE)
_SUBSYSTEM: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class UsbOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which USB devices, as `lsusb` shows them; each that matches is a device of its own."""

    vendor: str | int
    """Hexadecimal, "0403" or "0x0403"; a number is refused, because it may be meant as a decimal one."""
    product: str | int | None = None
    """The same; by default any."""
    serial: str | None = None
    """By default any, or none."""


class MatchOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of a subsystem's devices; all that is said must hold, and values may be globs."""

    subsystem: str
    """A directory of /sys/class or /sys/bus: "tty", "video4linux"."""
    properties: dict[str, str] = {}
    """The kernel's and udev's, as `udevadm info` shows them."""
    attributes: dict[str, str] = {}
    """Files of sysfs, each of the nearest device above that has it."""
    driver: str | None = None
    """That of the nearest device above that has one."""
    tags: list[str] = []
    """Set by udev's rules."""


def usb_id(written: str | int) -> str:
    """A vendor or product as sysfs has it, four hexadecimal digits in lower case."""
    return f"{int(str(written), 16):04x}"


def may_take_one_stick(one: UsbOption, other: UsbOption) -> bool:
    """Whether both could mean the same stick. Only of selectors that nothing is wrong with."""
    try:
        ids = [(usb_id(each.vendor), each.product and usb_id(each.product), each.serial) for each in (one, other)]
    except ValueError:
        return False
    return all(None in pair or len(set(pair)) == 1 for pair in zip(*ids, strict=True))


def usb_complaints(option: UsbOption) -> Iterator[Complaint]:
    """What is wrong with a selector of USB devices."""
    for key, written in (("vendor", option.vendor), ("product", option.product)):
        if isinstance(written, int):
            yield (key,), _number_complaint(written)
        elif written is not None and not _USB_ID.fullmatch(written):
            yield (key,), f"{written!r} is not one to four hexadecimal digits, as `lsusb` shows them"
    if option.serial is not None and (not option.serial.strip() or option.serial != option.serial.strip()):
        yield ("serial",), f"{option.serial!r} is empty or has spaces around it; leave it out to take any"


def _number_complaint(written: int) -> str:
    """An ID without quotes: TOML has read it as decimal, or as hexadecimal after 0x, and does not tell which."""
    digits = [f'"{written:04}" if these are the digits that `lsusb` shows'] if 0 <= written <= 9999 else []
    value = [f'"{written:04x}" if 0x{written:x} is meant'] if 0 <= written <= 0xFFFF else []
    if not value:
        return f"{written} is no USB ID; write its four hexadecimal digits in quotes, as `lsusb` shows them"
    return f"{written} is ambiguous without quotes; write {', or '.join(digits + value)}"


def match_complaints(option: MatchOption) -> Iterator[Complaint]:
    """What is wrong with a match of udev devices."""
    if not _SUBSYSTEM.fullmatch(option.subsystem):
        yield ("subsystem",), f"{option.subsystem!r} is not the name of a directory in /sys/class or /sys/bus"
    for name in option.attributes:
        if not name.isprintable() or not {"", ".", ".."}.isdisjoint(name.split("/")):
            yield ("attributes", name), f"{name!r} is not the path of a file below a device's directory"
