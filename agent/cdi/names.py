"""Makes the names of CDI specifications: kinds, files, devices.

Two resources never have one kind, nor two IDs one name, and claims have a kind of their own. Grammar: CDI specification 1.1.0, "kind" and "devices.name"
(vendor and class: letters, digits and `_-.`, the first a letter; of a device also `:`). A `.` in a class takes version
0.6.0, which runtimes in use do not read: it is written otherwise, like all that the grammar has no place for. A class of one
letter ends containerd and CRI-O, as soon as they read it (container-device-interface issue 320, in releases up to 1.1.0).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from backends.base import HostPath

DIRECTORY: Final = HostPath("/run/cdi")
"""Of generated specifications (/var/run is a link to /run); runtimes prefer it to /etc/cdi."""

_DIGEST: Final = 16  # bytes; with what is before it 41 of the 63 characters that a key's name may have

_OUTSIDE_CLASS: Final = re.compile(r"[^A-Za-z0-9-]")
_OUTSIDE_NAME: Final = re.compile(r"[^A-Za-z0-9.:-]")


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


def claim_file(driver: str, uid: str) -> HostPath:
    """Where the specification of a ResourceClaim lies; its UID is letters, digits and hyphens."""
    return DIRECTORY / f"dra.{driver}-claim_{uid}.json"


def _written(text: str, outside: re.Pattern[str], first: str) -> str:
    """The text with `__` for each `_` and `_2f_` for what else is outside; `z_z` before and `_zz` behind a wrong end.

    After a `_` comes nothing but another one, or two digits: that tells the marks at the ends from all texts.
    """
    made = outside.sub(_in_digits, text)
    return f"{'' if re.match(first, made) else 'z_z'}{made}{'' if re.search('[A-Za-z0-9]$', made) else '_zz'}"


def _in_digits(found: re.Match[str]) -> str:
    return "__" if found[0] == "_" else "".join(f"_{byte:02x}_" for byte in found[0].encode())
