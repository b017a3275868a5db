"""A `pynvml` that says what a test tells it, for a library and a driver that are not here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from backends.gpu import nvml, nvml_process
from tests.backends.machines import CONTROLS, mig, nvidia_gpu, uuid


class NVMLError(Exception):
    """What the library raises."""

    def __init__(self, sentence: str, value: int = 999) -> None:
        super().__init__(sentence)
        self.value = value


@dataclass
class FakeMig:
    """A MIG device."""

    uuid: str
    gi: int
    ci: int
    profile: str = "1g.10gb"


@dataclass
class FakeGpu:
    """A GPU; one that is `dead` answers nothing."""

    address: str
    uuid: str
    mig: list[FakeMig] | None = None
    peers: Mapping[str, int] = field(default_factory=dict)
    """Bus ID of the other end (a switch's, for instance) → how many links."""
    dead: bool = False
    drained: bool = False


ADDRESS = "0000:3b:00.0"
MIG1, MIG2 = "MIG-11111111-0000-5000-8000-000000000001", "MIG-22222222-0000-5000-8000-000000000002"
DIVIDED = CONTROLS + nvidia_gpu(ADDRESS, 0) + mig(0, [(1, 0), (2, 0)])
KNOWN = FakeGpu(ADDRESS, uuid(0), mig=[FakeMig(MIG1, 1, 0), FakeMig(MIG2, 2, 0, "3g.40gb")])
"""A GPU in two parts, as the driver and as the library tell of it."""


class FakeNvml(ModuleType):
    """Counts how often it was opened."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 36
    NVML_FEATURE_ENABLED = 1
    NVML_DEVICE_MIG_ENABLE = 1
    NVML_INIT_FLAG_NO_GPUS, NVML_INIT_FLAG_NO_ATTACH = 1, 2

    def __init__(self, gpus: list[FakeGpu], fault: str = "") -> None:
        super().__init__("pynvml")
        self.gpus, self.fault = gpus, fault
        self.opened = self.asked_for_drains = 0

    def answer(self, path: str | None, question: str, *addresses: str) -> Any:
        """As a process that asks this library does."""
        if path is None:
            raise nvml.NvmlError(nvml._NOT_THERE)
        said: list[Any] = []
        nvml_process.answer(self, question, addresses, said.append)
        if isinstance(said[-1], dict) and "error" in said[-1]:
            raise nvml.NvmlError(nvml.failure(path, said[-1]))
        return json.loads(json.dumps(said[-1]))

    def nvmlInit(self) -> None:
        if self.fault:
            raise NVMLError(self.fault, 18 if "mismatch" in self.fault else 999)
        self.opened += 1

    def nvmlInitWithFlags(self, flags: int) -> None:
        """Without touching GPUs (3)."""
        if self.fault or flags != 3:
            raise NVMLError(self.fault or "touches GPUs")

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        if self.gpus[index].dead:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(busId=f"0000{gpu.address.upper()}".encode())

    nvmlPciInfo_t = SimpleNamespace  # noqa: N815  # the library's name

    def nvmlDeviceQueryDrainState(self, place: Any) -> int:
        self.asked_for_drains += 1
        address = f"{place.domain:04x}:{place.bus:02x}:{place.device:02x}.0"
        return int(any(gpu.drained for gpu in self.gpus if gpu.address == address))

    def nvmlDeviceGetMemoryInfo(self, gpu: FakeGpu) -> Any:
        return SimpleNamespace(total=80 << 30)

    # of an H100, as a slice of NVIDIA's driver in the repository NVIDIA/aicr has it
    def nvmlDeviceGetArchitecture(self, gpu: FakeGpu) -> int:
        return 9

    def nvmlDeviceGetBrand(self, gpu: FakeGpu) -> int:
        return 14

    def nvmlDeviceGetAddressingMode(self, gpu: FakeGpu) -> int:
        raise NVMLError("Function Not Found")  # by a library before 580

    def nvmlDeviceGetCudaComputeCapability(self, gpu: FakeGpu) -> tuple[int, int]:
        return 9, 0

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 13010

    def nvmlDeviceGetAttributes_v2(self, mig: FakeMig) -> Any:
        return SimpleNamespace(memorySizeMB=9856)

    def nvmlDeviceGetUUID(self, one: FakeGpu | FakeMig) -> str:
        return one.uuid

    def nvmlDeviceGetName(self, mig: FakeMig) -> bytes:
        return f"NVIDIA H100 80GB HBM3 MIG {mig.profile}".encode()

    def nvmlDeviceGetMigMode(self, gpu: FakeGpu) -> list[int]:
        return [int(gpu.mig is not None)] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu: FakeGpu) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu: FakeGpu, index: int) -> FakeMig:
        if index >= len(gpu.mig or ()):
            raise NVMLError("Not Found")
        return (gpu.mig or [])[index]

    def nvmlDeviceGetGpuInstanceId(self, mig: FakeMig) -> int:
        return mig.gi

    def nvmlDeviceGetComputeInstanceId(self, mig: FakeMig) -> int:
        return mig.ci

    def nvmlDeviceGetNvLinkState(self, gpu: FakeGpu, link: int) -> int:
        if link >= 18:
            raise NVMLError("Invalid Argument")
        return int(link < sum(gpu.peers.values()))

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu: FakeGpu, link: int) -> Any:
        ends = [bus_id for bus_id, links in gpu.peers.items() for _ in range(links)]
        return SimpleNamespace(busId=ends[link])


Install = Callable[..., FakeNvml]


def install(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, fault: str = "") -> FakeNvml:
    """Put a library in place for one test."""
    library = FakeNvml(list(gpus), fault)
    forget(monkeypatch)
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(nvml, "_is_installed", lambda: True)
    monkeypatch.setattr(nvml, "_library", lambda *_: "/usr/lib64/libnvidia-ml.so.1")
    monkeypatch.setattr(nvml, "_answer", library.answer)
    return library


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where neither package nor library are, whether they are here or not."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(nvml, "_library", lambda *_: None)
    nvml._answers.clear()
