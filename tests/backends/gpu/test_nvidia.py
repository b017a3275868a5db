"""NVIDIA's GPUs: what is found on published machines, and what a container gets, as the vendors' plugins have it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from backends.base import AllocationRefused, ContainerEdits, HostPath, Known, Mount, PathChange, Released
from backends.gpu import Gpu
from tests.backends.gpu.gpus import backend, devices, given, look, nodes, offered, resource
from tests.backends.machines import CONTROLS, H100, dgx1, hgx_h100, information, nvidia_gpu, uuid
from tests.backends.trees import plant
from tests.nodes import make_node

GPU0, GPU1 = uuid(0), uuid(1)
CONTROL_NODES = ["/dev/nvidiactl rw", "/dev/nvidia-uvm rw", "/dev/nvidia-uvm-tools rw", "/dev/nvidia-modeset rw"]


# --- what is found ---


def test_dgx1(tmp_path: Path) -> None:
    found = devices(backend(tmp_path, dgx1()))
    assert sorted(found) == [uuid(minor) for minor in range(8)]
    first = found[GPU0]
    assert (first.unusable, first.numa_node) == ("", 0)
    assert first.hardware == {"pci:0000:06:00.0"}
    assert first.ancestry == ("pci0000:00", "0000:00:01.0", "0000:06:08.0")
    assert first.attributes["model"] == ("Tesla V100-SXM2-16GB",)
    assert found[uuid(7)].numa_node == 1


def test_what_can_be_selected(tmp_path: Path) -> None:
    (device,) = devices(backend(tmp_path, CONTROLS + nvidia_gpu("0000:3b:00.0", 4))).values()
    assert device.identity == device.key == uuid(4)
    expected = {
        "address": ("0000:3b:00.0",),
        "vendor": ("10de",),
        "id": ("10de:2330",),
        "class": ("030200",),
        "driver": ("nvidia",),
        "uuid": (uuid(4),),
        "minor": ("4",),
        "model": ("NVIDIA H100 80GB HBM3",),
        "numa_node": ("0",),
        "boot_display": ("no",),
    }
    assert {name: device.attributes.get(name) for name in expected} == expected


def test_units_are_the_gpus_and_nothing_else(tmp_path: Path) -> None:
    from tests.backends.pci_trees import function

    others = function("0000:01:00.0", "15b3:1021", kind="020700", files={"class": "0x020700", "vendor": "0x15b3"})
    others += function("0000:19:00.1", "10de:22a3", kind="068000", files={"class": "0x068000", "vendor": "0x10de"})
    others += function("0000:02:00.0", "1a03:2000", kind="030000", files={"class": "0x030000", "vendor": "0x1a03"})
    others += function("0000:00:0b.0", "8086:7d1d", kind="120000", files={"class": "0x120000", "vendor": "0x8086"})
    gpu = backend(tmp_path, hgx_h100() + others)
    assert sorted(gpu.units()) == sorted([*(f"0000:{place}.0" for place in H100), "nvlink"])


# --- late, and not at all ---


def test_a_gpu_appears_when_its_late_driver_and_nodes_do(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, registered=False, node=False))
    assert devices(gpu)["0000:3b:00.0"].unusable == (
        "the NVIDIA driver has not started it: /proc/driver/nvidia/gpus/0000:3b:00.0 is not there"
    )
    plant(tmp_path, f"proc/driver/nvidia/gpus/0000:3b:00.0/information = {information(0, 'H100')}")
    assert devices(gpu)[GPU0].unusable == "/dev/nvidia0 does not exist"
    plant(tmp_path, "dev/nvidia0 c 195:0")
    assert offered(gpu) == [GPU0]


def test_a_node_that_leads_elsewhere_is_not_handed_out(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, node=False))
    make_node(tmp_path / "dev/nvidia0", "c", 195, 7)
    assert devices(gpu)[GPU0].unusable == "/dev/nvidia0 is c:195:7, but the driver says c:195:0"


def test_a_gpu_that_was_never_used_has_no_uuid_yet(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, registered=False))
    unknown = information(0, "H100", gpu_uuid="GPU-????????-????-????-????-????????????")
    plant(tmp_path, f"proc/driver/nvidia/gpus/0000:3b:00.0/information = {unknown}")
    (found,) = look(gpu)["0000:3b:00.0"].devices
    assert "nvidia-persistenced" in found.unusable
    assert not look(gpu)["0000:3b:00.0"].problems


def test_a_gpu_that_the_driver_excludes_is_not_offered(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, registered=False))
    plant(tmp_path, f"proc/driver/nvidia/gpus/0000:3b:00.0/information = {information(0, 'H100', excluded='Yes')}")
    assert "NVreg_ExcludedGpus" in devices(gpu)[GPU0].unusable


def test_a_gpu_that_is_half_removed_is_gone_and_the_others_stay(tmp_path: Path) -> None:
    gpu = backend(tmp_path, hgx_h100())
    shutil.rmtree(gpu.host.local(HostPath(f"/sys/devices/pci0000:19/0000:19:01.0/0000:{H100[0]}.0")))
    assert offered(gpu) == [uuid(minor) for minor in range(1, 8)]


def test_the_key_is_the_uuid_wherever_the_card_is(tmp_path: Path) -> None:
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0))
    before = devices(gpu)[GPU0]
    gpu = backend(tmp_path / "moved", nvidia_gpu("0000:5e:00.0", 0))
    after = devices(gpu)[GPU0]
    assert (before.key, before.identity) == (after.key, after.identity)
    assert before.hardware != after.hardware


# --- what a container gets: NVIDIA's k8s-device-plugin ---


@pytest.fixture(scope="module")
def h100s(tmp_path_factory: pytest.TempPathFactory) -> Gpu:
    return backend(tmp_path_factory.mktemp("machine"), hgx_h100())


def test_envvar(h100s: Gpu) -> None:
    assert given(h100s, resource(), GPU0, GPU1) == ContainerEdits(env={"NVIDIA_VISIBLE_DEVICES": f"{GPU0},{GPU1}"})


def test_replicas_name_each_gpu_once(h100s: Gpu) -> None:
    shared = resource(replicas=4)
    assert h100s.ids(shared, devices(h100s)[GPU0]) == tuple(f"{GPU0}::{n}" for n in range(4))
    edits = given(h100s, shared, f"{GPU0}::0", f"{GPU0}::3", f"{GPU1}::1")
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": f"{GPU0},{GPU1}"}


def test_by_index(tmp_path: Path) -> None:
    by_index = resource(device_id_strategy="index")
    edits = given(backend(tmp_path, hgx_h100(), by_index), by_index, GPU1, uuid(7))
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "1,7"}


def test_an_excluded_gpu_has_no_index(tmp_path: Path) -> None:
    """A container that is told the number of a GPU's neighbour gets the neighbour."""
    by_index = resource(device_id_strategy="index")
    gpu = backend(tmp_path, hgx_h100(), by_index)
    excluded = information(1, "H100", excluded="Yes")
    plant(tmp_path, f"proc/driver/nvidia/gpus/0000:{H100[1]}.0/information = {excluded}")
    assert given(gpu, by_index, GPU0, uuid(2), uuid(7)).env == {"NVIDIA_VISIBLE_DEVICES": "0,1,6"}


