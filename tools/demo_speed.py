"""Checks that the demo shows how quick Fairlead is: fairlead demo --seconds 25 --json | python -m tools.demo_speed.

A busy machine makes every step later, the kernel's too: what is ours is held against what the same run says of the kernel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from statistics import quantiles
from typing import Any, Final

OURS: Final = (3.0, 10.0)
"""How often the kernel's share half of the changes may take us at most, and three quarters of them.

The kernel wakes one thread; we wake the loop, a reader of the hardware, the loop again, and the kubelet's side.
"""
_KERNEL: Final = 1.0  # ms that the kernel is granted at least: on a quiet machine it takes a third of that
_CHANGES: Final = 10


def objection(document: Mapping[str, Any]) -> str:
    """What is wrong with what `fairlead demo --json` says of itself; empty if nothing is."""
    changes = document["changes"]
    if len(changes) < _CHANGES:
        return f"the demo has {len(changes)} changes, and {_CHANGES} are the least that say something"
    kernel, _, _ = quantiles(each["kernel_ms"] for each in changes)  # of those that had to wait least
    _, half, most = quantiles(each["fairlead_ms"] for each in changes)
    limits = [times * max(_KERNEL, kernel) for times in OURS]
    for took, limit, which in zip((half, most), limits, ("half", "a quarter"), strict=True):
        if took > limit:
            return f"{which} of the demo's changes take us {took:.1f} ms or more, {limit:.1f} would be right beside the kernel"
    return ""


def main() -> None:
    """Print the medians, and exit with 1 if they are not what we say."""
    document = json.load(sys.stdin)
    print(f"{len(document['changes'])} changes of the demo; medians: {document['median']}")
    sys.exit(objection(document) or 0)


if __name__ == "__main__":
    main()
