"""Makes the names of devices, pools and slices: valid for every ID and resource, and never the same for two of them.

A device's name is a DNS label of at most 63 characters (`DeviceMaxNameLength`, resource.k8s.io/v1), which forbids what most
IDs have. `0000:3b:00.0` becomes `0000-3b-00-0`, `/dev/kvm` `dev-kvm`. Of any other ID, lower-case letters, digits and single hyphens stay, and `--`
begins a mark: `--s` is `/`, `--c` is `:`, `--d` is `.`, `--u` is `_`, `--h` is a hyphen that could be misread, `--x2b` is a
byte, `--w` changes between lower and upper case. What would begin with a mark has an `i` before it: `i--wgpu`. An ID
that is too long so ends in `--z` and a digest.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable
from typing import Final

MOST_IN_LABEL: Final = 63
"""Characters of a DNS label (RFC 1123)."""
MOST_IN_POOL: Final = 253
"""Characters of a pool's name (`PoolNameMaxLength`, resource.k8s.io/v1), and of an object's."""

_PCI: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_PCI_NAME: Final = re.compile(r"([0-9a-f]{4,8})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])")
_MARKS: Final = {"/": "--s", ":": "--c", ".": "--d", "_": "--u", "-": "--h"}
_MEANINGS: Final = {mark: meant for meant, mark in _MARKS.items()}
_PIECE: Final = re.compile(r"--x[0-9a-f]{2}|--[schduw]|-(?=[a-z0-9])|[a-z0-9]")
_DEV: Final = "/dev/"
_DEV_NAME: Final = "dev-"
_DIGEST: Final = 8  # bytes


@functools.lru_cache(maxsize=4096)
def device_name(device_id: str) -> str:
    """The name of the device that has this ID."""
    if found := _PCI.fullmatch(device_id):
        return "-".join(found.groups())
    if len(device_id) > len(_DEV) and device_id.startswith(_DEV):
        made = _DEV_NAME + _marked(device_id.removeprefix(_DEV), hyphens=True)
    else:
        is_like_others = _PCI_NAME.fullmatch(device_id) is not None or device_id.startswith(_DEV_NAME)
        made = _marked(device_id, hyphens=not is_like_others)
    return made if len(made) <= MOST_IN_LABEL else _shortened(made, device_id, MOST_IN_LABEL)


def device_id(name: str, known: Iterable[str] = ()) -> str | None:
    """The ID that a device's name was made of; None if it was made of none.

    Args:
        name: of the device.
        known: the IDs that may have been too long for a name: their names tell no more than which of these it is.
    """
    if found := _PCI_NAME.fullmatch(name):
        domain, bus, slot, function = found.groups()
        return f"{domain}:{bus}:{slot}.{function}"
    is_node = name.startswith(_DEV_NAME) and not name.startswith(f"{_DEV_NAME}-")  # a mark: it is `dev:` or the like
    read = _DEV + _read(name.removeprefix(_DEV_NAME)) if is_node else _read(name)
    if read and device_name(read) == name:
        return read
    return next((it for it in known if device_name(it) == name), None)


def pool_name(node: str, resource: str) -> str:
    """The pool of a node's devices of a resource: `node1/nvidia.com/gpu`. Each part is a DNS subdomain, as the API asks for."""
    domain, _, name = resource.partition("/")
    made = f"{node}/{domain}/{device_name(name)}"
    return made if len(made) <= MOST_IN_POOL else f"{digest(node)}/{domain}/{device_name(name)}"


def slice_name(node: str, driver: str, pool: str, number: int) -> str:
    """The name of a pool's slice: for ever the same, so that two writers cannot make it twice."""
    begin = f"{node}-{driver}"[: MOST_IN_POOL - 2 * _DIGEST - 8].rstrip("-.")
    return f"{begin}-{digest(f'{driver} {pool}')}-{number}"


def _marked(text: str, *, hyphens: bool) -> str:
    """The text with marks for what a label cannot have; without `hyphens`, for each hyphen, too."""
    made, is_upper = list[str](), False
    for n, char in enumerate(text):
        if char.isascii() and char.isalpha() and char.isupper() != is_upper:
            is_upper = not is_upper
            made.append("--w")
        following = text[n + 1 : n + 2]
        if char.isascii() and char.isalnum():
            made.append(char.lower())
        elif char == "-" and hyphens and n and _is_plain(following, is_upper=is_upper):
            made.append(char)
        else:
            made.append(_MARKS.get(char) or "".join(f"--x{byte:02x}" for byte in char.encode()))
    written = "".join(made)
    if written.startswith("i--"):
        written = f"--x69{written[1:]}"
    return f"i{written}" if written.startswith("-") else written


def _is_plain(char: str, *, is_upper: bool) -> bool:
    """Does a character stay as it is, with no mark before it?"""
    return char.isascii() and (char.isdigit() or (char.isalpha() and char.isupper() == is_upper))


def _read(name: str) -> str:
    """What the marks of a name mean; empty if it has others."""
    written = name[1:] if name.startswith("i--") else name
    pieces = _PIECE.findall(written)
    if "".join(pieces) != written:
        return ""
    read, is_upper = b"", False
    for piece in pieces:
        if piece == "--w":
            is_upper = not is_upper
        elif piece.startswith("--x"):
            read += bytes.fromhex(piece[3:])
        else:
            read += (_MEANINGS.get(piece) or (piece.upper() if is_upper else piece)).encode()
    return read.decode(errors="replace")


def _shortened(made: str, whole: str, most: int) -> str:
    return f"{made[: most - 3 - 2 * _DIGEST].rstrip('-')}--z{digest(whole)}"


def digest(text: str) -> str:
    """What stands for a text that is too long for a name."""
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST).hexdigest()
