"""Asks NVIDIA's management library (NVML) for MIG devices, NVLinks, memory and drained GPUs, which nothing else tells.

It is optional: the Python package nvidia-ml-py (module `pynvml`, extra `nvidia`) and the driver's libnvidia-ml.so.1,
which this process must be able to see. An open library keeps the driver in use, so it is opened for one survey and closed
again; a survey is kept until the driver's entries in /proc change. Another process tries a library before it is loaded here
for the first time: one that crashes or hangs there is not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import platform
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct, field

from backends.base import Host, HostPath, Link
from backends.gpu.nvidia import procfs

INSTALL: Final = (
    "install the Python package nvidia-ml-py where Fairlead is, and let Fairlead see the driver's libnvidia-ml.so.1"
)
_UPGRADED: Final = (
    "the driver in the kernel is of another version than its libraries, as after an upgrade without a reboot, and no new "
    "container can use a GPU: reboot, or unload and load the driver's modules"
)

_NAME: Final = "libnvidia-ml.so.1"
_ROOTS: Final = (HostPath("/"), HostPath("/run/nvidia/driver"), HostPath("/home/kubernetes/bin/nvidia"))
"""Where a host's package, the GPU operator's driver container and GKE's installer on COS put the driver."""
_DIRECTORIES: Final = (f"usr/lib/{platform.machine()}-linux-gnu", "usr/lib64", "usr/lib", "lib64")
_TRIAL: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).nvmlInit_v2()"
_TRIAL_DEADLINE: Final = 10.0  # seconds; it starts no GPU

_OTHER_VERSION: Final = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH in nvml.h
_asking: Final = threading.Lock()  # a GPU that hangs may hang the library, which must cost one thread and not all
_hangs: Final = threading.Event()
_PATIENCE: Final = 2.0  # seconds that a scan waits for the survey of another; after that, no scan waits for it any more
_KEPT_FOR: Final = 10.0  # seconds between two questions about what sends no event: a drained GPU, a new library


class NvmlError(Exception):
    """The library cannot be used; one sentence says why."""


class MigDevice(Struct, frozen=True):
    """A MIG device as the library knows it."""

    uuid: str
    """`MIG-…`"""
    index: int
    profile: str | None
    """`1g.5gb`; `+me` and the like belong to it."""


class Gpu(Struct, frozen=True):
    """A GPU as the library knows it."""

    uuid: str
    mig_mode: bool = False
    mig: Mapping[tuple[int, int], MigDevice] = field(default_factory=dict)
    """By the numbers of GPU instance and compute instance."""
    memory: int | None = None
    """All of it, in bytes."""


class Survey(Struct, frozen=True):
    """The answers of the library to all that we ask, at one time."""

    gpus: Mapping[str, Gpu]
    """By PCI address."""
    links: tuple[Link, ...]


