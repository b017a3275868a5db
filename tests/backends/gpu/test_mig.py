"""MIG devices, with NVIDIA's management library and without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import AllocationRefused, Grant
from tests.backends.gpu.fake_nvml import ADDRESS, DIVIDED, KNOWN, MIG1, MIG2, FakeGpu, Install
from tests.backends.gpu.gpus import backend, devices, given, look, nodes, offered, resource
from tests.backends.machines import CONTROLS, mig, nvidia_gpu, uuid
from tests.backends.trees import plant

pytestmark = pytest.mark.usefixtures("no_nvml")


def test_mig_devices(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    gpu = backend(tmp_path, DIVIDED)
    found = devices(gpu)
    assert offered(gpu) == [MIG1, MIG2]
    assert found[uuid(0)].unusable == "it is in MIG mode, and offered as its MIG devices"
    first = found[MIG1]
    assert first.hardware == {f"part:{MIG1}"}
    assert first.depends == {f"pci:{ADDRESS}", f"mig:{ADDRESS}/gi1"}
    assert f"mig:{ADDRESS}/gi1" in found[uuid(0)].hardware
    expected = {
        "profile": ("1g.10gb",),
        "parent": (uuid(0),),
        "uuid": (MIG1,),
        "gi": ("1",),
        "ci": ("0",),
    }
    assert {name: first.attributes[name] for name in expected} == expected


def test_a_resource_may_have_one_profile(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    small = resource("nvidia.com/mig-1g.10gb", select={"profile": ("1g.10gb",)})
    found = devices(backend(tmp_path, DIVIDED, small))
    assert [small.refuses(found[key]) for key in (MIG1, MIG2)] == [None, "profile is 3g.40gb, not 1g.10gb"]


def test_what_a_container_gets(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    edits = given(backend(tmp_path, DIVIDED), resource(pass_device_specs=True), MIG1, MIG2)
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": f"{MIG1},{MIG2}"}
    own = ["nvidia0", "nvidia-caps/nvidia-cap3", "nvidia-caps/nvidia-cap4"]
    other = ["nvidia-caps/nvidia-cap5", "nvidia-caps/nvidia-cap6"]
    controls = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"]
    assert nodes(edits) == [f"/dev/{name} rw" for name in (*controls, *own, *other)]


def test_by_index(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    by_index = resource(device_id_strategy="index")
    edits = given(backend(tmp_path, DIVIDED, by_index), by_index, MIG2)
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "0:1"}


def test_gke_needs_nothing_but_proc(tmp_path: Path) -> None:
    """Neither NVML, nor the table of minors, nor a UUID; and the first compute instance alone."""
    gke = resource(style="gke")
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu(ADDRESS, 0) + mig(0, [(1, 0), (2, 0), (2, 1)]), gke)
    assert sorted(one for d in devices(gpu).values() if not d.unusable for one in gpu.ids(gke, d)) == [
        "nvidia0/gi1",
        "nvidia0/gi2",
    ]
    own = ["nvidia0", "nvidia-caps/nvidia-cap5", "nvidia-caps/nvidia-cap6"]
    controls = ["nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-uvm-tools"]
    assert nodes(given(gpu, gke, "nvidia0/gi2")) == [f"/dev/{name} mrw" for name in (*own, *controls)]
    assert devices(gpu)[f"{ADDRESS}/gi2"].depends == {f"pci:{ADDRESS}", f"mig:{ADDRESS}/gi2"}
    assert [list(gpu.ids(resource(style="gke", replicas=2), d)) for d in devices(gpu).values() if not d.unusable] == [
        ["nvidia0/gi1/vgpu0", "nvidia0/gi1/vgpu1"],
        ["nvidia0/gi2/vgpu0", "nvidia0/gi2/vgpu1"],
    ]


@pytest.mark.parametrize(("style", "id_"), [("vendor", uuid(0)), ("gke", "nvidia0")])
def test_without_mig_devices_a_divided_gpu_is_offered_whole(
    tmp_path: Path, install_nvml: Install, style: str, id_: str
) -> None:
    """NVIDIA's `migStrategy: none`, and GKE's fractions of machines."""
    install_nvml(KNOWN)
    whole = resource(style=style, mig_devices=False, pass_device_specs=style == "vendor")
    gpu = backend(tmp_path, DIVIDED, whole)
    (key,) = offered(gpu)
    given_nodes = {node.partition(" ")[0] for node in nodes(given(gpu, whole, id_))}
    controls = {"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset"}
    assert given_nodes == {f"/dev/{name}" for name in ("nvidia0", *controls)}
    assert devices(gpu)[key].hardware == {f"pci:{ADDRESS}", f"mig:{ADDRESS}/gi1", f"mig:{ADDRESS}/gi2"}


def test_a_mig_device_whose_nodes_are_not_made_yet_waits_for_them(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    gpu = backend(tmp_path, DIVIDED)
    (tmp_path / "dev/nvidia-caps/nvidia-cap6").unlink()
    assert offered(gpu) == [MIG1]
    assert devices(gpu)[MIG2].unusable == "/dev/nvidia-caps/nvidia-cap6 does not exist"
    plant(tmp_path, "dev/nvidia-caps/nvidia-cap6 c 236:6")
    assert offered(gpu) == [MIG1, MIG2]


def test_the_number_of_a_node_is_not_guessed(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    gpu = backend(tmp_path, DIVIDED)
    (tmp_path / "proc/driver/nvidia/capabilities/gpu0/mig/gi1/ci0/access").write_bytes(b"\xff\0DeviceFileMinor")
    assert offered(gpu) == [MIG2]
    assert devices(gpu)[MIG1].unusable == "/proc/driver/nvidia/capabilities does not name its nodes"


def test_a_mig_device_that_the_library_does_not_know_is_a_problem(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(FakeGpu(ADDRESS, uuid(0), mig=KNOWN.mig[:1] if KNOWN.mig else None))
    gpu = backend(tmp_path, DIVIDED)
    assert offered(gpu) == [MIG1]
    (problem,) = look(gpu)[ADDRESS].problems
    assert problem.sentence == f"{ADDRESS}: NVML does not know the MIG device gpu0/gi2/ci0"


def test_a_gpu_in_mig_mode_that_is_not_divided_is_not_offered(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(FakeGpu(ADDRESS, uuid(0), mig=[]))
    gpu = backend(tmp_path, nvidia_gpu(ADDRESS, 0))
    assert devices(gpu)[uuid(0)].unusable == "it is in MIG mode and not divided"


def test_without_the_package_a_divided_gpu_is_a_problem_that_says_what_to_install(tmp_path: Path) -> None:
    gpu = backend(tmp_path, DIVIDED + nvidia_gpu("0000:5e:00.0", 1))
    assert offered(gpu) == [uuid(1)]
    (problem,) = look(gpu)[ADDRESS].problems
    assert "install the Python package nvidia-ml-py" in problem.sentence


def test_a_part_is_not_reset_by_itself(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    gpu = backend(tmp_path, DIVIDED)
    with pytest.raises(AllocationRefused, match=f"{MIG1} is to be reset .* part of a GPU"):
        gpu.prepare(resource(), [Grant(MIG1, devices(gpu)[MIG1])])
