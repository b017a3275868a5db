"""Writes CDI specifications and reads ours back; of the lowest version that carries them.

Format: CDI specification 1.1.0. A runtime refuses a file with a field or a version that it does not know, so that nothing
is written that need not be. What is left out of a node (its owner and mode; its numbers where it is not there) the runtime
reads from the host's node when it makes the container's, and keeps until a file in the directory changes: numbers are
written, since a node that comes back under others would leave containers the hardware that has the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backends.base import ContainerEdits, Mount

_HOST_PATH: Final = "0.5.0"
"""The version that `hostPath` and names that begin with a digit take."""
_LEAST: Final = "0.3.0"
"""The first that all else takes."""


class DeviceNode(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """A node that the runtime makes."""

    path: str
    """In the container."""
    permissions: str
    host_path: str = ""
    """Left out where it is the same."""
    kind: str = msgspec.field(name="type", default="")
    """c or b; nothing where the node is not there."""
    major: int = 0
    minor: int = 0


class BindMount(msgspec.Struct, frozen=True, rename="camel"):
    """A host path that the runtime mounts."""

    host_path: str
    container_path: str
    options: list[str]


class Edits(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """What one device brings; never nothing."""

    env: list[str] = []
    """`NAME=value`; only for ResourceClaims: an Allocate's answer has its own."""
    device_nodes: list[DeviceNode] = []
    mounts: list[BindMount] = []


class _Device(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    container_edits: Edits


class _Spec(msgspec.Struct, frozen=True, rename="camel"):
    cdi_version: str
    kind: str
    container_edits: dict[str, Any]
    devices: list[_Device]


def edits(given: ContainerEdits) -> Edits:
    """The nodes and mounts of an answer; the rest of it stays there."""
    nodes = [
        DeviceNode(it.container_path, it.permissions, "" if it.path.text == it.container_path else it.path.text)
        for it in given.nodes
    ]
    mounts = [BindMount(it.path.text, it.container_path, _options(it)) for it in given.mounts]
    return Edits(device_nodes=nodes, mounts=mounts)


def whole_edits(given: ContainerEdits) -> Edits:
    """All of an answer that a specification can say: what a ResourceClaim brings has no other way into a container."""
    return msgspec.structs.replace(edits(given), env=[f"{name}={value}" for name, value in given.env.items()])


def _options(mount: Mount) -> list[str]:
    """As a runtime mounts what a kubelet asks for."""
    return ["rbind", "rprivate", "ro" if mount.read_only else "rw"]


def encode(kind: str, devices: Mapping[str, Edits]) -> bytes:
    """A specification, as its file has it; the same devices make the same bytes."""
    listed = [_Device(name, it) for name, it in sorted(devices.items())]
    written = _Spec(_version(devices), kind, {}, listed)
    return msgspec.json.format(msgspec.json.encode(written), indent=1) + b"\n"


def _version(devices: Mapping[str, Edits]) -> str:
    newer = any(name[0].isdigit() or any(node.host_path for node in it.device_nodes) for name, it in devices.items())
    return _HOST_PATH if newer else _LEAST


def decode(data: bytes, kind: str) -> dict[str, Edits] | None:
    """The devices of a specification of ours, which has this kind; None if it is none.

    Raises:
        msgspec.DecodeError: it is no JSON: it was cut off, or the disk lost it.
    """
    try:
        found = msgspec.json.decode(data, type=_Spec)
    except msgspec.ValidationError:
        return None
    return {it.name: it.container_edits for it in found.devices} if found.kind == kind else None
