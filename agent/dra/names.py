"""Makes the names of devices, pools, slices and classes: valid for every ID and resource, and never the same for two of them.

A device's name is a DNS label of at most 63 characters (`DeviceMaxNameLength`, resource.k8s.io/v1), which forbids what most
IDs have. `0000:3b:00.0` becomes `0000-3b-00-0`, `/dev/kvm` `dev-kvm`. Of any other ID, lower-case letters, digits and single hyphens stay,
and `--` begins a mark: `--s` is `/`, `--c` is `:`, `--d` is `.`, `--u` is `_`, `--h` is a hyphen that could be misread, `--x2b` is a
byte, `--w` changes between lower and upper case. What would begin with a mark has an `i` before it: `i--wgpu`. An ID
that is too long so ends in `--z` and a digest.

The names that all drivers share are here, too, and what an administrator and users write by all of them: DeviceClasses, claims,
templates, pods.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

MOST_IN_LABEL: Final = 63
"""Characters of a DNS label (RFC 1123)."""
MOST_IN_POOL: Final = 253
"""Characters of a pool's name (`PoolNameMaxLength`, resource.k8s.io/v1), and of an object's."""

MOST_IN_TEXT: Final = 64
"""Bytes of an attribute's value (`DeviceAttributeMaxValueLength`)."""

STANDARD: Final = "resource.kubernetes.io"
"""The domain of attributes that all drivers are to have (k8s.io/dynamic-resource-allocation/deviceattribute)."""

PCIE_ROOT: Final = f"{STANDARD}/pcieRoot"
"""The host bridge above a device: what has the same is near each other."""

Entry = dict[str, Any]
"""A device as a slice has it."""

_PCI: Final = re.compile(r"([0-9a-f]{4,8}):([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_PCI_NAME: Final = re.compile(r"([0-9a-f]{4,8})-([0-9a-f]{2})-([0-9a-f]{2})-([0-7])")
_MARKS: Final = {"/": "--s", ":": "--c", ".": "--d", "_": "--u", "-": "--h"}
_MEANINGS: Final = {mark: meant for meant, mark in _MARKS.items()}
_PIECE: Final = re.compile(r"--x[0-9a-f]{2}|--[schduw]|-(?=[a-z0-9])|[a-z0-9]")
_DEV: Final = "/dev/"
_DEV_NAME: Final = "dev-"
_DIGEST: Final = 8  # bytes

_API = "resource.k8s.io/v1"

Manifest = dict[str, Any]


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


def is_pool_of(node: str, pool: str) -> bool:
    """Whether a pool is one of this node, of any resource."""
    return pool.partition("/")[0] in (node, digest(node))


def slice_name(node: str, driver: str, pool: str, number: int) -> str:
    """The name of a pool's slice: for ever the same, so that two writers cannot make it twice."""
    begin = f"{node}-{driver}"[: MOST_IN_POOL - 2 * _DIGEST - 8].rstrip("-.")
    return f"{begin}-{digest(f'{driver} {pool}')}-{number}"


def resource_value(resource: str) -> str:
    """What devices say of their resource: its name, or a digest of one that is too long for an attribute."""
    return resource if len(resource) <= MOST_IN_TEXT else hashlib.blake2b(resource.encode(), digest_size=16).hexdigest()


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
    """Whether a character stays as it is, with no mark before it."""
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


# --- manifests ---


def class_name(resource: str) -> str:
    """The DeviceClass of a resource: `fairlead-gpu.nvidia.com`; never another driver's."""
    domain, _, name = resource.partition("/")
    return f"fairlead-{device_name(name)}.{domain}"


def classes(resources: Sequence[str], driver: str) -> Iterator[Manifest]:
    """A DeviceClass for each resource, by which pods also get its devices as `limits` say that.

    Args:
        resources: their names.
        driver: ours.
    """
    for resource in resources:
        told = f'device.attributes["{driver}"]'
        expression = (
            f'device.driver == "{driver}" && "resource" in {told} && {told}.resource == "{resource_value(resource)}"'
        )
        yield {
            "apiVersion": _API,
            "kind": "DeviceClass",
            "metadata": {"name": class_name(resource)},
            "spec": {"selectors": [{"cel": {"expression": expression}}], "extendedResourceName": resource},
        }


def examples(offered: Mapping[str, Sequence[Entry]]) -> Iterator[Manifest]:
    """For each resource that has devices a pod with a claim of its own and one that asks as before; then what goes together.

    Args:
        offered: resource → its devices, as slices have them.
    """
    for resource, devices in offered.items():
        if not devices:
            continue
        name, request = _short(resource), _request("device", resource, devices[0])
        yield _template(name, [request])
        yield _pod(
            f"{name}-by-claim",
            {"resourceClaims": [{"name": "device", "resourceClaimTemplateName": name}]},
            claims=["device"],
        )
        yield _pod(f"{name}-by-limits", {}, limits={resource: 1})
    roots = {resource: {_root(it) for it in devices} - {""} for resource, devices in offered.items()}
    together = next(((a, b) for a in roots for b in roots if a < b and roots[a] & roots[b]), None)
    if together is not None:
        name = "-and-".join(map(_short, together))
        requests = [_request(f"device-{n}", it, offered[it][0]) for n, it in enumerate(together)]
        near = [{"requests": [it["name"] for it in requests], "matchAttribute": PCIE_ROOT}]
        yield _template(name, requests, near)
        yield _pod(
            name, {"resourceClaims": [{"name": "devices", "resourceClaimTemplateName": name}]}, claims=["devices"]
        )


def _short(resource: str) -> str:
    return device_name(resource.partition("/")[2])


def _root(device: Entry) -> str:
    return str(device["attributes"].get(PCIE_ROOT, {}).get("string", ""))


def _request(name: str, resource: str, device: Entry) -> Manifest:
    exactly: Manifest = {"deviceClassName": class_name(resource), "count": 1}
    if device.get("allowMultipleAllocations"):
        exactly["capacity"] = {"requests": {"tokens": "1"}}
    return {"name": name, "exactly": exactly}


def _template(name: str, requests: list[Manifest], constraints: Sequence[Manifest] = ()) -> Manifest:
    devices: Manifest = {"requests": requests}
    if constraints:
        devices["constraints"] = list(constraints)
    spec = {"spec": {"devices": devices}}
    return {"apiVersion": _API, "kind": "ResourceClaimTemplate", "metadata": {"name": name}, "spec": spec}


def _pod(name: str, more: Manifest, *, claims: Sequence[str] = (), limits: Manifest | None = None) -> Manifest:
    resources: Manifest = {"claims": [{"name": it} for it in claims]} if claims else {"limits": limits or {}}
    container = {"name": "main", "image": "busybox", "command": ["sleep", "infinity"], "resources": resources}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": [container], **more}}
