"""Says what is in CDI specifications and what they are called; writes ours, of the lowest version that does, and reads them back.

Two resources never have one kind, nor two IDs one name, and claims have a kind of their own. Grammar: CDI specification 1.1.0,
"kind" and "devices.name" (vendor and class: letters, digits and `_-.`, the first a letter; of a device also `:`). A `.` in a
class takes version 0.6.0, which runtimes in use do not read: it is written otherwise, like all that the grammar has no place
for. A class of one letter ends containerd and CRI-O, as soon as they read it (container-device-interface issue 320, in releases
up to 1.1.0).

Format: CDI specification 1.1.0. A runtime refuses a file with a field or a version that it does not know, so that nothing
is written that need not be. What is left out of a node (its owner and mode; its numbers where it is not there) the runtime
reads from the host's node when it makes the container's, and keeps until a file in the directory changes: numbers are
written, since a node that comes back under others would leave containers the hardware that has the old ones.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from backends.base import ContainerEdits, HostPath, Mount
from backends.interface.decoding import decoded

DIRECTORY: Final = HostPath("/run/cdi")
"""Of generated specifications (/var/run is a link to /run); runtimes prefer it to /etc/cdi."""

_HOST_PATH: Final = "0.5.0"
"""The version that `hostPath` and names that begin with a digit take."""
_LEAST: Final = "0.3.0"
"""The first that all else takes."""

_DIGEST: Final = 16  # bytes; with what is before it 41 of the 63 characters that a key's name may have

_OF_CLAIM: Final = re.compile(r"dra\.([^/]+)/claim=.*")
_OUTSIDE_CLASS: Final = re.compile(r"[^A-Za-z0-9-]")
_OUTSIDE_NAME: Final = re.compile(r"[^A-Za-z0-9.:-]")


# --- what is called how ---


def kind(resource: str) -> str:
    """The kind of a resource's devices: `fairlead.nvidia.com/gpu` of `nvidia.com/gpu`."""
    domain, _, name = resource.partition("/")
    written = _written(name, _OUTSIDE_CLASS, first="[A-Za-z]")
    if len(written) == 1:
        written += "_zz"
    return f"fairlead.{domain}/{written}"


def file(resource: str) -> HostPath:
    """Where a resource's specification lies."""
    vendor, _, of_class = kind(resource).partition("/")
    return DIRECTORY / f"{vendor.replace('.', '_', 1)}_{of_class}.json"  # no domain has a `_`


def device(device_id: str) -> str:
    """The name of the device that has this ID: the same where the grammar allows that."""
    return _written(device_id, _OUTSIDE_NAME, first="[A-Za-z0-9]")


def qualified(resource: str, name: str) -> str:
    """What a container's answer calls a device."""
    return f"{kind(resource)}={name}"


def annotation(resource: str) -> str:
    """The key of the annotation that names a container's devices; each resource has its own, since a kubelet keeps one."""
    return f"cdi.k8s.io/fairlead_{hashlib.blake2b(resource.encode(), digest_size=_DIGEST).hexdigest()}"


def claim_kind(driver: str) -> str:
    """The kind of what a DRA driver's claims bring; no resource has it, as theirs begin otherwise."""
    return f"dra.{driver}/claim"


def claim_driver(name: str) -> str:
    """The driver of ours that a claim's device is of, by what the runtime calls the device; empty where it is none of ours."""
    found = _OF_CLAIM.fullmatch(name)
    return found[1] if found else ""


def claim_file(driver: str, uid: str) -> HostPath:
    """Where the specification of a ResourceClaim lies; its UID is letters, digits and hyphens."""
    return DIRECTORY / f"dra.{driver}-claim_{uid}.json"


def _written(text: str, outside: re.Pattern[str], first: str) -> str:
    """The text with `__` for each `_` and `_2f_` for what else is outside; `z_z` before and `_zz` behind a wrong end.

    After a `_` comes only another one, or two digits: that tells the marks at the ends from all texts.
    """
    made = outside.sub(_in_digits, text)
    return f"{'' if re.match(first, made) else 'z_z'}{made}{'' if re.search('[A-Za-z0-9]$', made) else '_zz'}"


def _in_digits(found: re.Match[str]) -> str:
    return "__" if found[0] == "_" else "".join(f"_{byte:02x}_" for byte in found[0].encode())


# --- what is in one ---


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
        found = decoded(data, _Spec)
    except msgspec.ValidationError:
        return None
    return {it.name: it.container_edits for it in found.devices} if found.kind == kind else None
