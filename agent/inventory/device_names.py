"""Names a device as people do: its model in short, and what its driver calls it. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

_VENDORS: Final = re.compile("^((NVIDIA|Tesla|AMD|Instinct) )+")
_FORMS: Final = re.compile(r"[ -](PCIe|SXM|HBM|[0-9]+GB).*$")
"""How a GPU is mounted and what memory it has, which its makers write behind the model's name."""

_ADAPTERS: Final = {
    "1013": "ConnectX-4", "1014": "ConnectX-4 VF", "1015": "ConnectX-4 Lx", "1016": "ConnectX-4 Lx VF",
    "1017": "ConnectX-5", "1018": "ConnectX-5 VF", "1019": "ConnectX-5 Ex", "101a": "ConnectX-5 Ex VF",
    "101b": "ConnectX-6", "101c": "ConnectX-6 VF", "101d": "ConnectX-6 Dx", "101e": "ConnectX VF",
    "101f": "ConnectX-6 Lx", "1021": "ConnectX-7", "1023": "ConnectX-8",
    "a2d2": "BlueField", "a2d3": "BlueField VF", "a2d6": "BlueField-2", "a2dc": "BlueField-3",
}  # fmt: skip
"""PCI device → model, of NVIDIA's adapters (15b3).

Source: `mlx5_core_pci_table` in Linux's drivers/net/ethernet/mellanox/mlx5/core/main.c.
"""

_NAMED: Final = 2  # of several nodes or adapters


def model_of(attributes: Mapping[str, Sequence[str]]) -> str:
    """The model: `H100`, `H100 1g.10gb` of a MIG device, `ConnectX-7`; empty if it is not known.

    What cannot be shortened is whole.
    """
    whole = next(iter(attributes.get("model", ())), "")
    short = _FORMS.sub("", _VENDORS.sub("", whole)) or whole
    if not short and tuple(attributes.get("vendor", ())) == ("15b3",):
        short = next((_ADAPTERS.get(device, "") for device in attributes.get("device", ())), "")
    return " ".join(filter(None, (short, *attributes.get("profile", ()))))


def name_of(attributes: Mapping[str, Sequence[str]]) -> str:
    """What its driver calls it: `nvidia3`, `nvidia3/gi1/ci0`, `mlx5_0`, `kvm`; of more than two, how many; or empty."""
    if numbers := attributes.get("minor") if tuple(attributes.get("vendor", ())) == ("10de",) else None:
        parts = (f"{kind}{number}" for kind in ("gi", "ci") for number in attributes.get(kind, ()))
        return "/".join((f"nvidia{numbers[0]}", *parts))
    called = attributes.get("hca") or attributes.get("ifname") or attributes.get("name") or ()
    more = f" and {len(called) - _NAMED:,} more" if len(called) > _NAMED else ""
    return ", ".join(called[:_NAMED]) + more
