"""A PCI function is bound as it is, whichever backend looks: what was latched under one ends or stays under another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.health import HealthBook
from agent.health.drains import FAILURES
from backends.base import Backend, Record
from backends.gpu import Gpu
from backends.infiniband import InfiniBand
from backends.linux import pci
from backends.vfio import Vfio
from tests.backends.gpu import gpus
from tests.backends.infiniband.test_backend import resource as rdma_resource
from tests.backends.machines import CONTROLS, nvidia_gpu
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import adapter
from tests.backends.trees import planted_host
from tests.backends.vfio import vfio_node
from tests.backends.vfio.vfio_node import BUS

H100, SOUND, HCA, SECOND = "0000:3b:00.0", "0000:3b:00.1", "0000:86:00.0", "0000:86:00.1"
GROUPS = "".join(
    f"sys/kernel/iommu_groups/{group}/devices/{address} -> ../../../../devices/pci0000:00/{address}\n"
    f"sys/devices/pci0000:00/{address}/iommu_group -> ../../../kernel/iommu_groups/{group}\n"
    for address, group in ((HCA, 7), (SECOND, 7))
)
TREE = (
    BUS
    + CONTROLS
    + nvidia_gpu(H100, 0)
    + function(SOUND, "10de:10f8", kind="040300", driver="snd_hda_intel", group=0)
    + adapter("mlx5_0", HCA)
    + adapter("mlx5_1", SECOND, number=1)
    + GROUPS
)
XID = Record("kmsg", "", 1, 0.0, f"NVRM: Xid (PCI:{H100[:-2]}): 79, GPU has fallen off the bus.")


@pytest.fixture
def backends(tmp_path: Path) -> dict[str, Backend[Any]]:
    """All that know PCI functions, on one machine, each of them offering everything."""
    host = planted_host(tmp_path, TREE)
    either = ({"id": ("10de:2330",)}, {"vendor": ("15b3",)})
    return {
        "gpu": Gpu(host, [gpus.resource()]),
        "vfio": Vfio(host, [vfio_node.resource("a.example/any", *either, bind="allocate", companions="group")]),
        "infiniband": InfiniBand(host, [rdma_resource()]),
    }


def bindings(backend: Backend[Any]) -> dict[str, str]:
    devices = (device for unit in backend.units() for device in backend.discover(unit).devices)
    return {name: binding for device in devices for name, binding in device.bindings.items()}


def bind_anew(backend: Backend[Any], address: str) -> None:
    link = backend.host.local(pci.FUNCTIONS / address / "driver")
    link.rename(link.with_name("was"))  # a kernel never gives its inode out again, this file system might
    link.symlink_to(link.with_name("was").readlink())


def look(book: HealthBook, backends: Mapping[str, Backend[Any]], kinds: Iterable[str], now: float) -> None:
    for kind in kinds:
        backend = backends[kind]
        book.found(kind, {unit: backend.discover(unit).devices for unit in backend.units()}, now)


def test_all_backends_see_a_function_bound_alike_and_each_function_by_itself(
    backends: dict[str, Backend[Any]],
) -> None:
    seen = {kind: bindings(backend) for kind, backend in backends.items()}
    assert seen["vfio"].keys() == {f"pci:{address}" for address in (H100, SOUND, HCA, SECOND)}
    assert len({*seen["vfio"].values()}) == 4, "also in one group"
    assert seen["gpu"] == {f"pci:{H100}": seen["vfio"][f"pci:{H100}"]}
    for address in (HCA, SECOND):
        both = {seen["infiniband"][f"{kind}:{address}"] for kind in ("pci", "rdma")}
        assert both == {seen["vfio"][f"pci:{address}"]}


def test_without_a_driver_no_backend_sees_a_binding(backends: dict[str, Backend[Any]]) -> None:
    for address in (H100, HCA):
        backends["gpu"].host.local(pci.FUNCTIONS / address / "driver").unlink()
    for backend in backends.values():
        assert bindings(backend).keys().isdisjoint({f"pci:{H100}", f"pci:{HCA}", f"rdma:{HCA}"})


@pytest.mark.parametrize(
    ("anew", "reason"), [(H100, ""), (SOUND, "xid-79"), (None, "xid-79")], ids=["it", "its companion", "nothing"]
)
def test_what_was_latched_for_gpu_ends_under_vfio_alone_if_its_driver_was_bound_anew(
    backends: dict[str, Backend[Any]], anew: str | None, reason: str
) -> None:
    before, after = HealthBook(), HealthBook()
    look(before, backends, ["gpu"], 0.0)
    before.recorded(backends["gpu"].signals(XID), XID, 1.0)
    if anew is not None:
        bind_anew(backends["vfio"], anew)
    after.restore(before.kept(), 2.0, 2.0)
    look(after, backends, ["vfio"], 3.0)
    assert after.of(f"pci:{H100}").reason == reason


def test_a_group_that_nobody_selects_is_bound_as_well(tmp_path: Path) -> None:
    tree = vfio_node.gpu() + vfio_node.sound()
    found = vfio_node.backend(tmp_path, tree, vfio_node.resource("a.example/other", {"id": ("dead:beef",)}))
    assert bindings(found).keys() == {f"pci:{vfio_node.GPU}", f"pci:{vfio_node.SOUND}"}


def found(book: HealthBook, kind: str, backend: Backend[Any], now: float) -> list[str]:
    """Have the book told what is there; the functions that can be had."""
    looks = {unit: backend.discover(unit) for unit in {*backend.units(), H100}}
    beside = {unit: look.beside for unit, look in looks.items()}
    book.found(kind, {unit: look.devices for unit, look in looks.items()}, now, beside=beside)
    return [device.key for look in looks.values() for device in look.devices if not device.unusable]


@pytest.mark.parametrize("selector", [{"id": ("10de:2330",)}, {"driver": ("nvidia",)}, {"driver": ("vfio-pci",)}])
def test_a_function_that_is_lent_to_virtual_machines_over_and_over_has_not_gone(
    tmp_path: Path, selector: Mapping[str, tuple[str, ...]]
) -> None:
    host, book, had = planted_host(tmp_path, TREE), HealthBook(), set[str]()
    vfio = Vfio(host, [vfio_node.resource("a.example/any", selector, companions="group")])
    link = host.local(pci.FUNCTIONS / H100 / "driver")
    for n in range(20):
        had.update(found(book, "vfio", vfio, 2.0 * n))
        link.unlink()
        link.symlink_to(link.parent.parent / ("nvidia" if n % 2 else "vfio-pci"))
    assert had
    assert book.of(f"pci:{H100}").reason == ""


def test_a_gpu_that_is_pulled_out_and_put_in_over_and_over_flaps(tmp_path: Path) -> None:
    host, book = planted_host(tmp_path, TREE), HealthBook()
    gpu, link = Gpu(host, [gpus.resource()]), host.local(pci.FUNCTIONS / H100)
    for n in range(FAILURES):
        assert found(book, "gpu", gpu, 2.0 * n) != []
        link.rename(tmp_path / "out")
        assert found(book, "gpu", gpu, 2.0 * n + 1) == []
        (tmp_path / "out").rename(link)
    assert book.of(f"pci:{H100}").reason == ""
    found(book, "gpu", gpu, 2.0 * FAILURES)
    assert book.of(f"pci:{H100}").reason == "flapping"
