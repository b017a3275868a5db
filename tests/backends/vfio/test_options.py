"""What a `vfio` resource may say."""

from __future__ import annotations

from typing import Any

import pytest

from backends.base import OptionsError, Resource, ResourceSpec, Selector
from backends.vfio import Vfio, VfioOptions

T4: Selector = {"id": ("10de:1eb8",)}


def complaints(*select: Selector, replicas: int = 1, **options: Any) -> list[tuple[tuple[str | int, ...], str]]:
    spec = ResourceSpec("vfio", VfioOptions(**options), select=select or (T4,), replicas=replicas)
    return raised(Resource("a/x", spec))


def raised(resource: Resource[VfioOptions]) -> list[tuple[tuple[str | int, ...], str]]:
    try:
        Vfio.check(resource)
    except OptionsError as error:
        return [(error.path, error.sentence)]
    except ExceptionGroup as group:
        return [(error.path, error.sentence) for error in group.exceptions if isinstance(error, OptionsError)]
    return []


@pytest.mark.parametrize(
    "options",
    [{}, {"bind": "start"}, {"bind": "allocate", "release": "restore", "force": ["0000:3b:00.0", "10000:e1:00.0"]}],
)
def test_what_is_right(options: dict[str, Any]) -> None:
    assert complaints(**options) == []


def test_a_resource_that_would_take_every_function_is_refused() -> None:
    ((path, sentence),) = raised(Resource("a/x", ResourceSpec("vfio", VfioOptions())))
    assert path == ("select",)
    assert 'as in select = { id = "10de:1eb8" }' in sentence


def test_a_function_cannot_be_shared() -> None:
    assert [path for path, _ in complaints(replicas=2)] == [("replicas",)]


def test_a_driver_that_bind_changes_can_be_in_no_name() -> None:
    spec = ResourceSpec("vfio", VfioOptions(bind="start"), select=(T4,))
    assert [path for path, _ in raised(Resource("a/{driver}", spec))] == [("name",)]
    assert raised(Resource("a/{device}", spec)) == []


@pytest.mark.parametrize("bind", ["never", "start"])
def test_what_is_not_bound_for_a_pod_is_not_given_back(bind: str) -> None:
    assert [path for path, _ in complaints(bind=bind, release="restore")] == [("release",)]


def test_a_vgpu_type_that_cannot_be_given_is_refused() -> None:
    assert complaints(vgpu_type=558) == []
    assert [path for path, _ in complaints(vgpu_type=0)] == [("vgpu_type",)]
    assert "never bound" in complaints(vgpu_type=558, bind="start")[0][1]
    assert "selected or named by" in complaints({"vgpu_type": ("558",)}, vgpu_type=558)[0][1]
    wanted = Resource("a/x", ResourceSpec("vfio", VfioOptions(vgpu_type=558), select=(T4,), pre_start="reset"))
    assert "the driver alone resets" in raised(wanted)[0][1]


def test_force_is_for_what_is_bound_and_names_addresses() -> None:
    assert [path for path, _ in complaints(force=["0000:3b:00.0"])] == [("force",)]
    assert [path for path, _ in complaints(bind="start", force=["0000:3b:00.0", "3b:00.0"])] == [("force", 1)]


def test_a_driver_that_bind_would_take_away_cannot_be_what_selects() -> None:
    ((path, sentence),) = complaints(T4, {"driver": ("nvme",)}, bind="allocate")
    assert path == ("select", 1, "driver")
    assert sentence == "is nvme, which bind would change: nothing would be selected any more; add vfio-pci"
    assert complaints({"driver": ("nvme", "vfio-pci")}, bind="allocate") == []
    assert complaints({"driver": ("nvme",)}) == []


def test_all_that_is_wrong_is_told_at_once() -> None:
    assert len(complaints(replicas=3, release="restore", force=["x"])) == 4
