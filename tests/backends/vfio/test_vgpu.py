"""A virtual function that NVIDIA's driver has given a vGPU type is offered as it is; whatever virtual GPUs a driver has
made of a function, it is never bound to vfio-pci, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.inventory.inventory import Inventory
from backends.base import AllocationRefused, Grant, NotReady, Selector, Verdict
from backends.gpu import Gpu
from backends.vfio import Vfio
from tests.backends.gpu import gpus
from tests.backends.machines import information
from tests.backends.pci_trees import function
from tests.backends.trees import plant, planted_host
from tests.backends.vfio.vfio_node import BUS, GPU, ROOT, T4, ActingKernel, backend, devices, gpu, only, resource
from tests.e2e.node import Node
from tests.e2e.process import finish

VF, PF = "0000:3b:00.4", "0000:3b:00.0"
OWN = f"sys/devices/{ROOT}/{VF}/nvidia/"
MEDIATED = f"sys/devices/{ROOT}/{VF}/mdev_supported_types/nvidia-592/"
NOT_BOUND = 'bind it to vfio-pci, or set bind = "start" or "allocate"'
MADE = "it has the virtual GPU 8b2b6d2c-9ab2 from the driver nvidia, which would go with another driver"


def virtual(driver: str = "nvidia", group: int = 31) -> str:
    """A virtual function of an NVIDIA GPU."""
    files = {"driver_override": "(null)"}
    return function(VF, "10de:1eb8", below=ROOT, driver=driver, group=group, physical=PF, files=files)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (f"{MEDIATED}devices/8b2b6d2c-9ab2/\n", MADE),
        (f"{OWN}current_vgpu_type/\n", "it has the vGPU type (unreadable) from the NVIDIA driver"),
    ],
)
@pytest.mark.parametrize("bind", ["never", "start", "allocate"])
@pytest.mark.parametrize("force", [[], [VF]])
def test_it_is_unusable_with_the_reason_whatever_is_configured(
    tmp_path: Path, tree: str, why: str, bind: str, force: list[str]
) -> None:
    if force and bind == "never":
        return
    device = only(backend(tmp_path, virtual() + tree, resource(bind=bind, force=force)))
    assert device.key == VF
    assert device.unusable.startswith(why)


def test_where_none_was_made_it_may_be_had(tmp_path: Path) -> None:
    tree = virtual() + f"{MEDIATED}devices/\n"
    assert only(backend(tmp_path, tree, resource(bind="start"))).unusable == ""


# --- an A40 with vGPUs on its virtual functions, as drivers from 2024 on make them ---

A40 = "0000:41:00.0"
VFS = [f"0000:41:00.{n}" for n in range(4, 8)]
VF_ID = {"id": ("10de:2235",), "function": ("virtual",)}


def a40(*types: str) -> str:
    """An A40 whose virtual functions have these vGPU types; a VF with a type has the group and the node 40 + its number."""
    below = "pci0000:40/0000:40:01.0"
    lines = [
        function(A40, "10de:2235", below=below, driver="nvidia", group=40, virtual=VFS, files={"sriov_totalvfs": "32"})
    ]
    for number, (address, kind) in enumerate(zip(VFS, types, strict=False), 41):
        names = {"driver_override": "(null)", "nvidia/current_vgpu_type": kind, "reset_method": "flr", "reset": ""}
        names["nvidia/creatable_vgpu_types"] = "ID    : vGPU Name\\n558   : NVIDIA A40-2Q"
        lines.append(
            function(address, "10de:2235", below=below, driver="nvidia", group=number, physical=A40, files=names)
        )
        lines.append(f"dev/vfio/{number} c 240:{number}\n" if kind != "0" else "")
    return "".join(lines)


def test_a_virtual_function_with_a_vgpu_type_is_handed_out_as_a_pci_device(tmp_path: Path) -> None:
    found = backend(tmp_path, a40("558", "0"), resource("nvidia.com/A40-2Q", VF_ID))
    typed, untyped = devices(found)
    assert (typed.key, typed.unusable, typed.attributes["vgpu_type"]) == (VFS[0], "", ("558",))
    assert typed.depends == {"iommu:41", f"pci:{A40}"}
    assert [*found.probe(typed)] == []
    edits = found.edits(found.resources[0], [Grant(typed.key, typed)])
    assert edits.env == {"PCI_RESOURCE_NVIDIA_COM_A40-2Q": VFS[0]}
    assert [str(node.path) for node in edits.nodes] == ["/dev/vfio/vfio", "/dev/vfio/41"]
    assert untyped.unusable.startswith("it has no vGPU type: write one of nvidia/creatable_vgpu_types")


@pytest.mark.parametrize("bind", ["start", "allocate"])
def test_neither_one_with_a_type_nor_one_without_is_ever_bound_or_reset(tmp_path: Path, bind: str) -> None:
    host = planted_host(tmp_path, BUS + a40("558", "0"))
    kernel = ActingKernel(host)
    wanted = resource("a.com/vf", VF_ID, bind=bind)
    found = Vfio(host, [wanted], kernel)
    typed, untyped = devices(found)
    found.claim(wanted, [Grant(typed.key, typed)])
    assert not found.adopt(wanted, typed)
    with pytest.raises(AllocationRefused, match="no vGPU type"):
        found.claim(wanted, [Grant(untyped.key, untyped)])
    with pytest.raises(AllocationRefused, match="its driver resets it"):
        found.prepare(wanted, [Grant(typed.key, typed)])
    assert kernel.written == []


def test_a_resource_may_be_made_of_each_type(tmp_path: Path) -> None:
    types = resource("nvidia.com/vgpu-{vgpu_type}", VF_ID)
    found = backend(tmp_path, a40("558", "557", "558"), types)
    inventory = Inventory(found.resources, {"vfio": found})
    inventory.update("vfio", {unit: found.discover(unit).devices for unit in found.units()})
    assert {name: list(inventory.slots(name)) for name in inventory.names()} == {
        "nvidia.com/vgpu-557": [VFS[1]],
        "nvidia.com/vgpu-558": [VFS[0], VFS[2]],
    }


@pytest.mark.parametrize(("now", "has"), [("0", "none"), ("559", "559"), ("", "none"), ("garbage", "none")])
@pytest.mark.parametrize("select", [VF_ID, {"vgpu_type": ("558",)}])
def test_one_whose_type_was_changed_is_unhealthy_at_the_next_probe(
    tmp_path: Path, now: str, has: str, select: Selector
) -> None:
    found = backend(tmp_path, a40("558"), resource("a.com/vf", select))
    device = only(found)
    (tmp_path / f"sys/bus/pci/devices/{VFS[0]}/nvidia/current_vgpu_type").write_text(f"{now}\n")
    why = f"{VFS[0]} had the vGPU type 558 and has {has} now"
    assert [(s.reason, s.verdict, s.message) for s in found.probe(device)] == [("vgpu-type-changed", Verdict.NOW, why)]


def test_neither_the_physical_function_nor_what_gpu_finds_is_a_vgpu(tmp_path: Path) -> None:
    found = backend(tmp_path, a40("558"), resource("a.com/all", {"id": ("10de:2235",)}))
    assert {device.key: device.unusable for device in devices(found)} == {
        A40: f"its driver is nvidia; {NOT_BOUND}",
        VFS[0]: "",
    }
    plant(
        tmp_path, f"proc/driver/nvidia/gpus/{VFS[0]}/information = {information(4, 'NVIDIA A40')}\ndev/nvidia4 c 195:4"
    )
    (gpu_device,) = Gpu(found.host, [gpus.resource()]).discover(VFS[0]).devices
    assert gpu_device.unusable.startswith("it has the vGPU type 558, and is for a virtual machine")


def test_one_that_the_driver_has_made_a_vfio_device_is_offered_as_it_is(tmp_path: Path) -> None:
    tree = virtual() + f"{OWN}current_vgpu_type = 592\nsys/devices/{ROOT}/{VF}/vfio-dev/vfio4/\ndev/vfio/31 c 240:31\n"
    found = backend(tmp_path, tree, resource(bind="start"))
    assert only(found).unusable == ""
    assert not found.adopt(found.resources[0], only(found))


def test_it_is_not_bound_along_with_another_of_its_group(tmp_path: Path) -> None:
    tree = (
        gpu("nouveau", group=31) + virtual().replace("10DE:1EB8", "10DE:0001") + f"{MEDIATED}devices/8b2b6d2c-9ab2/\n"
    )
    found = backend(tmp_path, tree, resource("a.com/gpu", {"address": (GPU,)}, bind="start"))
    (device,) = (one for one in devices(found) if one.key == GPU)
    with pytest.raises(NotReady, match=f"{VF}, which is in it, is bound to nvidia and has the virtual GPU"):
        found.adopt(found.resources[0], device)


def test_one_that_was_made_since_the_look_is_seen_before_it_is_bound(tmp_path: Path) -> None:
    found = backend(tmp_path, virtual(), resource(bind="start", force=[VF]))
    device = only(found)
    assert device.unusable == ""
    plant(tmp_path, f"{MEDIATED}devices/8b2b6d2c-9ab2/")
    with pytest.raises(NotReady, match="has the virtual GPU 8b2b6d2c"):
        found.adopt(found.resources[0], device)


async def test_discover_lists_it_with_its_reason(tmp_path: Path) -> None:
    node = Node(tmp_path)
    machine = node.root / "machine"
    planted_host(machine, BUS + virtual() + f"{MEDIATED}devices/8b2b6d2c-9ab2/\n")
    chosen = f'select = {{ id = "{T4["id"][0]}" }}'
    config = node.config(
        f'[[resource]]\nname = "a.com/vf"\nbackend = "vfio"\nbind = "start"\n{chosen}\n',
        sys=f"{machine}/sys",
        dev=f"{machine}/dev",
        proc=f"{machine}/proc",
    )
    code, out, err = await finish("discover", "--config", str(config))
    assert code == 0, err
    assert MADE in " ".join(out.split())
