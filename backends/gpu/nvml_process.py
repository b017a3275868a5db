"""Asks NVIDIA's management library in a process of its own, which `nvml` starts: a script that imports nothing of ours.

What the library takes (20 MB, the nodes of the GPUs, which keep the driver in use) goes with the process. One that crashes,
or hangs in the driver, costs the daemon no thread. What it finds goes to stdout, one JSON document a line.

Signatures and layouts are those of NVIDIA's nvml.h, by its own module pynvml (the package nvidia-ml-py).
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

Say = Callable[[object], None]

_WAIT: Final = 1000  # milliseconds for an event; then a sign of life
_PAUSE: Final = 1.0  # seconds between two event sets, of which the first fails at once: a lost GPU fails every wait
_ANY: Final = 0xFFFFFFFF
"""gpuInstanceId of an event that is about the whole GPU (NVML_GPU_INSTANCE_ID_ANY)."""
_DOUBLE_BIT: Final = 48
"""The XID of a double-bit ECC error, of which NVML has an event of its own, too."""
_ARCHITECTURES: Final = (
    "", "", "Kepler", "Maxwell", "Pascal", "Volta", "Turing", "Ampere", "Ada Lovelace", "Hopper", "Blackwell",
)  # fmt: skip
"""By nvmlDeviceArchitecture_t, as NVIDIA's own plugins write them (go-nvlib, GetArchitectureAsString)."""
_BRANDS: Final = (
    "Unknown", "Quadro", "Tesla", "NVS", "Grid", "GeForce", "Titan", "NvidiaVApps", "NvidiaVPC", "NvidiaVCS", "NvidiaVWS",
    "NvidiaCloudGaming", "QuadroRTX", "NvidiaRTX", "Nvidia", "GeForceRTX", "TitanRTX",
)  # fmt: skip
"""By nvmlBrandType_t, as they do (GetBrandAsString)."""
_ADDRESSING_MODES: Final = ("None", "HMM", "ATS")
"""By nvmlDeviceAddressingModeType_t: how it reaches the machine's memory, by page faults or by hardware."""
_UNKNOWN: Final = 999
"""eventData of an XID that NVML does not know (nvmlEventData_t)."""


def survey(library: Any) -> object:
    """All GPUs with their MIG devices, and the NVLinks between them."""
    handles: dict[str, Any] = {}
    for index in range(library.nvmlDeviceGetCount()):
        try:
            handle = library.nvmlDeviceGetHandleByIndex(index)
            handles[_address(library.nvmlDeviceGetPciInfo(handle).busId)] = handle
        except library.NVMLError:  # a dead GPU; its entry in /proc is reported
            continue
    gpus = {address: gpu for address, handle in handles.items() if (gpu := _gpu(library, handle)) is not None}
    return {"gpus": gpus, "links": list(_links({one: _peers(library, it) for one, it in handles.items()}))}


def _gpu(library: Any, handle: Any) -> dict[str, object] | None:
    try:
        found: dict[str, object] = {"uuid": _text(library.nvmlDeviceGetUUID(handle))}
    except library.NVMLError:
        return None
    with suppress(library.NVMLError):  # its memory is that of the machine
        found["memory"] = library.nvmlDeviceGetMemoryInfo(handle).total
    found["told"] = dict(_told(library, handle))
    try:
        current, _pending = library.nvmlDeviceGetMigMode(handle)
    except library.NVMLError:  # it knows no MIG
        return found
    if current == library.NVML_DEVICE_MIG_ENABLE:
        found |= {"mig_mode": True, "mig": list(_mig_devices(library, handle))}
    return found


def _told(library: Any, handle: Any) -> Iterator[tuple[str, str]]:
    """What is to be said of a GPU, and of its driver, in words. An older library, or module, has less."""
    unknown = library.NVMLError, AttributeError
    with suppress(*unknown):
        yield "architecture", _word(_ARCHITECTURES, library.nvmlDeviceGetArchitecture(handle))
    with suppress(*unknown):
        yield "brand", _word(_BRANDS, library.nvmlDeviceGetBrand(handle))
    with suppress(*unknown):
        yield "addressing_mode", _word(_ADDRESSING_MODES, library.nvmlDeviceGetAddressingMode(handle))
    with suppress(*unknown):
        yield "compute_capability", ".".join(map(str, library.nvmlDeviceGetCudaComputeCapability(handle)))
    with suppress(*unknown):
        cuda = library.nvmlSystemGetCudaDriverVersion()  # 13010 is 13.1
        yield "cuda_version", f"{cuda // 1000}.{cuda % 1000 // 10}"


def _word(words: Sequence[str], number: int) -> str:
    return words[number] if number < len(words) else ""


