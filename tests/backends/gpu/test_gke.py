"""NVIDIA's GPUs as GKE's plugin for Container-Optimized OS hands them out; the answers are those of the running plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from backends.base import AllocationRefused, Device, Grant, HostPath, Mount
from backends.gpu import Gpu, nvidia_edits
from tests.backends.gpu.fake_nvml import FakeGpu, install
from tests.backends.gpu.gpus import backend, devices, given, nodes, offered, resource
from tests.backends.machines import CONTROLS, hgx_h100, information, nvidia_gpu, uuid
from tests.backends.trees import plant

GPU0, GPU1 = uuid(0), uuid(1)


@pytest.fixture(scope="module")
def h100s(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    return backend(tmp_path_factory.mktemp("machine"), hgx_h100())


GKE_MOUNTS = (
    Mount(HostPath("/home/kubernetes/bin/nvidia"), "/usr/local/nvidia", read_only=True),
    Mount(HostPath("/home/kubernetes/bin/nvidia/vulkan/icd.d"), "/etc/vulkan/icd.d", read_only=True),
)
GKE_CONTROLS = [f"/dev/{name} mrw" for name in ("nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-uvm-tools")]


def test_gke(h100s: Gpu) -> None:
    edits = given(h100s, resource(style="gke"), "nvidia7", "nvidia1")
    assert nodes(edits) == ["/dev/nvidia7 mrw", "/dev/nvidia1 mrw", *GKE_CONTROLS]
    assert edits.mounts == GKE_MOUNTS
    assert (edits.env, edits.annotations, edits.cdi_devices) == ({}, {}, ())


@pytest.mark.parametrize("clients", [1, 2])
def test_gke_shares_under_its_own_ids_also_with_one_client(h100s: Gpu, clients: int) -> None:
    shared = resource(style="gke", replicas=clients, sharing="time-slicing")
    assert list(h100s.ids(shared, devices(h100s)[GPU1])) == [f"nvidia1/vgpu{n}" for n in range(clients)]
    assert nodes(given(h100s, shared, "nvidia1/vgpu0")) == ["/dev/nvidia1 mrw", *GKE_CONTROLS]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        ({"replicas": 2}, ["nvidia0/vgpu0", "nvidia0/vgpu1"]),
        ({"sharing": "time-slicing"}, ["nvidia0/vgpu0", "nvidia1/vgpu0"]),
        ({"replicas": 2, "sharing": "mps"}, ["nvidia0/vgpu0", "nvidia1/vgpu0"]),
    ],
)
def test_gke_refuses_two_shares(h100s: Gpu, options: dict[str, Any], ids: list[str]) -> None:
    with pytest.raises(AllocationRefused, match=r"may ask for one nvidia\.com/gpu at most"):
        given(h100s, resource(style="gke", **options), *ids)


def test_gke_by_mps_has_the_limits_of_its_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu("0000:3b:00.0", GPU0))
    shared = resource(style="gke", replicas=7, sharing="mps")
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu("0000:3b:00.0", 0), shared)
    edits = given(gpu, shared, "nvidia0/vgpu0", "nvidia0/vgpu3")
    assert edits.env == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "28",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": f"0={2 * 81920 // 7}M",
    }
    assert edits.mounts == (*GKE_MOUNTS, Mount(HostPath("/tmp/nvidia-mps"), "/tmp/nvidia-mps"))


@hypothesis.given(st.integers(1, 48), st.integers(1, 200_000), st.data())
def test_the_limits_of_all_clients_together_are_no_more_than_the_gpu(
    clients: int, memory: int, data: st.DataObject
) -> None:
    device = Device("gpu", "gpu", frozenset({"pci:gpu"}), attributes={"minor": ("0",), "memory": (str(memory),)})
    shared = resource(style="gke", replicas=clients, sharing="mps")
    asked = data.draw(st.integers(1, clients))
    env = [nvidia_edits.gke_edits(shared, [Grant(f"{n}", device)] * n).env for n in (asked, clients - asked) if n]
    assert sum(int(one["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"]) for one in env) <= 100
    limits = [one["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] for one in env]
    assert sum(int(one.removeprefix("0=").removesuffix("M")) for one in limits) <= memory


def test_gke_below_other_paths(h100s: Gpu) -> None:
    paths: dict[str, Any] = {
        "driver_path": "/opt/nvidia",
        "driver_mount": "/usr/nv",
        "vulkan_path": "/opt/icd",
        "vulkan_mount": "/icd",
    }
    edits = given(h100s, resource(style="gke", **paths), "nvidia0")
    pairs = [("/opt/nvidia", "/usr/nv"), ("/opt/icd", "/icd")]
    assert edits.mounts == tuple(Mount(HostPath(host), inside, read_only=True) for host, inside in pairs)


def test_gke_needs_no_uuid(tmp_path: Path) -> None:
    """A GPU that nobody has used yet has none, and would never be used."""
    gke = resource(style="gke")
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu("0000:3b:00.0", 5), gke)
    unknown = information(5, "H100", gpu_uuid="GPU-????????-????-????-????-????????????")
    plant(tmp_path, f"proc/driver/nvidia/gpus/0000:3b:00.0/information = {unknown}")
    (before,) = devices(gpu).values()
    plant(tmp_path, f"proc/driver/nvidia/gpus/0000:3b:00.0/information = {information(5, 'H100')}")
    (after,) = devices(gpu).values()
    assert list(gpu.ids(gke, before)) == list(gpu.ids(gke, after)) == ["nvidia5"]
    assert (before.key, before.identity, after.identity) == (after.key, "", uuid(5))


@pytest.mark.parametrize("missing", ["nvidiactl", "nvidia-uvm"])
def test_gke_waits_for_the_control_nodes(tmp_path: Path, missing: str) -> None:
    gpu = backend(tmp_path, hgx_h100(), resource(style="gke"))
    (tmp_path / "dev" / missing).unlink()
    assert offered(gpu) == []
    assert {device.unusable for device in devices(gpu).values()} == {f"/dev/{missing} does not exist"}
    plant(tmp_path, f"dev/{missing} c 195:255")
    assert len(offered(gpu)) == 8


def test_no_other_style_waits_for_them(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0), resource(style="gke", select={"vendor": ("1002",)}))
    assert offered(gpu) == [GPU0]