def test_indices_follow_the_numbers_of_domains_not_their_letters(tmp_path: Path) -> None:
    by_index = resource(device_id_strategy="index")
    gpu = backend(tmp_path, nvidia_gpu("10000:3b:00.0", 0) + nvidia_gpu("2000:3b:00.0", 1), by_index)
    assert given(gpu, by_index, GPU1).env == {"NVIDIA_VISIBLE_DEVICES": "0"}


def test_volume_mounts(h100s: Gpu) -> None:
    edits = given(h100s, resource(device_list_strategy="volume-mounts"), GPU0)
    assert edits == ContainerEdits(
        env={"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"},
        mounts=(Mount(HostPath("/dev/null"), f"/var/run/nvidia-container-devices/{GPU0}"),),
    )


def test_volume_mounts_win_over_envvar(h100s: Gpu) -> None:
    edits = given(h100s, resource(device_list_strategy=["envvar", "volume-mounts"]), GPU0)
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}


def test_device_specs(h100s: Gpu) -> None:
    edits = given(h100s, resource(pass_device_specs=True), GPU0, GPU1)
    assert nodes(edits) == [*CONTROL_NODES, "/dev/nvidia0 rw", "/dev/nvidia1 rw"]
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": f"{GPU0},{GPU1}"}


def test_device_specs_have_those_control_nodes_that_are_there(tmp_path: Path) -> None:
    gpu = backend(tmp_path, "dev/nvidiactl c 195:255\ndev/nvidia-uvm = a plain file\n" + nvidia_gpu("0000:3b:00.0", 0))
    assert nodes(given(gpu, resource(pass_device_specs=True), GPU0)) == ["/dev/nvidiactl rw", "/dev/nvidia0 rw"]


