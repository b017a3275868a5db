"""One PCI function as sysfs shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.base import AllocationRefused, Device, Host, HostPath, Known, PathChange, Uevent
from backends.linux import pci
from tests.backends.kernel_calls import kernel_calls
from tests.backends.pci_trees import function
from tests.backends.trees import plant, planted_host

GPU = "0000:3b:00.0"
BELOW = "pci0000:3a/0000:3a:00.0/0000:39:01.0"


def one(tmp_path: Path, **more: object) -> pci.Function:
    found = pci.read(planted_host(tmp_path, function(GPU, below=BELOW, **more)), GPU)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_function_is_read_whole(tmp_path: Path) -> None:
    found = one(
        tmp_path,
        driver="nvidia",
        numa_node=1,
        group=42,
        virtual=["0000:3b:00.1", "0000:3b:00.2"],
        drm=["card0", "renderD128"],
        files={"boot_vga": "1"},
    )
    assert (found.vendor, found.device, found.kind) == ("10de", "2330", "030200")
    assert found.ids == "10de:2330 10de:16c1"
    assert found.driver == "nvidia"
    assert found.numa_node == 1
    assert found.ancestry == ("pci0000:3a", "0000:3a:00.0", "0000:39:01.0")
    assert found.iommu_group == "42"
    assert found.virtual == ("0000:3b:00.1", "0000:3b:00.2")
    assert found.drm == ("card0", "renderD128")
    assert found.boot_display
    assert not found.problems


@pytest.mark.parametrize(("text", "only"), [("(null)", None), ("", None), ("vfio-pci", "vfio-pci")])
def test_the_only_driver_that_may_have_it(tmp_path: Path, text: str, only: str | None) -> None:
    assert pci.driver_override(planted_host(tmp_path, function(GPU, files={"driver_override": text})), GPU) == only


@pytest.mark.parametrize("name", ["driver_override", "sriov_numvfs"])
def test_reading_does_not_wait_until_the_kernel_has_bound_a_driver(tmp_path: Path, name: str) -> None:
    """A look at one function would keep the looks at all others waiting, which igb made for two seconds."""
    tree = function(GPU, driver="nvidia", virtual=["0000:3b:00.1"])
    host = planted_host(tmp_path, tree)
    os.mkfifo(tmp_path / f"sys/devices/pci0000:00/{GPU}/{name}")  # opening it waits for ever
    assert pci.read(host, GPU) is not None


def test_what_is_missing_is_unknown_and_no_problem(tmp_path: Path) -> None:
    plant(tmp_path, f"sys/bus/pci/devices/{GPU} -> ../../../devices/pci0000:3a/{GPU}\nsys/devices/pci0000:3a/{GPU}/")
    found = pci.read(planted_host(tmp_path), GPU)
    assert found is not None
    assert (found.vendor, found.kind, found.driver, found.numa_node, found.iommu_group) == ("", "", None, None, None)
    assert found.attributes() == {"address": (GPU,), "function": ("physical",)}
    assert not found.problems


def test_garbage_is_a_problem_of_that_function(tmp_path: Path) -> None:
    host = planted_host(tmp_path, function(GPU))
    host.local(pci.FUNCTIONS / GPU / "uevent").write_bytes(b"PCI_ID=\xff\xfe\nPCI_CLASS=zebra\n=\n\0\0\0")
    found = pci.read(host, GPU)
    assert found is not None
    assert (found.vendor, found.kind) == ("", "")
    assert [problem.subject for problem in found.problems] == [GPU, GPU]


def test_a_function_that_is_gone_is_none(tmp_path: Path) -> None:
    assert pci.read(planted_host(tmp_path), GPU) is None


def test_only_addresses_are_listed(tmp_path: Path) -> None:
    host = planted_host(tmp_path, function(GPU) + function("10000:e1:00.0") + "sys/bus/pci/devices/readme = 1\n")
    assert pci.addresses(host) == [GPU, "10000:e1:00.0"]


def test_a_virtual_function_names_its_physical_one(tmp_path: Path) -> None:
    found = one(tmp_path, physical="0000:3b:00.7")
    assert found.physical == "0000:3b:00.7"
    assert found.attributes()["function"] == ("virtual",)


def uevent(path: str, subsystem: str = "pci") -> Uevent:
    return Uevent("change", subsystem, path)


def test_an_event_names_the_function_it_is_about() -> None:
    assert pci.affected(uevent(f"/devices/{BELOW}/{GPU}"), Known()) == {GPU}
    assert pci.affected(uevent(f"/devices/{BELOW}/{GPU}/drm/card0", "drm"), Known()) == {GPU}
    assert pci.affected(uevent("/devices/virtual/net/lo", "net"), Known()) == frozenset()
    assert pci.affected(PathChange(HostPath("/dev/nvidia0")), Known()) == frozenset()


def test_a_bridges_event_concerns_what_is_below_it() -> None:
    device = Device(GPU, GPU, frozenset({f"pci:{GPU}", f"rdma:{GPU}"}), ancestry=("pci0000:3a", "0000:3a:00.0"))
    assert pci.affected(uevent("/devices/pci0000:3a/0000:3a:00.0"), Known({GPU: (device,)})) == {GPU, "0000:3a:00.0"}


def resettable(tmp_path: Path, methods: str | None) -> Host:
    files = {"reset": "0"} | ({} if methods is None else {"reset_method": methods})
    return planted_host(tmp_path, function(GPU, files=files))


@pytest.mark.parametrize("methods", ["flr", "flr bus", None])
def test_a_function_is_reset_and_its_methods_stay_as_they_were(tmp_path: Path, methods: str | None) -> None:
    host = resettable(tmp_path, methods)
    pci.reset(host, GPU)
    assert host.local(pci.FUNCTIONS / GPU / "reset").read_text() == "1"
    if methods is not None:
        assert host.local(pci.FUNCTIONS / GPU / "reset_method").read_text().strip() == methods


@pytest.mark.parametrize(("methods", "said"), [("bus pm", "only by bus pm"), ("", "at all")])
def test_a_function_is_never_reset_with_its_neighbours(tmp_path: Path, methods: str, said: str) -> None:
    host = resettable(tmp_path, methods)
    with pytest.raises(AllocationRefused, match=said):
        pci.reset(host, GPU)
    assert host.local(pci.FUNCTIONS / GPU / "reset").read_text().strip() == "0"


def test_a_function_is_never_reset_while_it_has_virtual_ones(tmp_path: Path) -> None:
    files = {"reset_method": "flr", "reset": ""}
    host = planted_host(tmp_path, function(GPU, virtual=["0000:3b:00.4"], files=files))
    with pytest.raises(AllocationRefused, match="has 1 virtual function, which would go"):
        pci.reset(host, GPU)
    assert host.local(pci.FUNCTIONS / GPU / "reset").read_text() == "\n"


def test_a_reset_that_fails_is_a_sentence(tmp_path: Path) -> None:
    host = planted_host(tmp_path, function(GPU, files={"reset_method": "flr"}))
    host.local(pci.FUNCTIONS / GPU / "reset").mkdir()
    with pytest.raises(AllocationRefused, match="could not be reset before its use: is a directory"):
        pci.reset(host, GPU)


def test_a_hundred_functions_are_read_with_few_calls_each(tmp_path: Path) -> None:
    plan = [f"0000:{bus:02x}:{slot:02x}.0" for bus in range(1, 11) for slot in range(10)]
    host = planted_host(tmp_path, "".join(function(a, driver="vfio-pci", group=n) for n, a in enumerate(plan)))

    def read_all() -> list[pci.Function | None]:
        return [pci.read(host, address) for address in pci.addresses(host)]

    assert len(read_all()) == len(plan)
    assert kernel_calls(read_all) <= 14 * len(plan)
