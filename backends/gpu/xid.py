"""Understands NVIDIA's XIDs, from the driver's log or from NVML, and decides what each means for the GPU.

A witness (the driver's lines in the kernel's log, NVML's events) makes an `Xid`; `verdict` and `signals_of` decide from that
alone. Formats of the lines: krcReportXid (src/nvidia/src/kernel/gpu/rc/kernel_rc.c), NV_DEV_PRINTF (kernel-open/common/inc/
os-interface.h) and rm_is_supported_device (src/nvidia/arch/nvalloc/unix/src/osapi.c) of NVIDIA's open-gpu-kernel-modules,
515 to 595. Meanings: NVIDIA's "XID Errors".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from backends.base import Device, Record, Signal, Verdict
from backends.gpu.options import GpuOptions, GpuResource
from backends.gpu.vendor import NVIDIA
from backends.linux.pci_health import LATCHED

LINES: Final = frozenset({"NVRM: Xid", "NVRM: GPU ", "NVRM: The NVIDIA GPU "})
"""The beginnings of the lines that are understood."""

IGNORED: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Faults of applications, which NVIDIA's device plugin ignores (`ignoredXids` in its internal/rm/health.go)."""
GKE: Final = frozenset({48})
"""Critical for GKE's plugin (`healthCriticalXid` in its pkg/gpu/nvidia/manager.go)."""
_OFF_BUS: Final = 79
_NVLINK5: Final = range(144, 151)
"""Their lines say `Fatal` or `Nonfatal` (WORKFLOW_NVLINK5_ERR)."""
_RECOVERY: Final = 154
"""It says what the GPU needs from now on, which may be nothing (_gpuRefreshRecoveryActionInLock, src/nvidia/src/kernel/gpu/gpu.c)."""

_ADDRESS: Final = r"([0-9a-f]{4,8}):([0-9a-f]{2}):([01][0-9a-f])"
_XID: Final = re.compile(
    r"NVRM: Xid \((?:PCI:)?" + _ADDRESS + r"(?:\.[0-7])?"  # the function is hardly ever there
    r"(?: GPU-I:([0-9]{1,3}))?[^)]*\): ([0-9]{1,5})\b(?:, )?(.*)",
    re.IGNORECASE | re.DOTALL,
)
_ABOUT: Final = re.compile(
    r"NVRM: (?:GPU|GPU at|The NVIDIA GPU) (?:PCI:)?" + _ADDRESS + r"(?:\.[0-7])?:?(\s.*)", re.IGNORECASE | re.DOTALL
)
_LINE_BREAK: Final = re.compile(r"\s+(?:NVRM: )?")
"""One call of nv_printf may print several lines, which are one record."""
_INIT_FAILED: Final = re.compile(r"(?:RmInitAdapter|rm_init_adapter) failed\b")
"""The GPU's initialization, each time that a program opens it (RmInitAdapter in osinit.c, nv_start_device in nv.c)."""
_FALLEN: Final = re.compile(r"(?:GPU has|has|\(PCI ID: [^)]*\) installed in this system has) fallen off the bus\b")
"""Said beside XID 79 (osHandleGpuLost in osinit.c; drivers before 515 say `GPU at … has fallen off the bus`), and without an
XID of a GPU that is gone before a driver is bound (rm_is_supported_device)."""
_PROCESS: Final = re.compile(r"pid=([0-9]+|'?<unknown>'?), name=(.{0,99}?)(?:, |\Z)(.*)", re.DOTALL)
"""What krcReportXid puts before the words; NV_PROC_NAME_MAX_LENGTH is 100."""
_ACTION: Final = re.compile(r"GPU recovery action changed from 0x[0-9a-f]+ \([^)]*\) to 0x([0-9a-f]+)", re.IGNORECASE)
_SEVERE: Final = re.compile(r".*\b(Fatal|Nonfatal)\b", re.DOTALL)
"""The last of them: a process may be named like one, and comes first."""

