"""Intel's GPUs, as its device plugin has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import HostPath, Mount
from tests.backends.gpus import backend, devices, given, nodes, offered, resource
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


@pytest.mark.parametrize(
    ("driver", "said"),
    [(None, "it has no driver; i915 or xe is needed"), ("vfio-pci", "it is bound to vfio-pci, not to i915 or xe")],
)
def test_without_its_driver_a_gpu_is_there_with_that_reason(tmp_path: Path, driver: str | None, said: str) -> None:
    gpu = backend(tmp_path, intel_gpu("0000:4d:00.0", 0, driver), I915)
    assert devices(gpu)["0000:4d:00.0"].unusable == said


def test_one_resource_may_have_gpus_of_several_vendors(tmp_path: Path) -> None:
    from tests.backends.machines import mi210_server, nvidia_gpu, uuid

    every = resource("example.com/gpu", pass_device_specs=True)
    gpu = backend(tmp_path, nvidia_gpu("0000:3b:00.0", 0) + mi210_server() + intel_gpu("0000:4d:00.0", 60, "xe"), every)
    edits = given(gpu, every, "0000:23:00.0", "0000:4d:00.0", uuid(0))
    assert edits.env == {"NVIDIA_VISIBLE_DEVICES": uuid(0)}
    assert {"/dev/kfd rw", "/dev/dri/card60 rw", "/dev/nvidia0 rw"} <= set(nodes(edits))
