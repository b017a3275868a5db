"""What a kubelet accepts: resource names, the size of a list, the length of a socket's path.

Validation and the inventory ask here, so that neither has to import the kubelet's side.
"""

from __future__ import annotations

import base64
import functools
import itertools
import os
import re
from pathlib import Path
from typing import Final

MESSAGE_LIMIT: Final = 4 * 1024 * 1024
"""The bytes that grpc-go receives in one message (kubelet contract: A1)."""

SOCKET_PATH_LIMIT: Final = 107
"""The bytes of a unix socket's path: `sun_path` has 108, the last is zero."""

SOCKET_DIRECTORY: Final = "fairlead"
"""Our directory below the plugin directory; a starting kubelet wipes only what lies beside it (kubelet contract: A6)."""

_HEALTH_BYTES: Final = 2 + len("Unhealthy")

_SUFFIX: Final = ".sock"
_HASH_BYTES: Final = 6  # 10 characters of base32; 1,000 resources share a name once in 10^9 nodes
_HASHED: Final = 10 + len(_SUFFIX)
_UNIQUE_BYTES: Final = 3
_UNIQUE: Final = 2 * _UNIQUE_BYTES + len("-")
_USUAL_ROOM: Final = SOCKET_PATH_LIMIT - len(f"/var/lib/kubelet/device-plugins/{SOCKET_DIRECTORY}/")

_DOMAIN_LIMIT: Final = 253 - len("requests.")  # the kubelet checks the name with that in front, as quotas write it
_NAME_LIMIT: Final = 63
_LABEL: Final = "[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_DOMAIN: Final = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NAME: Final = re.compile("[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?")


def slot_bytes(device_id: str, numa_node: int | None) -> int:
    """What one ID adds to a ListAndWatchResponse in its larger form, Unhealthy, in bytes.

    Device{ID=1, health=2, topology=3}; TopologyInfo{nodes=1}; NUMANode{ID=1} (kubelet contract, "Wire facts").
    """
    size = _HEALTH_BYTES + (_field_bytes(len(device_id.encode())) if device_id else 0)
    if numa_node is not None:
        size += _field_bytes(_field_bytes(1 + _varint_bytes(numa_node) if numa_node else 0))
    return _field_bytes(size)


@functools.cache
def most_tokens() -> int:
    """How many IDs one device can have at most: as many as a list holds where they are as short as they can be."""
    room, count = MESSAGE_LIMIT, 0
    for digits in itertools.count(1):
        size, numbers = slot_bytes("9" * digits, None), 10**digits - count
        if size * numbers > room:
            return count + room // size
        room -= size * numbers
        count += numbers
    raise AssertionError


def _varint_bytes(value: int) -> int:
    return 1 if value < 0x80 else -(-value.bit_length() // 7)


def _field_bytes(size: int) -> int:
    """A field of `size` bytes with its key (one byte: the numbers are small) and length."""
    return size + 2 if size < 0x80 else size + 1 + _varint_bytes(size)


def resource_name_problem(name: str) -> str | None:
    """Why a kubelet would refuse to register this resource name, or None if it would not (kubelet contract: A1)."""
    domain, slash, rest = name.partition("/")
    if not slash or "/" in rest:
        return f"{name!r} must have exactly one '/', as in 'example.com/widget'"
    if "kubernetes.io/" in name:
        return f"{name!r} ends its domain in 'kubernetes.io', which is Kubernetes' own; use a domain of yours"
    if name.startswith("requests."):
        return f"{name!r} must not start with 'requests.', which quotas put before a name"
    if not _DOMAIN.fullmatch(domain):
        return (
            f"{domain!r} is no domain: lower-case letters, digits, '-' and '.', each part starting and ending with "
            "a letter or digit"
        )
    if len(domain) > _DOMAIN_LIMIT:
        return f"the domain has {len(domain)} characters, and {_DOMAIN_LIMIT} is the most"
    if not _NAME.fullmatch(rest):
        return (
            f"{rest!r} (after the '/') may have letters, digits, '-', '_' and '.', and starts and ends with "
            "a letter or digit"
        )
    if len(rest) > _NAME_LIMIT:
        return f"the part after the '/' has {len(rest)} characters, and {_NAME_LIMIT} is the most"
    return None


@functools.lru_cache(1024)  # a resource is registered again with each kubelet
def socket_name(resource: str, room: int = _USUAL_ROOM) -> str:
    """The file name of a resource's socket: readable, or a hash where that is longer than `room` bytes.

    No two resources share one: a domain has no `_`, so the first `_` stands for the `/`; a hash has none. What
    is no resource name gets a hash as well. `room` is what the directory leaves of `SOCKET_PATH_LIMIT`.
    """
    if resource_name_problem(resource) is None:
        readable = resource.replace("/", "_") + _SUFFIX
        if len(readable) <= room:
            return readable
    import hashlib  # noqa: PLC0415  # 0.5 MB that most nodes can do without

    digest = hashlib.blake2b(resource.encode(), digest_size=_HASH_BYTES).digest()
    return base64.b32encode(digest).decode().rstrip("=").lower() + _SUFFIX


def endpoint(plugin_dir: Path, resource: str, *, fixed: bool = False) -> str:
    """A path for a resource's socket, relative to the plugin directory: one that no socket had, unless it is to be `fixed`."""
    room = SOCKET_PATH_LIMIT - len(os.fsencode(plugin_dir / SOCKET_DIRECTORY)) - 1
    if fixed:
        return f"{SOCKET_DIRECTORY}/{socket_name(resource, room)}"
    return f"{SOCKET_DIRECTORY}/{os.urandom(_UNIQUE_BYTES).hex()}-{socket_name(resource, room - _UNIQUE)}"


def plugin_directory_problem(directory: Path) -> str | None:
    """Why no socket could be made in our directory below this plugin directory, or None if it can."""
    shortest = len(os.fsencode(directory / SOCKET_DIRECTORY)) + 1 + _UNIQUE + _HASHED
    if shortest <= SOCKET_PATH_LIMIT:
        return None
    return f"is too long: a socket in it would have a path of {shortest} bytes, and {SOCKET_PATH_LIMIT} is the most"