XIDS: Final[Mapping[int, tuple[str, str]]] = {
    8: ("the GPU stopped processing", "RESTART_APP"),
    11: ("an invalid or corrupted command stream of an application", "RESTART_APP"),
    13: ("an exception in an application's shader or kernel", "RESTART_APP"),
    25: ("an invalid or illegal command stream of an application", "RESTART_APP"),
    31: ("an illegal memory access of an application", "RESTART_APP"),
    32: ("a command stream that came corrupted over PCI Express", "RESTART_APP"),
    37: ("an error of the driver's firmware", "IGNORE"),
    38: ("a time-out of the driver's firmware", "IGNORE"),
    39: ("an exception in a copy engine", "RESTART_APP"),
    40: ("an exception in a copy engine", "RESTART_APP"),
    41: ("an exception in a copy engine", "RESTART_APP"),
    43: ("an application's channel was stopped after its own error", "IGNORE"),
    44: ("a fault of the graphics engine between two contexts", "IGNORE"),
    45: ("an application's channel was removed", "IGNORE"),
    46: ("the GPU stopped processing", "RESET_GPU"),
    48: ("double-bit ECC error", "WORKFLOW_XID_48"),
    54: ("the board's auxiliary power is not connected", "CHECK_MECHANICALS"),
    60: ("an exception in the video processor", "RESTART_APP"),
    62: ("internal micro-controller halt", "RESET_GPU"),
    63: ("memory row remapping or page retirement recorded", "IGNORE"),
    64: ("memory row remapping or page retirement failed", "RESET_GPU"),
    66: ("an illegal access by the driver", "IGNORE"),
    67: ("an illegal access by the driver", "IGNORE"),
    68: ("an exception in the video decoder", "RESTART_APP"),
    69: ("a class error of the graphics engine", "RESTART_APP"),
    74: ("NVLink error", "WORKFLOW_NVLINK_ERR"),
    78: ("a vGPU could not start", "UPDATE_SWFW"),
    79: ("the GPU has fallen off the bus", "RESTART_BM"),
    80: ("data came corrupted to the GPU", "RESTART_APP"),
    86: ("an exception in the optical flow engine", "RESTART_APP"),
    92: ("many single-bit ECC errors", "IGNORE"),
    93: ("the InfoROM may not be written: its wear limit is reached", "IGNORE"),
    94: ("contained memory error", "RESTART_APP"),
    95: ("uncontained memory error", "RESET_GPU"),
    109: ("context switch timeout", "RESET_GPU"),
    110: ("security fault", "RESET_GPU"),
    119: ("the GPU's system processor does not answer", "RESET_GPU"),
    120: ("the GPU's system processor has failed", "RESET_GPU"),
    121: ("corrected errors on the link to the CPU (C2C)", "IGNORE"),
    123: ("the power management unit does not answer", "CONTACT_SUPPORT"),
    136: ("an NVLink could not be trained", "RESET_GPU"),
    137: ("an illegal NVLink access of an application", "IGNORE"),
    140: ("unrecovered ECC error", "RESET_GPU"),
    141: ("an error of CUDA's fast path", "IGNORE"),
    143: ("the GPU's initialization has failed", "RESET_GPU"),
    **dict.fromkeys(range(144, 151), ("NVLink error", "WORKFLOW_NVLINK5_ERR")),
    151: ("a key could not be exchanged for a new one", "RESTART_VM"),
    154: ("the GPU needs another recovery action", "XID_154"),
    155: ("an NVLink went down by the driver's decision", "RESET_GPU"),
    156: ("a broken part of the GPU is to be retired", "RESET_GPU"),
    157: ("a broken part of the GPU could not be retired", "IGNORE"),
    158: ("a fatal timeout of the GPU", "RESET_GPU"),
    160: ("a memory channel is to be retired", "IGNORE"),
    161: ("a memory channel could not be retired", "IGNORE"),
    171: ("uncorrectable error in the GPU's memory, which XID 48 tells, too", "WORKFLOW_XID_48"),
    172: ("uncorrectable error in the GPU's SRAM, which XID 48 tells, too", "WORKFLOW_XID_48"),
}
"""XID → what it is, in our words, and its "immediate action" of NVIDIA's XID catalog of October 2025; 171 and 172 have none there and
say more of a 48. All that it lists and is not here are exceptions in engines (RESTART_APP) or unused."""

_FAULTS: Final = frozenset(
    {"RESET_GPU", "RESTART_BM", "RESTART_VM", "CHECK_MECHANICALS", "WORKFLOW_XID_48", "WORKFLOW_NVLINK_ERR"}
)
CATALOG: Final = frozenset(number for number, (_, action) in XIDS.items() if action in _FAULTS and number < 171)
"""XIDs that need more than a restart of the application. 171 and 172 come beside a 48."""

_SEVERITY: Final = (Verdict.NOTE, Verdict.INFO, Verdict.NOW)
"""From the mildest."""


class Xid(Struct, frozen=True):
    """One XID happened to one GPU; the same value for each witness that tells of it."""

    address: str
    """PCI address with function 0: `0000:3b:00.0`."""
    number: int
    time: float
    """Seconds since boot, as the witness stamped it or was heard."""
    witness: str = "kmsg"
    """As `Record.source` of the record that told it."""
    instance: int | None = None
    """The GPU instance (MIG) that alone is concerned."""
    pid: int | None = None
    """In the host's PID namespace; None: not said."""
    process: str = ""
    """Its name as the driver keeps it, at most 15 bytes that its user chose."""
    words: str = ""
    """What the driver says beside; empty where the witness has a number only."""
    action: int | None = None
    """Of XID 154: what the GPU needs now (NV2080_CTRL_GPU_RECOVERY_ACTION), 0 for nothing; None: not said."""


def signals(record: Record, resources: Sequence[GpuResource]) -> Iterator[Signal]:
    """What a line of the kernel's log says about a GPU, or about one of its GPU instances (MIG)."""
    if (xid := heard(record)) is not None:
        yield from signals_of(xid, resources)
    elif (about := _about(record)) is not None and _INIT_FAILED.match(about[1]):
        address, words = about
        message = f"the NVIDIA driver could not initialize {address}: {words}"
        yield Signal(f"pci:{address}", "init-failed", Verdict.NOW, message, clears_on=LATCHED)


