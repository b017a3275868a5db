"""AMD's GPUs and their partitions, as ROCm's k8s-device-plugin has them."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from backends.base import AllocationRefused, Grant, Link
from backends.gpu import Gpu
from tests.backends.gpu.gpus import backend, devices, given, look, nodes, offered, resource
from tests.backends.machines import MI210, MI300X, amd_gpu, kfd_node, mi210_server, mi300x_cpx
from tests.backends.trees import recorded_host

AMD = resource("amd.com/gpu", select={"vendor": ("1002",)})


def test_mi210_server(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi210_server(), AMD)
    assert offered(gpu) == MI210
    first = devices(gpu)[MI210[0]]
    assert (first.identity, first.numa_node) == ("00000000001901f0", 0)
    assert first.attributes["model"] == ("AMD Instinct MI210",)
    assert first.attributes["serial"] == ("692315000000",)


def test_what_a_container_gets(tmp_path: Path) -> None:
    edits = given(backend(tmp_path, mi210_server(), AMD), AMD, MI210[0], MI210[1])
    assert nodes(edits) == [
        "/dev/kfd rw",
        "/dev/dri/card0 rw",
        "/dev/dri/renderD128 rw",
        "/dev/dri/card1 rw",
        "/dev/dri/renderD129 rw",
    ]
    assert (edits.env, edits.mounts, edits.annotations) == ({}, (), {})


def test_xgmi_joins_the_hives(tmp_path: Path) -> None:
    links = look(backend(tmp_path, mi210_server(), AMD))["kfd"].links
    assert len(links) == 12
    assert links[0] == Link(f"pci:{MI210[0]}", f"pci:{MI210[1]}", 1)
    hives = {frozenset({link.one, link.other}) for link in links}
    assert frozenset({f"pci:{MI210[0]}", f"pci:{MI210[4]}"}) not in hives


def test_links_are_counted_and_those_over_pci_are_none(tmp_path: Path) -> None:
    one, other, third = MI210[:3]
    machine = "".join(amd_gpu(address, n) for n, address in enumerate(MI210[:3]))
    machine += kfd_node(1, one, 128, {2: 3}) + kfd_node(2, other, 129, {1: 3}) + kfd_node(3, third, 130, {})
    over_pci = "type 2\\nnode_from 3\\nnode_to 1\\nweight 20\\nmin_bandwidth 312\\nmax_bandwidth 64000"
    machine += f"sys/class/kfd/kfd/topology/nodes/3/io_links/1/properties = {over_pci}\n"
    links = look(backend(tmp_path, machine, AMD))["kfd"].links
    assert links == (Link(f"pci:{one}", f"pci:{other}", 3),)


def test_partitions(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi300x_cpx(), AMD)
    assert offered(gpu) == [MI300X, "amdgpu_xcp_1", "amdgpu_xcp_2", "amdgpu_xcp_3"]
    found = devices(gpu)
    assert {found[key].attributes["partition"] for key in found} == {("cpx_nps4",)}
    part = found["amdgpu_xcp_2"]
    assert part.hardware == {"part:amdgpu_xcp_2"}
    assert part.depends == {f"pci:{MI300X}"}
    assert part.ancestry == (*found[MI300X].ancestry, MI300X)
    assert nodes(given(gpu, AMD, "amdgpu_xcp_2")) == ["/dev/kfd rw", "/dev/dri/card2 rw", "/dev/dri/renderD130 rw"]


@pytest.mark.parametrize("name", ["amdgpu_xcp_{}", "amdgpu_xcp.{}"])
@pytest.mark.parametrize("shift", [0, 28])
def test_partitions_of_every_kernel_are_found(tmp_path: Path, name: str, shift: int) -> None:
    gpu = backend(tmp_path, mi300x_cpx(8, name=name, shift=shift), AMD)
    found = devices(gpu)
    assert sorted(found) == [MI300X, *(name.format(n) for n in range(1, 8))]
    assert all(part.depends == {f"pci:{MI300X}"} for key, part in found.items() if key != MI300X)
    assert look(gpu)["kfd"].problems == ()


def test_partitions_that_are_missing_are_told(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi300x_cpx(8), AMD)
    for n in range(1, 8):
        (tmp_path / f"sys/class/drm/renderD{128 + n}").unlink()
    (problem,) = look(gpu)["kfd"].problems
    assert problem.sentence.startswith(f"1 of 8 partitions of {MI300X} are found: the others have no DRM device.")


def test_a_partition_of_which_kfd_knows_nothing_is_told(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi300x_cpx(3), AMD)
    (tmp_path / f"sys/bus/pci/devices/{MI300X}/current_compute_partition").write_text("QPX\n")
    (problem,) = look(gpu)["kfd"].problems
    assert problem.sentence.startswith(f"3 of 4 partitions of {MI300X} are found")


def test_eight_mi300x_of_amd_in_cpx_offer_all_their_partitions(tmp_path: Path) -> None:
    gpu = Gpu(recorded_host(tmp_path, "kfd-topo-mi300-cpx"), (AMD,))
    for function in (tmp_path / "sys/bus/pci/devices").iterdir():
        (function / "current_compute_partition").write_text("CPX\n")  # the recording is of KFD alone
    assert len(offered(gpu)) == 63
    (problem,) = look(gpu)["kfd"].problems
    assert problem.sentence.startswith("7 of 8 partitions of 0000:e5:00.0 are found")


def test_a_partition_is_not_reset_since_the_others_would_be_too(tmp_path: Path) -> None:
    gpu = backend(tmp_path, mi300x_cpx(), AMD)
    for key, device in devices(gpu).items():
        with pytest.raises(AllocationRefused, match="part of a GPU"):
            gpu.prepare(AMD, [Grant(key, device)])


def test_a_gpu_is_not_reset_under_amdgpu_which_is_not_told_of_it(tmp_path: Path) -> None:
    spec = replace(AMD.spec, pre_start="reset")
    gpu = backend(tmp_path, mi210_server(), replace(AMD, spec=spec))
    assert {device.no_reset for device in devices(gpu).values()} == {
        f"{address} is used by its driver amdgpu, which is not told of a reset" for address in MI210
    }
    key, device = next(iter(devices(gpu).items()))
    with pytest.raises(AllocationRefused, match="is used by its driver amdgpu"):  # a claim may ask for a reset of any
        gpu.prepare(AMD, [Grant(key, device)])


def test_a_driver_that_is_still_at_it(tmp_path: Path) -> None:
    gpu = backend(tmp_path, "dev/kfd c 234:0\n" + amd_gpu("0000:23:00.0", 0, driver="radeon"), AMD)
    link = tmp_path / "sys/bus/pci/devices/0000:23:00.0/driver"
    link.unlink()
    link.symlink_to("../amdgpu")
    assert devices(gpu)["0000:23:00.0"].unusable == "its driver has not made its DRM devices"


def test_a_card_node_that_is_anothers_is_not_handed_out(tmp_path: Path) -> None:
    gpu = backend(tmp_path, "dev/kfd c 234:0\n" + amd_gpu("0000:23:00.0", 0), AMD)
    (tmp_path / "dev/dri/card0").unlink()
    (tmp_path / "dev/dri/card0").symlink_to("renderD128")
    assert devices(gpu)["0000:23:00.0"].unusable == "/dev/dri/card0 is c:226:128, but the driver says c:226:0"
