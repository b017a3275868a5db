"""Understands NVIDIA's XIDs: finds them in the kernel's log, and decides what each means for the GPU.

Format: NVIDIA's "XID Errors", and nv_report_error in the driver's open kernel modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from backends.base import Device, Record, Signal, Verdict
from backends.gpu.detection import NVIDIA
from backends.gpu.options import GpuOptions, GpuResource
from backends.linux import kernel_log
from backends.linux.pci.recovery import LATCHED

LINE: Final = "NVRM: Xid"
"""The beginning of each line."""

IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Faults of applications, which NVIDIA's device plugin ignores (`ignoredXids` in its internal/rm/health.go)."""
GKE: Final = frozenset({48})
"""Critical for GKE's plugin (`healthCriticalXid` in its pkg/gpu/nvidia/manager.go)."""
CATALOG: Final = frozenset({46, 48, 54, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158})
"""XIDs that need more than a restart of the application: their "immediate action" of NVIDIA's XID catalog of October 2025 is
RESET_GPU, RESTART_BM, RESTART_VM, CHECK_MECHANICALS, WORKFLOW_XID_48 or WORKFLOW_NVLINK_ERR."""

_NVLINK5: Final = range(144, 151)
"""Their lines say `Fatal` or `Nonfatal` (WORKFLOW_NVLINK5_ERR)."""
_RECOVERY: Final = 154
"""Its line says what the GPU needs now: `… changed from 0x0 (None) to 0x1 (GPU Reset Required)`."""
_NEEDED: Final = re.compile(r" to 0x0*[1-9a-f]", re.IGNORECASE)

_FOUND: Final = re.compile(
    LINE + r" \((?:PCI:)?([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])(?:\.[0-7])?"  # the function is hardly ever there
    r"(?: GPU-I:([0-9]{1,3}))?[^)]*\): ([0-9]{1,5})\b",
    re.IGNORECASE,
)

_MEANINGS: Final = {
    48: "double-bit ECC error",
    63: "memory row remapping or page retirement recorded",
    62: "internal micro-controller halt",
    64: "memory row remapping or page retirement failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    94: "contained memory error",
    95: "uncontained memory error",
    109: "context switch timeout",
    119: "the GPU's system processor does not answer",
    120: "the GPU's system processor has failed",
    123: "the power management unit does not answer",
    140: "unrecovered ECC error",
    143: "the GPU's initialization has failed",
    154: "the GPU needs another recovery action",
}

_SEVERITY: Final = (None, Verdict.INFO, Verdict.NOW)
"""From the mildest; None: ignored."""


def signals(record: Record, resources: Sequence[GpuResource]) -> Iterator[Signal]:
    """What a line says about a GPU, or about one of its GPU instances (MIG).

    A line names only an address. So the strictest of all resources that might select an NVIDIA GPU at that address
    decides.
    """
    if (found := _FOUND.match(kernel_log.message(record))) is None:
        return
    address = f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.0".lower()
    told = kernel_log.device_of(record) if record.properties.get("SUBSYSTEM") == "pci" else ""
    if told and told.rpartition(".")[0] != address.rpartition(".")[0]:  # the line names no function
        return
    xid = int(found[5])
    text = kernel_log.message(record)
    gpu = Device(address, address, frozenset(), attributes={"vendor": (NVIDIA,), "address": (address,)})
    verdicts = [verdict(resource.spec.options, xid, text) for resource in resources if resource.might_take(gpu)]
    worst = max(verdicts, key=_SEVERITY.index, default=None)
    if worst is None:
        return
    instance = f", GPU instance {int(found[4])}" if found[4] else ""
    meaning = f": {_MEANINGS[xid]}" if xid in _MEANINGS else ""
    hardware = f"mig:{address}/gi{int(found[4])}" if found[4] else f"pci:{address}"
    message = f"the NVIDIA driver has reported XID {xid} of {address}{instance}{meaning}"
    yield Signal(hardware, f"xid-{xid}", worst, message, clears_on=LATCHED)


def verdict(options: GpuOptions, xid: int, line: str = "") -> Verdict | None:
    """The meaning of an XID for a resource; None: ignored. `xid_critical` and `xid_ignored` count before `xids`."""
    critical, ignored = options.xid_critical, options.xid_ignored
    if isinstance(critical, list) and xid in critical:
        return Verdict.NOW
    if ignored == "all" or (isinstance(ignored, list) and xid in ignored):
        return None
    if critical == "all":
        return None if ignored is None and xid in IGNORED else Verdict.NOW
    if _in_set(options.xid_set, xid, line):
        return Verdict.NOW
    return None if xid in IGNORED else Verdict.INFO


def _in_set(name: str, xid: int, line: str) -> bool:
    if name == "gke":
        return xid in GKE
    if name == "plugin":
        return xid not in IGNORED
    if xid in _NVLINK5:
        return " Fatal" in line
    return xid in CATALOG or (xid == _RECOVERY and _NEEDED.search(line) is not None)
