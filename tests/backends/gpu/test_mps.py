"""GPUs that NVIDIA's MPS control daemon shares: what a container gets, and when it can have one."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import AllocationRefused, ContainerEdits, HostPath, Known, Mount, PathChange
from backends.gpu import Gpu
from tests.backends.gpu.fake_nvml import FakeGpu, FakeMig, install
from tests.backends.gpu.gpus import backend, devices, given, look, offered, resource
from tests.backends.machines import CONTROLS, mig, nvidia_gpu, uuid
from tests.backends.trees import plant

GPU = "0000:3b:00.0"
SHARED = resource("nvidia.com/gpu.shared", replicas=4, sharing="mps", select={"vendor": ("10de",)})
READY = """
run/nvidia/mps/nvidia.com/gpu.shared/.started
run/nvidia/mps/nvidia.com/gpu.shared/pipe/nvidia-cuda-mps-control.pid = 42
"""


def reasons(gpu: Gpu) -> list[str]:
    return [s.message for s in gpu.probe(devices(gpu)[uuid(0)]) if s.reason == "mps-down"]


def test_what_a_container_gets(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0), SHARED)
    assert given(gpu, SHARED, f"{uuid(0)}::2") == ContainerEdits(
        env={"NVIDIA_VISIBLE_DEVICES": uuid(0), "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu.shared/pipe"},
        mounts=(
            Mount(HostPath("/run/nvidia/mps/nvidia.com/gpu.shared/pipe"), "/mps/nvidia.com/gpu.shared/pipe"),
            Mount(HostPath("/run/nvidia/mps/shm"), "/dev/shm"),
        ),
    )


def test_two_shares_are_refused_unless_they_are_wanted(tmp_path: Path) -> None:
    wanted = resource(replicas=4, sharing="mps", fail_requests_greater_than_one=False)
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0), SHARED)
    two = [f"{uuid(0)}::0", f"{uuid(0)}::1"]
    with pytest.raises(AllocationRefused, match=r"may ask for one nvidia\.com/gpu\.shared at most"):
        given(gpu, SHARED, *two)
    assert given(gpu, wanted, *two).env["NVIDIA_VISIBLE_DEVICES"] == uuid(0)


def test_a_gpu_for_virtual_machines_needs_no_control_daemon(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0, driver="vfio-pci"), SHARED)
    assert [
        signal.reason for found in devices(gpu).values() for signal in gpu.probe(found) if signal.reason == "mps-down"
    ] == []


def test_a_gpu_is_unhealthy_while_its_control_daemon_is_not_ready(tmp_path: Path) -> None:
    whole = resource(select={"address": ("0000:5e:00.0",)})
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0) + nvidia_gpu("0000:5e:00.0", 1), whole, SHARED)
    directory = "/run/nvidia/mps/nvidia.com/gpu.shared"
    assert reasons(gpu) == [
        f"the MPS control daemon of nvidia.com/gpu.shared is not ready: {directory}/.started is not there"
    ]
    plant(tmp_path, READY)
    assert reasons(gpu) == []
    (tmp_path / directory[1:] / "pipe/nvidia-cuda-mps-control.pid").unlink()
    assert "nvidia-cuda-mps-control.pid is not there" in reasons(gpu)[0]
    assert [s.reason for s in gpu.probe(devices(gpu)[uuid(1)]) if s.measure is None] == []  # nobody shares it


def test_the_control_daemon_is_not_polled(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu(GPU, 0), SHARED)
    known = Known({unit: found.devices for unit, found in look(gpu).items()})
    for name in ("", "/pipe"):
        directory = HostPath(f"/run/nvidia/mps/nvidia.com/gpu.shared{name}")
        assert directory in gpu.watches(known).directories
        assert [*gpu.affects(PathChange(directory / "some"), known)] == [GPU]


def test_mig_devices_cannot_be_shared_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(GPU, uuid(0), mig=[FakeMig("MIG-1", 1, 0)]))
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu(GPU, 0) + mig(0, [(1, 0)]), SHARED)
    assert offered(gpu) == ["MIG-1"]
    with pytest.raises(AllocationRefused, match="which MIG devices cannot be"):
        given(gpu, SHARED, "MIG-1::0")