def is_there(host: Host, roots: Sequence[HostPath]) -> bool:
    """Are the Python package and the library installed? `roots` are further places of a driver."""
    return _is_installed() and _library(host, roots) is not None


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def _library(host: Host, roots: Sequence[HostPath]) -> str | None:
    """The first library there is: this process's own, as a container's runtime mounts it, before the host's."""
    return _found(host, tuple(roots), int(time.monotonic() // _KEPT_FOR))


@functools.lru_cache(maxsize=4)
def _found(host: Host, roots: Sequence[HostPath], _moment: int) -> str | None:
    return next(filter(os.path.exists, _candidates(host, roots)), None)


def _candidates(host: Host, roots: Sequence[HostPath]) -> tuple[str, ...]:
    named = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    below = [Path("/"), *(host.local(root) for root in (*roots, *_ROOTS))]
    directories = [*named, *(root / name for root in below for name in _DIRECTORIES)]
    return tuple(dict.fromkeys(os.fspath(directory / _NAME) for directory in directories))


def survey(host: Host, roots: Sequence[HostPath]) -> Survey:
    """What the library says; it is asked again only after what the driver shows in /proc has changed.

    Raises:
        NvmlError: it cannot be used.
    """
    return _survey(_library(host, roots), procfs.stamp(host))


@functools.lru_cache(maxsize=4)
def _survey(path: str | None, _stamp: tuple[str, ...]) -> Survey:
    with _opened(path) as library:
        return _asked(library)


def drained(host: Host, roots: Sequence[HostPath]) -> frozenset[str]:
    """The addresses of the GPUs that `nvidia-smi drain` has taken out of use. The question starts no GPU.

    Raises:
        NvmlError: it cannot be asked.
    """
    moment = int(time.monotonic() // _KEPT_FOR)
    return _drained(_library(host, roots), tuple(procfs.addresses(host)), moment)


@functools.lru_cache(maxsize=1)
def _drained(path: str | None, addresses: tuple[str, ...], _moment: int) -> frozenset[str]:
    with _opened(path, attach=False) as library:
        return frozenset(address for address in addresses if _is_drained(library, address))


def _is_drained(library: Any, address: str) -> bool:
    place = library.nvmlPciInfo_t()
    domain, bus, rest = address.split(":")
    place.domain, place.bus, place.device = int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
    try:
        return bool(library.nvmlDeviceQueryDrainState(place) == library.NVML_FEATURE_ENABLED)
    except library.NVMLError:  # a virtual GPU, for instance
        return False


@contextmanager
def _opened(path: str | None, *, attach: bool = True) -> Iterator[Any]:
    """The opened library; without `attach` it leaves the GPUs alone."""
    try:
        library = importlib.import_module("pynvml")
    except ImportError:
        raise NvmlError(f"NVIDIA's management library is not there; {INSTALL}") from None
    if path is None:
        raise NvmlError(f"NVIDIA's management library is not there; {INSTALL}")
    if not _asking.acquire(timeout=0.0 if _hangs.is_set() else _PATIENCE):
        _hangs.set()
        raise NvmlError("NVIDIA's management library (NVML) does not answer")
    try:
        _load(path)
        if attach:
            library.nvmlInit()
        else:
            library.nvmlInitWithFlags(library.NVML_INIT_FLAG_NO_ATTACH | library.NVML_INIT_FLAG_NO_GPUS)
        try:
            yield library
        finally:
            library.nvmlShutdown()
    except library.NVMLError as error:
        if getattr(error, "value", None) == _OTHER_VERSION:
            raise NvmlError(_UPGRADED) from error
        raise NvmlError(f"NVIDIA's management library (NVML) fails: {error}") from error
    except OSError as error:
        raise NvmlError(f"{path} cannot be loaded: {error}") from error
    finally:
        _hangs.clear()
        _asking.release()


def _load(path: str) -> None:
    """Load this library, so that `pynvml`, which asks for it by its name alone, gets the same.

    Raises:
        NvmlError: it crashes or hangs another process that loads it.
        OSError: it is no library for this process.
    """
    if why := _tried(path, Path(path).stat().st_mtime):
        raise NvmlError(f"{path} {why} when it is loaded")
    ctypes.CDLL(path)


@functools.lru_cache(maxsize=4)
def _tried(path: str, _changed: float) -> str:
    """What the library does to another process that loads it: "hangs" or "crashes …"; empty if no harm."""
    command = [sys.executable, "-I", "-c", _TRIAL, path]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TRIAL_DEADLINE, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return "hangs"
    return f"crashes (signal {-done.returncode})" if done.returncode < 0 else ""


def _asked(library: Any) -> Survey:
    handles = {}
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            handles[_address(library.nvmlDeviceGetPciInfo(handle).busId)] = handle
        except library.NVMLError:  # a dead GPU; its entry in /proc is reported
            continue
    gpus = {address: gpu for address, handle in handles.items() if (gpu := _gpu(library, handle)) is not None}
    return Survey(gpus, tuple(_links({address: _peers(library, handle) for address, handle in handles.items()})))


def _gpu(library: Any, handle: Any) -> Gpu | None:
    try:
        uuid = _text(library.nvmlDeviceGetUUID(handle))
    except library.NVMLError:
        return None
    try:
        memory = library.nvmlDeviceGetMemoryInfo(handle).total
    except library.NVMLError:  # its memory is that of the machine
        memory = None
    try:
        current, _pending = library.nvmlDeviceGetMigMode(handle)
    except library.NVMLError:  # it knows no MIG
        return Gpu(uuid, memory=memory)
    divided = current == library.NVML_DEVICE_MIG_ENABLE
    return Gpu(uuid, divided, dict(_mig_devices(library, handle)) if divided else {}, memory)


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
    """Pairs of GPUs with their number of links. One to an NVSwitch reaches every GPU with such a link."""
    switched = {one: sum(n for other, n in found.items() if other not in peers) for one, found in peers.items()}
    for one in sorted(peers):
        for other in sorted(peers):
            if one < other and (links := peers[one][other] + min(switched[one], switched[other])):
                yield Link(f"pci:{one}", f"pci:{other}", links)


def _address(bus_id: str | bytes) -> str:
    """The address as sysfs writes it; the library writes `00000000:3B:00.0`."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer
