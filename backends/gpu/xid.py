"""NVIDIA's XIDs: the driver's lines in the kernel's log, and what each number means for the GPU.

Format: NVIDIA's "XID Errors", and nv_report_error in the driver's open kernel modules. Which numbers are the
application's own fault: `nvmlHealthProvider` of NVIDIA's device plugin ignores them, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from backends.base import Record, Selector, Signal, Verdict
from backends.gpu.functions import NVIDIA
from backends.gpu.options import GpuOptions, GpuResource
from backends.linux import kernel_log
from backends.linux.pci_recovery import LATCHED

LINE: Final = "NVRM: Xid"
"""Each of the lines begins so."""

CRITICAL: Final = frozenset({48, 63, 64, 74, 79, 94, 95, 119, 120, 123, 140})
IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109})

_FOUND: Final = re.compile(
    LINE + r" \((?:PCI:)?([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])(?:\.[0-7])?"  # the function is hardly ever there
    r"(?: GPU-I:([0-9]{1,3}))?[^)]*\): ([0-9]{1,5})\b",
    re.IGNORECASE,
)

_MEANINGS: Final = {
    48: "double-bit ECC error",
    63: "memory row remapping or page retirement recorded",
    64: "memory row remapping or page retirement failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor has failed",
    123: "the power management unit does not answer",
    140: "unrecovered ECC error",
}

_SEVERITY: Final = (None, Verdict.INFO, Verdict.NOW)
"""From the mildest; None: ignored."""


def signals(record: Record, resources: Sequence[GpuResource]) -> Iterator[Signal]:
    """What a line says about a GPU, or about one of its GPU instances (MIG).

    A line names an address and nothing else. So the sets of every resource count that might select an NVIDIA GPU at
    that address, and the strictest of them decides.
    """
    if (found := _FOUND.match(kernel_log.message(record))) is None:
        return
    address = f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.0".lower()
    told = kernel_log.device_of(record) if record.properties.get("SUBSYSTEM") == "pci" else ""
    if told and told.rpartition(".")[0] != address.rpartition(".")[0]:  # the line names no function
        return
    xid = int(found[5])
    verdicts = [verdict(r.spec.options, xid) for r in resources if _may_take(r, address)]
    worst = max(verdicts, key=_SEVERITY.index, default=None)
    if worst is None:
        return
    instance = f", GPU instance {int(found[4])}" if found[4] else ""
    meaning = f": {_MEANINGS[xid]}" if xid in _MEANINGS else ""
    hardware = f"mig:{address}/gi{int(found[4])}" if found[4] else f"pci:{address}"
    message = f"the NVIDIA driver has reported XID {xid} of {address}{instance}{meaning}"
    yield Signal(hardware, f"xid-{xid}", worst, message, clears_on=LATCHED)


def verdict(options: GpuOptions, xid: int) -> Verdict | None:
    """What an XID means to a resource; None: nothing. What is written counts before the defaults.

    One that is in neither set is shown and does no harm: drivers add numbers, and most of them are warnings.
    """
    critical, ignored = options.xid_critical, options.xid_ignored
    if isinstance(critical, list) and xid in critical:
        return Verdict.NOW
    if isinstance(ignored, list) and xid in ignored:
        return None
    if critical is None and ignored != "all" and xid in CRITICAL:
        return Verdict.NOW
    if ignored == "all" or (ignored is None and xid in IGNORED):
        return None
    return Verdict.NOW if critical == "all" else Verdict.INFO


def _may_take(resource: GpuResource, address: str) -> bool:
    """Might the resource select an NVIDIA GPU at this address, as far as that can be told without looking at it?"""
    known = {"vendor": NVIDIA, "address": address}
    select = resource.spec.select
    if any(known.keys() >= selector.keys() and _may_match(selector, known) for selector in resource.spec.exclude):
        return False
    return not select or any(_may_match(selector, known) for selector in select)


def _may_match(selector: Selector, known: Mapping[str, str]) -> bool:
    return all(value in {w.lower() for w in selector[name]} for name, value in known.items() if name in selector)