def test_device_specs_below_the_drivers_root(tmp_path: Path) -> None:
    gpu = backend(tmp_path, "dev/nvidiactl c 195:255\n" + nvidia_gpu("0000:3b:00.0", 0))
    edits = given(gpu, resource(pass_device_specs=True, device_driver_root="/run/nvidia/driver"), GPU0)
    assert nodes(edits) == [
        "/run/nvidia/driver/dev/nvidiactl -> /dev/nvidiactl rw",
        "/run/nvidia/driver/dev/nvidia0 -> /dev/nvidia0 rw",
    ]


def test_nodes_that_a_driver_container_has_for_itself(tmp_path: Path) -> None:
    """NVIDIA's GPU operator: nothing is in the host's /dev, and the driver's root comes late."""
    root = "/run/nvidia/driver"
    wanted = resource(pass_device_specs=True, device_driver_root=f"{root}/")
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0, node=False), wanted)
    assert devices(gpu)[GPU0].unusable == "/dev/nvidia0 does not exist, nor is it below /run/nvidia/driver"
    known = Known({unit: found.devices for unit, found in look(gpu).items()})
    assert HostPath(f"{root}/dev") in gpu.watches(known).directories
    plant(tmp_path, f"run/nvidia/driver/dev/nvidiactl c 195:255\n{root[1:]}/dev/nvidia0 c 195:1")
    assert offered(gpu) == []  # it is another GPU's
    (tmp_path / "run/nvidia/driver/dev/nvidia0").unlink()
    plant(tmp_path, f"{root[1:]}/dev/nvidia0 c 195:0")
    assert [*gpu.affects(PathChange(HostPath(f"{root}/dev/nvidia0")), known)] == ["0000:3b:00.0"]
    assert nodes(given(gpu, wanted, GPU0)) == [
        "/run/nvidia/driver/dev/nvidiactl -> /dev/nvidiactl rw",
        "/run/nvidia/driver/dev/nvidia0 -> /dev/nvidia0 rw",
    ]
    found = devices(gpu)[GPU0]
    assert [signal.reason for signal in gpu.probe(found) if signal.measure is None] == []
    (tmp_path / "run/nvidia/driver/dev/nvidia0").unlink()
    assert [signal.reason for signal in gpu.probe(found) if signal.measure is None] == ["node-missing"]


def test_cdi_by_the_kubelet(h100s: Gpu) -> None:
    edits = given(h100s, resource(device_list_strategy="cdi-cri", pass_device_specs=True), GPU0, GPU1)
    assert edits == ContainerEdits(
        cdi_devices=(f"k8s.device-plugin.nvidia.com/gpu={GPU0}", f"k8s.device-plugin.nvidia.com/gpu={GPU1}")
    )