def _mig_devices(library: Any, handle: Any) -> Iterator[dict[str, object]]:
    for index in range(library.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            mig = library.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            gi, ci = library.nvmlDeviceGetGpuInstanceId(mig), library.nvmlDeviceGetComputeInstanceId(mig)
            _, _, profile = _text(library.nvmlDeviceGetName(mig)).partition(" MIG ")  # NVIDIA A100-… MIG 1g.5gb
            uuid = _text(library.nvmlDeviceGetUUID(mig))
        except library.NVMLError:  # no device has this index
            continue
        found = {"gi": gi, "ci": ci, "uuid": uuid, "index": index, "profile": profile or None}
        with suppress(library.NVMLError):
            found["memory"] = (
                library.nvmlDeviceGetAttributes_v2(mig).memorySizeMB << 20
            )  # in MiB, whatever it is called
        yield found


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


def _links(peers: dict[str, Counter[str]]) -> Iterator[dict[str, object]]:
    """Pairs of GPUs with their number of links. One to an NVSwitch reaches every GPU with such a link."""
    switched = {one: sum(n for other, n in found.items() if other not in peers) for one, found in peers.items()}
    for one in sorted(peers):
        for other in sorted(peers):
            if one < other and (links := peers[one][other] + min(switched[one], switched[other])):
                yield {"one": f"pci:{one}", "other": f"pci:{other}", "weight": links}


def drained(library: Any, addresses: Sequence[str]) -> object:
    """Those of these GPUs that `nvidia-smi drain` has taken out of use."""
    return [address for address in addresses if _is_drained(library, address)]


def _is_drained(library: Any, address: str) -> bool:
    place = library.nvmlPciInfo_t()
    domain, bus, rest = address.split(":")
    place.domain, place.bus, place.device = int(domain, 16), int(bus, 16), int(rest.partition(".")[0], 16)
    try:
        return bool(library.nvmlDeviceQueryDrainState(place) == library.NVML_FEATURE_ENABLED)
    except library.NVMLError:  # a virtual GPU, for instance
        return False


def events(library: Any, addresses: Sequence[str], say: Say) -> None:
    """Tell each XID and double-bit ECC error of these GPUs for ever, and nothing else once a second.

    Where a wait fails, as every one does once a GPU of the set is lost, another set is made of the GPUs that answer.
    """
    while True:
        began = time.monotonic()
        heard = library.nvmlEventSetCreate()
        try:
            try:
                handles = _register(library, addresses, heard, say)
                while True:
                    _wait(library, heard, handles, say)
            finally:
                library.nvmlEventSetFree(heard)
        except library.NVMLError as error:
            say({"again": str(error)})
            time.sleep(max(0.0, _PAUSE - (time.monotonic() - began)))


def _register(library: Any, addresses: Sequence[str], heard: Any, say: Say) -> dict[object, str]:
    """Put the GPUs into an event set; their addresses by handle."""
    wanted = library.nvmlEventTypeXidCriticalError | library.nvmlEventTypeDoubleBitEccError
    handles, deaf = {}, {}
    for address in addresses:
        try:
            handle = library.nvmlDeviceGetHandleByPciBusId(address.encode())
            if not (types := wanted & library.nvmlDeviceGetSupportedEventTypes(handle)):
                deaf[address] = "it has no such events"
                continue
            library.nvmlDeviceRegisterEvents(handle, types, heard)
            handles[_key(handle)] = address
        except library.NVMLError as error:
            deaf[address] = str(error)
    say({"registered": sorted(handles.values()), "deaf": deaf})
    return handles


def _wait(library: Any, heard: Any, handles: dict[object, str], say: Say) -> None:
    """Tell one event, or that there was none for a while."""
    if not handles:  # nothing can come: the daemon asks again
        raise SystemExit
    try:
        event = library.nvmlEventSetWait_v2(heard, _WAIT)
    except library.NVMLError as error:
        if error.value != library.NVML_ERROR_TIMEOUT:
            raise
        say({})
        return
    address = handles.get(_key(event.device))
    is_xid = event.eventType == library.nvmlEventTypeXidCriticalError
    number = event.eventData if is_xid else _DOUBLE_BIT
    if address is None or number == _UNKNOWN:
        return
    instance = None if event.gpuInstanceId == _ANY or not is_xid else event.gpuInstanceId
    say({"address": address, "xid": number, "ecc": not is_xid, "gi": instance})


def _key(handle: Any) -> object:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _address(bus_id: str | bytes) -> str:
    """The address as sysfs writes it; the library writes `00000000:3B:00.0`."""
    domain, _, rest = _text(bus_id).lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"


def _text(answer: str | bytes) -> str:
    return answer.decode(errors="replace") if isinstance(answer, bytes) else answer


def answer(library: Any, question: str, addresses: Sequence[str], say: Say) -> None:
    """Open the library, say so, and answer one question."""
    try:
        if question == "drained":  # which must not start the GPUs
            library.nvmlInitWithFlags(library.NVML_INIT_FLAG_NO_ATTACH | library.NVML_INIT_FLAG_NO_GPUS)
        else:
            library.nvmlInit()
        say("opened")
        if question == "events":
            events(library, addresses, say)
        else:
            say(drained(library, addresses) if question == "drained" else survey(library))
    except library.NVMLError as error:
        say({"error": str(error), "code": getattr(error, "value", None)})


def main(path: str, question: str, *addresses: str) -> None:
    """Answer with the library at this path, which pynvml, asking for it by its name alone, gets too."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # the daemon is gone, or does not listen any more

    def say(it: object) -> None:
        sys.stdout.write(json.dumps(it) + "\n")
        sys.stdout.flush()

    try:
        library = importlib.import_module("pynvml")
        ctypes.CDLL(path)
    except ImportError:
        say({"missing": True})
    except OSError as error:
        say({"unloadable": str(error)})
    else:
        answer(library, question, addresses, say)


if __name__ == "__main__":
    main(*sys.argv[1:])
