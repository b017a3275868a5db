"""The keys of a `chardev` resource, and what is wrong with impossible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from backends.base import OptionsError, Resource

MOST_TOKENS: Final = 4 * 1024 * 1024 // 16
"""No kubelet accepts a list of more: it reads 4 MiB (kubelet contract: A1), and a slot takes 16 bytes or more."""


class PathOption(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which nodes, and how a container gets them."""

    path: str
    """On the host, below /dev; may be a glob."""
    permissions: str | None = None
    """Of r, w, m; by default KubeVirt's: "rw" on a host with cgroup v1, "rwm" with v2."""
    mount_path: str | None = None
    """The path in the container, by default the host's; after a trailing "/" comes the node's own name."""


class CharDevOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `chardev` resource."""

    paths: list[PathOption]
    count: int = 1
    """Tokens: how many containers may have one node at a time."""


CharDevResource = Resource[CharDevOptions]


def check(resource: CharDevResource) -> None:
    """Refuse what no node could make right.

    Raises:
        OptionsError: with the offending key and a sentence.
    """
    options = resource.spec.options
    if len(options.paths) != 1:
        sentence = "has no path; name one" if not options.paths else "names several paths; bundles are not there yet"
        raise OptionsError(("paths",), sentence)
    if not 1 <= options.count <= MOST_TOKENS:
        raise OptionsError(("count",), f"is {options.count}; it must be from 1 to {MOST_TOKENS}")
    if resource.spec.replicas != 1:
        raise OptionsError(("replicas",), "is not for device nodes; say count, the number of tokens of each node")
    for index, option in enumerate(options.paths):
        for key, why in _complaints(option):
            raise OptionsError(("paths", index, key), why)


def _complaints(option: PathOption) -> Iterator[tuple[str, str]]:
    """What is wrong with a path, key by key."""
    if why := _path_complaint(option.path):
        yield "path", why
    elif not option.path.startswith("/dev/"):
        yield "path", f"{option.path!r} is not below /dev, where the nodes are"
    elif option.path.endswith("/"):
        yield "path", f"{option.path!r} is a directory; name a node in it, or {option.path + '*'!r} for all of them"
    elif "**" in option.path:
        yield "path", f"{option.path!r} has '**'; write one '*' for each directory between"
    if option.permissions is not None and (why := _permissions_complaint(option.permissions)):
        yield "permissions", why
    if option.mount_path is not None and (why := _path_complaint(option.mount_path)):
        yield "mount_path", why


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
