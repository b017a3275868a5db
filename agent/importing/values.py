"""Reads values that several formats have: USB IDs, XIDs, types of links."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from agent.importing.fields import Fields
from agent.importing.model import Value

USB_IDS: Final = ("vendor", "product")
_PLAIN: Final = re.compile(r"0|[1-9][0-9]*")
_XID: Final = re.compile(r"[1-9][0-9]{0,4}")
_LAYERS: Final = {"ether": "Ethernet", "infiniband": "InfiniBand"}


def usb_ids(fields: Fields) -> dict[str, Value]:
    """The digits of vendor and product, in quotes or not, as they are written; without what is missing."""
    found: dict[str, Value] = {}
    for key in USB_IDS:
        written = fields.scalar(key)
        if written is None or not written.text:
            continue
        if written.kind != "str" and not _PLAIN.fullmatch(written.text):
            fields.note(key, f"{written.text} without quotes is no text to YAML; it is taken for the digits of an ID")
        found[key] = written.text
    return found


def is_xid(text: str) -> bool:
    """Is this the number of an error of NVIDIA's driver?"""
    return _XID.fullmatch(text) is not None


def link_layers(types: Iterable[str]) -> list[str]:
    """Types of network interfaces, as `ip link` has them, as the link layers of RDMA ports."""
    return [_LAYERS.get(one.lower(), one) for one in types]
