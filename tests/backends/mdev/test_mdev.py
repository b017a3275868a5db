"""The backend `mdev`: what is found, how it is, what a virtual machine gets, what an event is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.claims.ledger import leads_to
from agent.inventory.inventory import Inventory
from backends.base import Grant, Hint, HostPath, Known, LinkChange, PathChange, Uevent, Verdict
from backends.mdev import Mdev
from backends.vfio import Vfio
from tests.backends.mdev.mdev_trees import (
    FIRST,
    I915_PATH,
    MATRIX_PATH,
    MTTY_PATH,
    OTHER_T4,
    SECOND,
    T4,
    T4_BELOW,
    T4_PATH,
    T4_TYPES,
    backend,
    devices,
    i915,
    made,
    mtty,
    only,
    parent,
    resource,
    t4,
    vfio_ap,
)
from tests.backends.pci_trees import function
from tests.backends.vfio import vfio_node

VGPU = made(T4_PATH, FIRST, "nvidia-230", 77)


def paths(found: Mdev) -> list[tuple[str, str, str]]:
    return [(str(node.path), node.container_path, node.permissions) for node in only(found).nodes]


# --- what is found ---


def test_a_vgpu_is_offered_as_kubevirt_offers_it_but_by_its_uuid(tmp_path: Path) -> None:
    found = backend(tmp_path, t4() + VGPU)
    device = only(found)
    (wanting,) = found.resources
    assert (device.key, found.ids(wanting, device), device.unit, device.numa_node) == (FIRST, (FIRST,), T4, 0)
    assert wanting.refuses(device) is None
    edits = found.edits(wanting, [Grant(FIRST, device)])
    assert edits.env == {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q": FIRST}
    assert [(str(node.path), node.container_path, node.permissions) for node in edits.nodes] == [
        ("/dev/vfio/vfio", "/dev/vfio/vfio", "mrw"),
        ("/dev/vfio/77", "/dev/vfio/77", "mrw"),
    ]
    assert [*found.probe(device)] == []


def test_several_are_named_in_the_order_of_their_ids_and_vfios_own_node_is_there_once(tmp_path: Path) -> None:
    found = backend(tmp_path, t4() + VGPU + made(T4_PATH, SECOND, "nvidia-230", 78))
    edits = found.edits(found.resources[0], [Grant(device.key, device) for device in devices(found)])
    assert edits.env == {"MDEV_PCI_RESOURCE_NVIDIA_COM_GRID_T4-1Q": f"{FIRST},{SECOND}"}
    assert [node.path.name for node in edits.nodes] == ["vfio", "77", "78"]


@pytest.mark.parametrize(
    "written",
    ["GRID T4-1Q", "GRID_T4-1Q", "grid t4-1q", "nvidia-230"],
)
def test_a_type_is_selected_by_its_name_with_or_without_spaces_or_by_its_id(tmp_path: Path, written: str) -> None:
    found = backend(tmp_path, t4() + VGPU, resource("a.com/vgpu", {"type": (written,)}))
    assert found.resources[0].refuses(only(found)) is None


def test_a_template_makes_a_resource_of_each_type(tmp_path: Path) -> None:
    tree = t4() + VGPU + made(T4_PATH, SECOND, "nvidia-222", 78)
    found = backend(tmp_path, tree, resource("nvidia.com/{type_name}", {"parent": (T4,)}))
    inventory = Inventory(found.resources, {"mdev": found})
    inventory.update("mdev", {unit: found.discover(unit).devices for unit in found.units()})
    assert inventory.names() == ["nvidia.com/GRID_T4-1B", "nvidia.com/GRID_T4-1Q"]


@pytest.mark.parametrize(
    ("tree", "path", "kind", "name"),
    [
        (i915(), I915_PATH, "i915-GVTg_V5_4", "i915-GVTg_V5_4"),
        (mtty(), MTTY_PATH, "mtty-2", "Dual_port_serial"),
        (vfio_ap(), MATRIX_PATH, "vfio_ap-passthrough", "VFIO_AP_Passthrough_Device"),
    ],
    ids=["a GPU without a NUMA node, whose types have no names", "the kernel's sample", "s390's crypto cards"],
)
def test_other_parents_are_known_too(tmp_path: Path, tree: str, path: str, kind: str, name: str) -> None:
    found = backend(tmp_path, tree + made(path, FIRST, kind, 5))
    device = only(found)
    assert (device.attributes["type_name"], device.attributes["type_id"]) == ((name,), (kind,))
    assert (device.unit, device.numa_node, device.unusable) == (path.rpartition("/")[2], None, "")
    assert device.depends == ({"pci:0000:00:02.0"} if path == I915_PATH else set())
    assert [*found.probe(device)] == []


def test_one_of_a_virtual_function_depends_on_the_physical_one_too(tmp_path: Path) -> None:
    virtual = f"{T4_BELOW}/0000:3b:00.4"
    tree = function("0000:3b:00.4", "10de:2235", below=T4_BELOW, driver="nvidia", physical=T4, numa_node=1)
    found = backend(tmp_path, t4() + tree + parent(virtual, T4_TYPES) + made(virtual, FIRST, "nvidia-230", 77))
    device = only(found)
    assert device.depends == {"pci:0000:3b:00.4", f"pci:{T4}"}
    assert device.numa_node == 1


def test_one_that_lies_on_the_bus_alone_is_found_without_its_parents_class(tmp_path: Path) -> None:
    found = backend(tmp_path, t4() + VGPU)
    (tmp_path / f"sys/class/mdev_bus/{T4}").unlink()
    assert only(found).key == FIRST


def test_what_was_made_again_as_another_type_is_another_device_at_the_same_id(tmp_path: Path) -> None:
    before = only(backend(tmp_path / "a", t4() + VGPU))
    after = only(backend(tmp_path / "b", t4() + VGPU.replace("nvidia-230", "nvidia-222")))
    assert before.identity != after.identity


# --- garbage ---


def test_one_without_a_type_is_left_out_and_told_and_the_others_stay(tmp_path: Path) -> None:
    found = backend(tmp_path, t4() + VGPU + made(T4_PATH, SECOND, "nvidia-230", 78))
    (tmp_path / f"sys/devices/{T4_PATH}/{SECOND}/mdev_type").unlink()
    seen = found.discover(T4)
    assert [device.key for device in seen.devices] == [FIRST]
    assert [problem.subject for problem in seen.problems] == [SECOND]


@pytest.mark.parametrize("name", [b"", b"\n", b"\x1b[2Jvgpu", b"a\x00b", b"GRID\nT4"])
def test_a_type_whose_name_is_garbage_goes_by_its_id(tmp_path: Path, name: bytes) -> None:
    found = backend(tmp_path, t4() + VGPU)
    (tmp_path / f"sys/devices/{T4_PATH}/mdev_supported_types/nvidia-230/name").write_bytes(name)
    assert only(found).attributes["type_name"] == ("nvidia-230",)


# --- how it is ---


def test_one_that_no_vfio_driver_has_is_not_offered_and_says_so(tmp_path: Path) -> None:
    found = backend(tmp_path, t4() + made(T4_PATH, FIRST, "nvidia-230", None))
    assert only(found).unusable == "it is in no IOMMU group: no vfio driver has it (yet)"


def test_it_is_as_well_as_its_node_and_its_parent(tmp_path: Path) -> None:
    found = backend(tmp_path, t4() + VGPU)
    device = only(found)
    (tmp_path / "dev/vfio/77").unlink()
    (tmp_path / f"sys/devices/{T4_PATH}/config").write_bytes(b"\xff" * 64)
    assert [(signal.hardware, signal.reason, signal.verdict) for signal in found.probe(device)] == [
        (f"mdev:{FIRST}", "node-missing", Verdict.NOW),
        (f"pci:{T4}", "off-bus", Verdict.NOW),
    ]
    assert f"pci:{T4}" in device.depends


# --- whose it is ---


def test_vfio_never_takes_one(tmp_path: Path) -> None:
    """Nor the IOMMU group that it is alone in."""
    found = backend(tmp_path, t4() + VGPU)
    other = Vfio(found.host, [vfio_node.resource("a.com/all", {"vendor": ("10de",)}, bind="allocate")])
    seen = [device for unit in (*other.units(), "77") for device in other.discover(unit).devices]
    assert [(device.key, device.unit) for device in seen] == [(T4, "12")]
    assert "has the virtual GPU" in seen[0].unusable


def test_a_pod_that_kubevirts_own_plugin_gave_one_to_is_found_by_its_uuid_or_its_node(tmp_path: Path) -> None:
    """Its IDs were numbers of groups."""
    leads = leads_to([only(backend(tmp_path, t4() + VGPU))])
    assert leads[FIRST] == leads["/dev/vfio/77"] == {f"mdev:{FIRST}"}
    assert "/dev/vfio/vfio" not in leads


# --- events ---


@pytest.mark.parametrize(
    ("hint", "units"),
    [
        (Uevent("add", "mdev", f"/devices/{T4_PATH}/{SECOND}"), {T4}),
        (Uevent("bind", "mdev", f"/devices/{MATRIX_PATH}/{SECOND}"), {"matrix"}),
        (Uevent("unbind", "pci", f"/devices/{T4_PATH}"), {T4}),
        (Uevent("change", "pci", f"/devices/pci0000:5d/{OTHER_T4}"), set()),
        (Uevent("change", "pci", f"/devices/pci0000:5d/{OTHER_T4}", None, {"MDEV_STATE": "registered"}), {OTHER_T4}),
        (Uevent("add", "vfio", "/devices/virtual/vfio/77", HostPath("/dev/vfio/77")), {T4}),
        (PathChange(HostPath("/dev/vfio/77")), {T4}),
        (PathChange(HostPath("/dev/vfio")), {T4}),
        (PathChange(HostPath("/dev/vfio/12")), set()),
        (LinkChange("eth0", 2), set()),
    ],
)
def test_an_event_is_about_the_parents_that_it_concerns(tmp_path: Path, hint: Hint, units: set[str]) -> None:
    found = backend(tmp_path, t4() + VGPU)
    known = Known({unit: found.discover(unit).devices for unit in found.units()})
    seen = found.affects(hint, known)
    assert isinstance(seen, (set, tuple, list))
    assert set(seen) == units
