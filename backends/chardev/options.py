"""The keys of a `chardev` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from backends.base import OptionsError, Resource

MOST_TOKENS: Final = 4 * 1024 * 1024 // 16
"""No kubelet accepts a list of more: it reads 4 MiB (kubelet contract: A1), and a slot takes 16 bytes or more."""


class PathOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which nodes or files, and how a container gets them."""

    path: str
    """On the host; may be a glob. Nodes lie below /dev, a mount anywhere."""
    permissions: str | None = None
    """Of a node: r, w, m; by default KubeVirt's: "rw" on a host with cgroup v1, "rwm" with v2."""
    mount_path: str | None = None
    """The path in the container, by default the host's; after a trailing "/" comes the node's own name."""
    type: Literal["device", "mount"] = "device"
    """A device node, or any file or directory, which is bind-mounted."""
    read_only: bool = False
    """Of a mount."""
    optional: bool = False
    """Is there a device also where this path matches nothing?"""
    limit: int = 1
    """In how many bundles one match may be, if another path matches more."""
    shared: bool = False
    """May other resources name this node too? Then nobody owns it; its health counts for all."""


class CharDevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `chardev` resource."""

    paths: list[PathOption]
    """Several make bundles: devices of one match of each path (see `pairing`)."""
    count: int = 1
    """Tokens: how many containers may have one node or bundle at a time."""


CharDevResource = Resource[CharDevOptions]


def check(resource: CharDevResource) -> None:
    """Refuse what no node could make right.

    Raises:
        OptionsError: with the offending key and a sentence.
    """
    options = resource.spec.options
    if not options.paths:
        raise OptionsError(("paths",), "has no path; name one")
    if not 1 <= options.count <= MOST_TOKENS:
        raise OptionsError(("count",), f"is {options.count}; it must be from 1 to {MOST_TOKENS}")
    if resource.spec.replicas != 1:
        raise OptionsError(
            ("replicas",), "is not for device nodes; say count, the number of tokens of each node or bundle"
        )
    for index, option in enumerate(options.paths):
        for key, why in _complaints(option):
            raise OptionsError(("paths", index, key), why)


def _complaints(option: PathOption) -> Iterator[tuple[str, str]]:
    """What is wrong with a path, key by key."""
    if why := _path_complaint(option.path) or _place_complaint(option):
        yield "path", why
    if option.permissions is not None and (why := _permissions_complaint(option)):
        yield "permissions", why
    if option.mount_path is not None and (why := _path_complaint(option.mount_path)):
        yield "mount_path", why
    if option.read_only and option.type == "device":
        yield "read_only", "is for mounts; a node without w in its permissions can only be read"
    if option.shared and option.type == "mount":
        yield "shared", "is for nodes; a mount is nobody's own as it is"
    if option.limit < 1:
        yield "limit", f"is {option.limit}; it must be 1 or more"


def _place_complaint(option: PathOption) -> str | None:
    path = option.path
    if option.type == "device" and not path.startswith("/dev/"):
        return f'{path!r} is not below /dev, where the nodes are; a file or directory has type = "mount"'
    if path.endswith("/") and option.type == "mount":
        return f"{path!r} ends with a slash; leave it out"
    if path.endswith("/"):
        return f"{path!r} is a directory; name a node in it, or {path + '*'!r} for all of them"
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


def _permissions_complaint(option: PathOption) -> str | None:
    permissions = option.permissions or ""
    if option.type == "mount":
        return "is for nodes; a mount has read_only"
    if not permissions:
        return "is empty; write one or more of r, w, m, or leave it out"
    if unknown := sorted(set(permissions) - set("rwm")):
        return f"{permissions!r} has {', '.join(map(repr, unknown))}; only r (read), w (write), m (mknod) are known"
    if len(set(permissions)) < len(permissions):
        return f"{permissions!r} has a letter twice"
    return None