def test_cdi_by_annotation(h100s: Gpu) -> None:
    edits = given(h100s, resource(device_list_strategy="cdi-annotations"), GPU0, GPU1)
    ((name, value),) = edits.annotations.items()
    prefix, _, suffix = name.partition("_")
    assert prefix == "cdi.k8s.io/nvidia-device-plugin"
    assert [len(part) for part in suffix.split("-")] == [8, 4, 4, 4, 12]
    assert len(name.partition("/")[2]) <= 63
    assert value == f"k8s.device-plugin.nvidia.com/gpu={GPU0},k8s.device-plugin.nvidia.com/gpu={GPU1}"
    assert (edits.env, edits.cdi_devices) == ({}, ())


def test_cdi_annotations_of_two_resources_do_not_collide(h100s: Gpu) -> None:
    """A bug of sriov-network-device-plugin and k8s-rdma-shared-dev-plugin: the second resource's replaced the first's."""
    one = given(h100s, resource("nvidia.com/gpu", device_list_strategy="cdi-annotations"), GPU0)
    other = given(h100s, resource("nvidia.com/big-gpu", device_list_strategy="cdi-annotations"), GPU1)
    assert len(one.merge(other).annotations) == 2


def test_cdi_specifications_are_nobodys_to_write_or_to_clean_up(tmp_path: Path) -> None:
    """A bug of k8s-rdma-shared-dev-plugin: it cleans up other vendors' specifications with its own."""
    gpu = backend(tmp_path, hgx_h100() + "etc/cdi/other.yaml = kind: example.com/nic\nrun/cdi/nvidia.yaml = kind: x")
    before = sorted(tmp_path.rglob("*"))
    wanted = resource(device_list_strategy=["cdi-annotations", "cdi-cri"], gds_enabled=True)
    assert given(gpu, wanted, GPU0).cdi_devices
    gpu.release([Released(wanted.name, GPU0, frozenset({"pci:0000:19:00.0"}))], frozenset({"pci:0000:19:00.0"}))
    assert sorted(tmp_path.rglob("*")) == before


def test_cdi_under_other_names(h100s: Gpu) -> None:
    both = resource(
        device_list_strategy=["cdi-annotations", "cdi-cri"],
        cdi_vendor="nvidia.com",
        cdi_annotation_prefix="nvidia.cdi.k8s.io/",
    )
    edits = given(h100s, both, GPU0)
    assert edits.cdi_devices == (f"nvidia.com/gpu={GPU0}",)
    assert next(iter(edits.annotations)).startswith("nvidia.cdi.k8s.io/nvidia-device-plugin_")


def test_features(h100s: Gpu) -> None:
    wanted = resource(
        device_list_strategy=["envvar", "cdi-cri"], gds_enabled=True, gdrcopy_enabled=True, mofed_enabled=True
    )
    edits = given(h100s, wanted, GPU0)
    assert edits.env == {
        "NVIDIA_VISIBLE_DEVICES": GPU0,
        "NVIDIA_GDS": "enabled",
        "NVIDIA_GDRCOPY": "enabled",
        "NVIDIA_MOFED": "enabled",
    }
    assert edits.cdi_devices == tuple(
        f"k8s.device-plugin.nvidia.com/{name}" for name in (f"gpu={GPU0}", "gdrcopy=all", "gds=all", "mofed=all")
    )


def test_several_replicas_for_one_container_can_be_refused(h100s: Gpu) -> None:
    shared = resource("nvidia.com/gpu.shared", replicas=4, fail_requests_greater_than_one=True)
    assert given(h100s, shared, f"{GPU0}::0").env == {"NVIDIA_VISIBLE_DEVICES": GPU0}
    with pytest.raises(AllocationRefused, match=r"may ask for one nvidia\.com/gpu\.shared at most"):
        given(h100s, shared, f"{GPU0}::0", f"{GPU1}::0")


def test_whole_gpus_are_never_refused_for_their_number(h100s: Gpu) -> None:
    assert given(h100s, resource(fail_requests_greater_than_one=True), GPU0, GPU1).env
