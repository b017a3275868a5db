"""A function of which a driver has made virtual GPUs is never bound to vfio-pci, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import NotReady
from tests.backends.pci_trees import function
from tests.backends.trees import planted_host
from tests.backends.vfio_node import BUS, GPU, ROOT, T4, backend, devices, gpu, only, resource
from tests.e2e.node import Node
from tests.e2e.process import finish

VF, PF = "0000:3b:00.4", "0000:3b:00.0"
OWN = f"sys/devices/{ROOT}/{VF}/nvidia/"
MEDIATED = f"sys/devices/{ROOT}/{VF}/mdev_supported_types/nvidia-592/"
TYPE = "it has the vGPU type 592 from the NVIDIA driver, which would go with another driver"
MADE = "it has the virtual GPU 8b2b6d2c-9ab2 from the driver nvidia, which would go with another driver"


def virtual(driver: str = "nvidia", group: int = 31) -> str:
    """A virtual function of an NVIDIA GPU."""
    files = {"driver_override": "(null)"}
    return function(VF, "10de:1eb8", below=ROOT, driver=driver, group=group, physical=PF, files=files)


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (f"{OWN}current_vgpu_type = 592\n", TYPE),
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


def test_without_a_type_it_may_be_had(tmp_path: Path) -> None:
    tree = virtual() + f"{OWN}current_vgpu_type = 0\n{MEDIATED}devices/\n"
    assert only(backend(tmp_path, tree, resource(bind="start"))).unusable == ""


def test_one_that_the_driver_has_made_a_vfio_device_is_offered_as_it_is(tmp_path: Path) -> None:
    tree = virtual() + f"{OWN}current_vgpu_type = 592\nsys/devices/{ROOT}/{VF}/vfio-dev/vfio4/\ndev/vfio/31 c 240:31\n"
    found = backend(tmp_path, tree, resource(bind="start"))
    assert only(found).unusable == ""
    assert not found.adopt(found.resources[0], only(found))


def test_it_is_not_bound_along_with_another_of_its_group(tmp_path: Path) -> None:
    tree = gpu("nouveau", group=31) + virtual().replace("10DE:1EB8", "10DE:0001") + f"{OWN}current_vgpu_type = 592\n"
    found = backend(tmp_path, tree, resource("a.com/gpu", {"address": (GPU,)}, bind="start"))
    (device,) = (one for one in devices(found) if one.key == GPU)
    with pytest.raises(NotReady, match=f"{VF}, which is in it, is bound to nvidia and has the vGPU type 592"):
        found.adopt(found.resources[0], device)


def test_a_type_that_it_got_since_the_look_is_seen_before_it_is_bound(tmp_path: Path) -> None:
    found = backend(tmp_path, virtual(), resource(bind="start", force=[VF]))
    device = only(found)
    assert device.unusable == ""
    type_ = tmp_path / OWN / "current_vgpu_type"
    type_.parent.mkdir()
    type_.write_text("592\n")
    with pytest.raises(NotReady, match="has the vGPU type 592"):
        found.adopt(found.resources[0], device)


async def test_discover_lists_it_with_its_reason(tmp_path: Path) -> None:
    node = Node(tmp_path)
    machine = node.root / "machine"
    planted_host(machine, BUS + virtual() + f"{OWN}current_vgpu_type = 592\n")
    chosen = f'select = {{ id = "{T4["id"][0]}" }}'
    config = node.config(
        f'[[resource]]\nname = "a.com/vf"\nbackend = "vfio"\nbind = "start"\n{chosen}\n',
        sys=f"{machine}/sys",
        dev=f"{machine}/dev",
        proc=f"{machine}/proc",
    )
    code, out, err = await finish("discover", "--config", str(config))
    assert code == 0, err
    assert TYPE in " ".join(out.split())