def heard(record: Record) -> Xid | None:
    """The XID that a line of the kernel's log tells, or that it says in other words; None if it tells none."""
    if (about := _about(record)) is not None:
        return Xid(about[0], _OFF_BUS, record.time) if _FALLEN.match(about[1]) else None
    found = _XID.match(record.message)
    if found is None or not _agrees(record, address := _address(found)):
        return None
    number, words = int(found[5]), found[6]
    instance = int(found[4]) if found[4] else None
    pid, process = None, ""
    if (by := _PROCESS.match(words)) is not None:
        pid = int(by[1]) if by[1].isdigit() else None
        process, words = by[2] if by[2] != "<unknown>" else "", by[3]
    action = int(told[1], 16) if number == _RECOVERY and (told := _ACTION.search(words)) is not None else None
    return Xid(address, number, record.time, "kmsg", instance, pid, process, words, action)


def from_nvml(record: Record) -> Xid:
    """The XID that NVML tells (`nvml.listen`). It has the number alone, and says neither words nor a process."""
    it = record.properties
    instance = int(it["gi"]) if "gi" in it else None
    return Xid(it["address"], int(it["xid"]), record.time, record.source, instance)


def _about(record: Record) -> tuple[str, str] | None:
    """The address and the words of a line that is no XID, if it names a GPU first."""
    found = _ABOUT.match(record.message)
    if found is None or not _agrees(record, address := _address(found)):
        return None
    return address, _LINE_BREAK.sub(" ", found[4]).strip()


def _address(found: re.Match[str]) -> str:
    return f"{int(found[1], 16):04x}:{found[2]}:{found[3]}.0".lower()


def _agrees(record: Record, address: str) -> bool:
    """Whether the tags of the record name no other device than the line, which mostly names no function."""
    told = record.device if record.properties.get("SUBSYSTEM") == "pci" else ""
    return not told or told.rpartition(".")[0] == address.rpartition(".")[0]


def signals_of(xid: Xid, resources: Sequence[GpuResource]) -> Iterator[Signal]:
    """What an XID means for its GPU: one signal; none where no resource might select the GPU.

    A witness names only an address. So the strictest of all resources that might select an NVIDIA GPU at that address
    decides.
    """
    attributes = {"vendor": (NVIDIA,), "address": (xid.address,)}
    gpu = Device(xid.address, xid.address, frozenset(), attributes=attributes)
    verdicts = [verdict(resource.spec.options, xid) for resource in resources if resource.might_take(gpu)]
    worst = max(verdicts, key=_SEVERITY.index, default=None)
    if worst is None:
        return
    instance = f", GPU instance {xid.instance}" if xid.instance is not None else ""
    meaning = f": {XIDS[xid.number][0]}" if xid.number in XIDS else ""
    if xid.number == _RECOVERY and xid.action == 0:
        meaning = ": the GPU needs no recovery any more"
    name = f"mig:{xid.address}/gi{xid.instance}" if xid.instance is not None else f"pci:{xid.address}"
    message = f"the NVIDIA driver has reported XID {xid.number} of {xid.address}{instance}{meaning}"
    clears = frozenset() if worst is Verdict.NOTE else LATCHED
    yield Signal(
        name,
        f"xid-{xid.number}",
        worst,
        message,
        clears_on=clears,
        pid=xid.pid,
        process=xid.process,
        fault=f"xid-{xid.number} of {xid.address}",  # NVML names no instance where the log does, if it lacks the right
    )


def verdict(options: GpuOptions, xid: Xid) -> Verdict:
    """The meaning of an XID for a resource: NOW is critical, INFO is shown, NOTE is ignored but told as an event.

    `xid_critical` and `xid_ignored` count before `xids`.
    """
    critical, ignored = options.xid_critical, options.xid_ignored
    if xid.number == _RECOVERY and xid.action == 0:  # 1. the GPU is well again, whatever is configured
        return Verdict.NOTE
    if isinstance(critical, list) and xid.number in critical:  # 2. listed
        return Verdict.NOW
    if ignored == "all" or (isinstance(ignored, list) and xid.number in ignored):
        return Verdict.NOTE
    if critical == "all":  # 3. "all" of the others
        return Verdict.NOTE if ignored is None and xid.number in IGNORED else Verdict.NOW
    if _in_set(options.xid_set, xid):  # 4. the set
        return Verdict.NOW
    return Verdict.NOTE if xid.number in IGNORED else Verdict.INFO


def _in_set(name: str, xid: Xid) -> bool:
    if name == "gke":
        return xid.number in GKE
    if name == "plugin":
        return xid.number not in IGNORED
    if xid.number in _NVLINK5:
        return (found := _SEVERE.match(xid.words)) is not None and found[1] == "Fatal"
    return xid.number in CATALOG or (xid.number == _RECOVERY and bool(xid.action))
