"""Intel's GPUs, as its device plugin has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import HostPath, Known, Mount, PathChange
from tests.backends.gpu.gpus import backend, devices, given, look, nodes, offered, resource
from tests.backends.machines import flex_server, intel_gpu
from tests.backends.pci_trees import function

BELOW = "pci0000:6f/0000:6f:01.0"


I915 = resource("gpu.intel.com/i915", select={"vendor": ("8086",), "driver": ("i915",)})
XE = resource("gpu.intel.com/xe", select={"vendor": ("8086",), "driver": ("xe",)})


def test_each_driver_has_its_resource(tmp_path: Path) -> None:
    found = devices(backend(tmp_path, flex_server(), I915, XE))
    assert (I915.refuses(found["0000:4d:00.0"]), XE.refuses(found["0000:5e:00.0"])) == (None, None)
    assert I915.refuses(found["0000:5e:00.0"]) == "driver is xe, not i915"


def test_what_a_container_gets(tmp_path: Path) -> None:
    edits = given(backend(tmp_path, flex_server(), I915, XE), I915, "0000:4d:00.0")
    assert nodes(edits) == ["/dev/dri/card0 rw", "/dev/dri/renderD128 rw"]
    paths = [f"/dev/dri/by-path/pci-0000:4d:00.0-{kind}" for kind in ("card", "render")]
    assert edits.mounts == tuple(Mount(HostPath(path), path, read_only=True) for path in paths)
    assert edits.env == {}


def test_a_gpu_that_is_divided_is_left_out(tmp_path: Path) -> None:
    gpu = backend(tmp_path, flex_server(), I915, XE)
    assert offered(gpu) == ["0000:4d:00.0", "0000:5e:00.0"]
    assert devices(gpu)["0000:6f:00.0"].unusable.startswith("it is divided into 2 virtual functions")


def test_a_virtual_function_is_as_well_as_the_card_it_is_a_part_of(tmp_path: Path) -> None:
    files = {"class": "0x038000", "vendor": "0x8086"}
    whole = intel_gpu("0000:6f:00.0", 0, "xe", virtual=1)
    part = function("0000:6f:00.1", "8086:56c0", below=BELOW, driver="xe", physical="0000:6f:00.0", files=files)
    found = devices(backend(tmp_path, whole + part, XE))
    assert found["0000:6f:00.1"].depends == found["0000:6f:00.0"].hardware


def test_ids_do_not_follow_the_order_of_drivers(tmp_path: Path) -> None:
    """Intel's plugin names the first card card0, whichever that is this time."""
    one = offered(backend(tmp_path / "a", intel_gpu("0000:4d:00.0", 0, "xe") + intel_gpu("0000:5e:00.0", 1, "xe")))
    other = offered(backend(tmp_path / "b", intel_gpu("0000:4d:00.0", 1, "xe") + intel_gpu("0000:5e:00.0", 0, "xe")))
    assert one == other == ["0000:4d:00.0", "0000:5e:00.0"]


def test_ids_are_those_of_intels_plugin_where_asked(tmp_path: Path) -> None:
    named = resource("gpu.intel.com/i915", replicas=2, select={"driver": ("i915",)}, card_ids=True)
    gpu = backend(tmp_path, flex_server(first=3), named)
    assert list(gpu.ids(named, devices(gpu)["0000:4d:00.0"])) == ["card3-0", "card3-1"]
    assert nodes(given(gpu, named, "card3-1")) == ["/dev/dri/card3 rw", "/dev/dri/renderD131 rw"]


@pytest.mark.parametrize(("by_path", "mounted"), [("all", ["/dev/dri/by-path"]), ("none", [])])
def test_the_links_may_be_all_or_none(tmp_path: Path, by_path: str, mounted: list[str]) -> None:
    wanted = resource("gpu.intel.com/i915", by_path=by_path)
    edits = given(backend(tmp_path, flex_server(), wanted), wanted, "0000:4d:00.0")
    assert edits.mounts == tuple(Mount(HostPath(path), path, read_only=True) for path in mounted)


MEI = "sys/devices/pci0000:4d/0000:4d:01.0/0000:4d:00.0/i915.mei-gsc.19712/mei/mei1"


@pytest.mark.parametrize(
    ("drivers", "expected"),
    [
        (("i915",), ["dri/card0", "dri/renderD128", "mei1"]),
        (("xe",), ["dri/card1", "dri/renderD129"]),
        (("i915", "xe"), ["dri/card0", "dri/renderD128", "mei1", "dri/card1", "dri/renderD129"]),
    ],
)
def test_a_monitoring_resource_has_one_device_with_the_nodes_of_all_gpus(
    tmp_path: Path, drivers: tuple[str, ...], expected: list[str]
) -> None:
    """As with Intel's `-enable-monitoring`, and its `-monitoring-mode` split or single. Pods keep their GPUs beside it."""
    watcher = resource("gpu.intel.com/monitoring", select={"vendor": ("8086",), "monitoring": drivers})
    mei = f"{MEI}/dev = 238:1\n{MEI}/uevent = MAJOR=238\\nMINOR=1\\nDEVNAME=mei1\ndev/mei1 c 238:1\n"
    gpu = backend(tmp_path, flex_server() + mei, watcher, I915, XE)
    found = devices(gpu)
    assert [key for key, device in found.items() if watcher.refuses(device) is None] == ["all"]
    assert nodes(given(gpu, watcher, "all")) == [f"/dev/{name} rw" for name in expected]
    assert found["all"].resource == watcher.name
    assert all(node.shared for node in found["all"].nodes)
    assert not found["all"].hardware & found["0000:4d:00.0"].hardware
    known = Known({unit: it.devices for unit, it in look(gpu).items()})
    assert "intel-monitoring" in gpu.affects(PathChange(HostPath("/dev/dri/card7")), known)
    (tmp_path / "dev/dri/card0").unlink()
    assert [s.reason for s in gpu.probe(found["all"])] == ["node-missing"] * ("i915" in drivers)


def test_one_resource_may_have_gpus_of_several_vendors(tmp_path: Path) -> None:
    from tests.backends.machines import mi210_server, nvidia_gpu, uuid

    every = resource("example.com/gpu", pass_device_specs=True)
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0) + mi210_server() + intel_gpu("0000:4d:00.0", 60, "xe"), every)
    edits = given(gpu, every, "0000:23:00.0", "0000:4d:00.0", uuid(0))
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": uuid(0)}
    assert {"/dev/kfd rw", "/dev/dri/card60 rw", "/dev/nvidia0 rw"} <= set(nodes(edits))
