"""What only NVIDIA's management library knows: the UUIDs and profiles of MIG devices, how many NVLinks join two GPUs.

It is optional: the Python package nvidia-ml-py (module `pynvml`, extra `nvidia`) and the driver's libnvidia-ml.so.1,
which must be in sight of this process. The library keeps the driver in use for as long as it is open, so that it is
opened for one survey and closed again; a survey is kept until the driver's entries in /proc change.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from backends.base import Host, Link
from backends.gpu import procfs

INSTALL: Final = "install fairlead[nvidia], and let Fairlead see the driver's libnvidia-ml.so.1"
_UPGRADED: Final = (
    "the driver in the kernel is of another version than its libraries, as after an upgrade without a reboot, and no new "
    "container can use a GPU: reboot, or unload and load the driver's modules"
)

_OTHER_VERSION: Final = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH in nvml.h
_asking: Final = threading.Lock()  # a GPU that hangs may hang the library: one thread is lost to it, not all of them
_hangs: Final = threading.Event()
_PATIENCE: Final = 2.0  # seconds that one look waits for another's survey, before all others wait for it no more


class NvmlError(Exception):
    """The library cannot be used; the sentence says why."""

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence


@dataclass(frozen=True, slots=True)
class MigDevice:
    """A MIG device as the library knows it."""

    uuid: str
    """`MIG-…`"""
    index: int
    profile: str | None
    """`1g.5gb`; `+me` and the like belong to it."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as the library knows it."""

    uuid: str
    mig_mode: bool = False
    mig: Mapping[tuple[int, int], MigDevice] = field(default_factory=dict)
    """By the numbers of GPU instance and compute instance."""


@dataclass(frozen=True, slots=True)
class Survey:
    """All that the library was asked, once."""

    gpus: Mapping[str, Gpu]
    """By PCI address."""
    links: tuple[Link, ...]


@functools.cache
def is_installed() -> bool:
    """Is the Python package there? Asked once: the search takes as long as all else that is read of a GPU."""
    return importlib.util.find_spec("pynvml") is not None


def survey(host: Host) -> Survey:
    """What the library says; asked again only where the driver shows something else than last time.

    Raises:
        NvmlError: it cannot be used.
    """
    return _survey(procfs.stamp(host))


@functools.lru_cache(maxsize=4)
def _survey(_stamp: tuple[str, ...]) -> Survey:
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlError(f"NVIDIA's management library is not there; {INSTALL}") from None
    if not _asking.acquire(timeout=0.0 if _hangs.is_set() else _PATIENCE):
        _hangs.set()
        raise NvmlError("NVIDIA's management library (NVML) does not answer")
    try:
        library.nvmlInit()
        try:
            return _asked(library)
        finally:
            library.nvmlShutdown()
    except library.NVMLError as error:
        if getattr(error, "value", None) == _OTHER_VERSION:
            raise NvmlError(_UPGRADED) from error
        raise NvmlError(f"NVIDIA's management library (NVML) fails: {error}") from error
    finally:
        _hangs.clear()
        _asking.release()


def _asked(library: Any) -> Survey:
    handles = {}
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            handles[_address(library.nvmlDeviceGetPciInfo(handle).busId)] = handle
        except library.NVMLError:  # one dead GPU; what /proc says of it is reported
            continue
    gpus = {address: gpu for address, handle in handles.items() if (gpu := _gpu(library, handle)) is not None}
    return Survey(gpus, tuple(_links({address: _peers(library, handle) for address, handle in handles.items()})))


def _gpu(library: Any, handle: Any) -> Gpu | None:
    try:
        uuid = _text(library.nvmlDeviceGetUUID(handle))
    except library.NVMLError:
        return None
    try:
        current, _pending = library.nvmlDeviceGetMigMode(handle)
    except library.NVMLError:  # it knows no MIG
        return Gpu(uuid)
    divided = current == library.NVML_DEVICE_MIG_ENABLE
    return Gpu(uuid, divided, dict(_mig_devices(library, handle)) if divided else {})


def _mig_devices(library: Any, handle: Any) -> Iterator[tuple[tuple[int, int], MigDevice]]:
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            place = library.nvmlDeviceGetGpuInstanceId(mig), library.nvmlDeviceGetComputeInstanceId(mig)
            _, _, profile = _text(library.nvmlDeviceGetName(mig)).partition(" MIG ")  # NVIDIA A100-… MIG 1g.5gb
            yield place, MigDevice(_text(library.nvmlDeviceGetUUID(mig)), index, profile or None)
        except library.NVMLError:  # no device has this index
            continue


def _peers(library: Any, handle: Any) -> Counter[str]:
    """How many of a GPU's NVLinks lead to which GPU."""
    peers: Counter[str] = Counter()
    for link in range(library.NVML_NVLINK_MAX_LINKS):
        try:
            if library.nvmlDeviceGetNvLinkState(handle, link) != library.NVML_FEATURE_ENABLED:
                continue
            peers[_address(library.nvmlDeviceGetNvLinkRemotePciInfo(handle, link).busId)] += 1
        except library.NVMLError:  # it has no link of this number, or none at all
            continue
    return peers


def _links(peers: Mapping[str, Counter[str]]) -> Iterator[Link]:
    """Pairs of GPUs with their links; those that end at NVSwitches reach every GPU that has such, too."""
    switched = {one: sum(n for other, n in found.items() if other not in peers) for one, found in peers.items()}
    for one in sorted(peers):
        for other in sorted(peers):
            if one < other and (links := peers[one][other] + min(switched[one], switched[other])):
                yield Link(f"pci:{one}", f"pci:{other}", links)


def _address(bus_id: str | bytes) -> str:
    """`00000000:3B:00.0`, as the library writes it, as sysfs does."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
