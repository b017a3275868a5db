"""IOMMU groups as sysfs shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.linux import iommu
from tests.backends.pci_trees import function
from tests.backends.trees import planted_host

GPU, SOUND, BRIDGE = "0000:3b:00.0", "0000:3b:00.1", "0000:3a:00.0"


def group(tmp_path: Path, tree: str, unit: str = "12") -> iommu.Group:
    found = iommu.read(planted_host(tmp_path, tree), unit)
    assert found is not None
    return found


def offenders(found: iommu.Group) -> list[str]:
    return [member.name for member in found.members if not member.is_viable]


def test_a_bridge_is_a_member_and_nothing_to_hand_out(tmp_path: Path) -> None:
    found = group(tmp_path, function(GPU, group=12) + function(BRIDGE, kind="060400", driver="shpchp", group=12))
    assert [member.name for member in found.members] == [BRIDGE, GPU]
    assert [one.address for one in found.functions] == [GPU]
    assert offenders(found) == []


@pytest.mark.parametrize(
    "driver",
    [None, "vfio-pci", "mlx5_vfio_pci", "nvgrace_gpu_vfio_pci", "nvgrace-gpu-vfio-pci", "pci-stub", "pcieport"],
)
def test_a_member_on_these_drivers_lets_the_group_be_handed_out(tmp_path: Path, driver: str | None) -> None:
    assert offenders(group(tmp_path, function(GPU, driver=driver, group=12))) == []


@pytest.mark.parametrize("driver", ["nvidia", "nvme", "vfio", "my-vfio-pci-like", "uio_pci_generic"])
def test_a_member_on_another_driver_does_not(tmp_path: Path, driver: str) -> None:
    assert offenders(group(tmp_path, function(GPU, driver=driver, group=12))) == [GPU]


def test_a_variant_driver_of_any_name_is_known_by_what_it_made(tmp_path: Path) -> None:
    assert offenders(group(tmp_path, function(GPU, driver="exotic", vfio=["vfio0"], group=12))) == []


def test_a_member_on_another_bus_counts_too(tmp_path: Path) -> None:
    tree = function(GPU, group=12) + (
        "sys/kernel/iommu_groups/12/devices/fd000000.dma -> ../../../../devices/platform/fd000000.dma\n"
        "sys/devices/platform/fd000000.dma/driver -> ../../../bus/platform/drivers/dma-axi\n"
    )
    found = group(tmp_path, tree)
    assert [one.address for one in found.functions] == [GPU]
    assert offenders(found) == ["fd000000.dma"]


def test_units_are_groups_and_functions_without_one(tmp_path: Path) -> None:
    tree = (
        function(GPU, group=12)
        + function(SOUND, group=12)
        + function("0000:40:00.0")
        + function("0000:41:00.0", group=3)
    )
    host = planted_host(tmp_path, tree + "sys/kernel/iommu_groups/3/name = vfio-noiommu\n")
    assert sorted(iommu.units(host)) == ["0000:40:00.0", "0000:41:00.0", "12"]


def test_a_function_without_an_iommu_is_its_own_unit_before_and_after_vfio_makes_it_a_group(tmp_path: Path) -> None:
    without = group(tmp_path / "a", function(GPU), GPU)
    assert (without.number, without.is_noiommu, without.name) == ("", False, "no IOMMU group")
    tree = function(GPU, group=3) + "sys/kernel/iommu_groups/3/name = vfio-noiommu\n"
    made = group(tmp_path / "b", tree, GPU)
    assert (made.number, made.is_noiommu) == ("3", True)
    assert iommu.read(planted_host(tmp_path / "b"), "3") is None


def test_what_is_gone_is_none(tmp_path: Path) -> None:
    host = planted_host(tmp_path, function(GPU, group=12))
    assert iommu.read(host, "13") is None
    assert iommu.read(host, "0000:99:00.0") is None
    assert iommu.read(host, "../12") is None
    assert iommu.read(host, GPU) is None  # it is in a group of its own number
    assert list(iommu.units(planted_host(tmp_path / "nothing"))) == []


# The lines are those that Linux prints (arch/*/kernel), their values real: only the first that tell are here.
CPUS = {
    "processor\t: 0\\nvendor_id\t: GenuineIntel": "turn VT-d on in the firmware, and write intel_iommu=on",
    "processor\t: 0\\nvendor_id\t: AuthenticAMD": "turn AMD-Vi (IOMMU) on in the firmware; the kernel uses it",
    "processor\t: 0\\nvendor_id\t: GenuineIntel\\nflags\t\t: fpu vme hypervisor lahf_lm": "this is a virtual machine",
    "processor\t: 0\\ncpu\t\t: POWER8 (raw), altivec supported": "POWER's is always on",
    "processor\t: 0\\nBogoMIPS\t: 50.00\\nCPU implementer\t: 0x41": "the firmware must tell the kernel of an SMMU",
    "vendor_id       : IBM/S390": "s390x has one for each PCI function",
    "": "turn the IOMMU on, in the firmware",
}


@pytest.mark.parametrize(("cpuinfo", "said"), CPUS.items())
def test_how_the_iommu_is_turned_on_depends_on_the_machine(tmp_path: Path, cpuinfo: str, said: str) -> None:
    host = planted_host(tmp_path, f"proc/cpuinfo = {cpuinfo}\nproc/cmdline = quiet")
    assert iommu.how_to_turn_on(host).startswith(said)


def test_what_turns_the_iommu_off_is_named(tmp_path: Path) -> None:
    host = planted_host(tmp_path, "proc/cpuinfo = vendor_id\t: AuthenticAMD\nproc/cmdline = quiet amd_iommu=off")
    assert iommu.how_to_turn_on(host).startswith("take amd_iommu=off off the kernel's command line; turn AMD-Vi")
