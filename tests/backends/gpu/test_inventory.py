"""GPUs on their way through health and inventory: what a kubelet would be told, and what pods keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.cli.commands import fairlead
from agent.health import HealthBook
from agent.inventory.inventory import Inventory
from backends.base import Clears, HostPath, Record
from backends.gpu import Gpu, GpuResource
from tests.backends.gpu.fake_nvml import FakeGpu, FakeMig, install
from tests.backends.gpu.gpus import backend, devices, look, resource
from tests.backends.machines import (
    CONTROLS,
    amd_gpu,
    flex_server,
    hgx_h100,
    intel_gpu,
    mi210_server,
    mig,
    nvidia_gpu,
    uuid,
)
from tests.backends.trees import HOST

AT = "0000:3b:00.0"
KFD = "dev/kfd c 234:0\n"


@pytest.mark.parametrize(
    ("machine", "why"),
    [
        *(
            (nvidia_gpu(AT, 0, driver=driver, registered=False, node=False), why)
            for driver, why in (
                (None, "it has no driver; nvidia is needed"),
                ("vfio-pci", "it is bound to vfio-pci, not to nvidia"),
                ("nouveau", "it is bound to nouveau, not to nvidia"),
            )
        ),
        (KFD + amd_gpu(AT, 0, driver=None), "it has no driver; amdgpu is needed"),
        (KFD + amd_gpu(AT, 0, driver="vfio-pci"), "it is bound to vfio-pci, not to amdgpu"),
        (amd_gpu(AT, 0), "/dev/kfd does not exist"),
        (intel_gpu(AT, 0, None), "it has no driver; i915 or xe is needed"),
        (intel_gpu(AT, 0, "vfio-pci"), "it is bound to vfio-pci, not to i915 or xe"),
    ],
)
def test_a_gpu_that_cannot_be_used_is_there_with_the_reason(tmp_path: Path, machine: str, why: str) -> None:
    assert [(it.key, it.unusable) for it in devices(backend(tmp_path, machine)).values()] == [(AT, why)]


class Node:
    """Health and inventory of one machine's GPUs."""

    def __init__(self, root: Path, machine: str, *resources: GpuResource) -> None:
        self.gpu: Gpu = backend(root, machine, *resources)
        self.health = HealthBook()
        self.inventory = Inventory(resources, {"gpu": self.gpu})
        self.now = 0.0
        self.look()
        self.inventory.ready("gpu")

    def look(self) -> None:
        found = look(self.gpu)
        self.inventory.update("gpu", {unit: one.devices for unit, one in found.items()})
        signals = {
            unit: tuple(s for device in one.devices for s in self.gpu.probe(device) if s.measure is None)
            for unit, one in found.items()
        }
        self.inventory.set_health(self.health.probed("gpu", signals, self.now))

    def says(self, line: str) -> None:
        record = Record("kmsg", "boot", 1, 0.0, line)
        self.inventory.set_health(self.health.recorded(self.gpu.signals(record), record, self.now))

    def states(self, name: str) -> dict[str, str]:
        slots = self.inventory.slots(name)
        return {device_id: slot.health.reason or slot.health.state.value for device_id, slot in slots.items()}


def test_an_xid_marks_every_replica_of_that_gpu_and_no_other(tmp_path: Path) -> None:
    """A bug of NVIDIA's plugin: health is kept by GPU, so that one of its four replicas is marked."""
    shared = resource("nvidia.com/gpu.shared", replicas=4)
    node = Node(tmp_path, CONTROLS + nvidia_gpu("0000:3b:00.0", 0) + nvidia_gpu("0000:5e:00.0", 1), shared)
    node.says("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python3, GPU has fallen off the bus.")
    found = node.states(shared.name)
    assert {found[f"{uuid(0)}::{n}"] for n in range(4)} == {"xid-79"}
    assert {found[f"{uuid(1)}::{n}"] for n in range(4)} == {"Healthy"}


def test_an_xid_of_one_gpu_instance_leaves_the_others_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [FakeMig("MIG-1", 1, 0), FakeMig("MIG-2", 2, 0)]
    install(monkeypatch, FakeGpu("0000:3b:00.0", uuid(0), mig=parts))
    node = Node(tmp_path, CONTROLS + nvidia_gpu("0000:3b:00.0", 0) + mig(0, [(1, 0), (2, 0)]), resource())
    node.says("NVRM: Xid (PCI:0000:3b:00 GPU-I:02): 94, pid=7194, Contained: CE User Channel (0x9).")
    assert node.states("nvidia.com/gpu") == {"MIG-1": "Healthy", "MIG-2": "xid-94"}
    node.says("NVRM: Xid (PCI:0000:3b:00): 79, pid=7194, GPU has fallen off the bus.")
    assert node.states("nvidia.com/gpu")["MIG-1"] == "xid-79"


def test_mig_devices_have_the_names_of_nvidias_mixed_strategy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [FakeMig("MIG-1", 1, 0, "1g.10gb"), FakeMig("MIG-2", 2, 0, "1g.10gb+me")]
    install(monkeypatch, FakeGpu("0000:3b:00.0", uuid(0), mig=parts))
    machine = CONTROLS + nvidia_gpu("0000:3b:00.0", 0) + mig(0, [(1, 0), (2, 0)]) + nvidia_gpu("0000:5e:00.0", 1)
    node = Node(tmp_path, machine, resource("nvidia.com/mig-{profile}"), resource())
    small, media = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-1g.10gb.me"
    assert node.inventory.names() == [small, media, "nvidia.com/gpu"]
    assert [list(node.states(name)) for name in node.inventory.names()] == [["MIG-1"], ["MIG-2"], [uuid(1)]]
    node.says("NVRM: Xid (PCI:0000:3b:00 GPU-I:02): 94, pid=7194, Contained: CE User Channel (0x9).")
    assert (node.states(small), node.states(media)) == ({"MIG-1": "Healthy"}, {"MIG-2": "xid-94"})


def test_an_unhealthy_gpu_recovers(tmp_path: Path) -> None:
    """NVIDIA's and GKE's plugins never take an XID back."""
    node = Node(tmp_path, hgx_h100(), resource())
    node.says("NVRM: Xid (PCI:0000:19:00): 48, pid=1")
    node.says("NVRM: Xid (PCI:0000:19:00): 79, pid=1")
    assert node.states("nvidia.com/gpu")[uuid(0)] == "xid-48"
    node.inventory.set_health(node.health.cleared(Clears.OUR_RESET, ["pci:0000:19:00.0"], 1.0))
    assert set(node.states("nvidia.com/gpu").values()) == {"Healthy"}


def test_one_dead_gpu_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    """A bug of NVIDIA's plugin: the first GPU that does not answer ends the look at all of them."""
    node = Node(tmp_path, hgx_h100(), resource())
    node.gpu.host.local(HostPath("/sys/bus/pci/devices/0000:3b:00.0/config")).write_bytes(b"\xff" * 64)
    node.look()
    found = node.states("nvidia.com/gpu")
    assert found.pop(uuid(1)) == "off-bus"
    assert set(found.values()) == {"Healthy"}
    assert len(found) == 7


def test_another_card_at_the_same_place_is_another_device(tmp_path: Path) -> None:
    node = Node(tmp_path, nvidia_gpu("0000:3b:00.0", 0), resource())
    file = tmp_path / "proc/driver/nvidia/gpus/0000:3b:00.0/information"
    file.write_text(file.read_text().replace(uuid(0), uuid(9)))
    node.look()
    assert list(node.states("nvidia.com/gpu")) == [uuid(9)]


# --- as an operator sees it ---

CONFIG = (
    HOST
    + """
[[resource]]
name = "nvidia.com/gpu"
backend = "gpu"
select = {{ vendor = "10de" }}
[resource.options]
pass_device_specs = true

[[resource]]
name = "amd.com/gpu"
backend = "gpu"
select = {{ vendor = "1002" }}
replicas = 2

[[resource]]
name = "gpu.intel.com/xe"
backend = "gpu"
select = {{ vendor = "8086", driver = "xe" }}
"""
)


def discovered(tmp_path: Path, *options: str) -> str:
    root = tmp_path / "host"
    machine = hgx_h100() + nvidia_gpu("0000:e1:00.0", 9, driver="vfio-pci", registered=False, node=False)
    machine += mi210_server() + flex_server(first=20)
    backend(root, "\n".join(line for line in machine.splitlines() if "/aer_dev_" not in line))
    config = tmp_path / "config.toml"
    config.write_text(CONFIG.format(root=root))
    result = CliRunner().invoke(fairlead, ["discover", "--config", str(config), *options])
    assert result.exit_code == 0, result.output
    return result.output


def test_discover_shows_what_is_offered_and_why_the_rest_is_not(tmp_path: Path) -> None:
    output = " ".join(discovered(tmp_path).split())  # its lines are broken anywhere
    assert "nvidia.com/gpu: 8 healthy" in output
    assert "amd.com/gpu: 16 healthy" in output
    assert " 0000:e1:00.0: it is bound to vfio-pci, not to nvidia" in output
    assert "gpu.intel.com/xe does not take it: driver is i915, not xe" in output
    assert "Problems:" not in output


def test_discover_as_json_has_the_attributes_to_select_by(tmp_path: Path) -> None:
    document = json.loads(discovered(tmp_path, "--json"))
    first = document["resources"][0]["devices"][0]
    assert (first["id"], first["numa_node"], first["hardware"]) == (uuid(0), 0, ["pci:0000:19:00.0"])
    assert first["attributes"]["model"] == ["NVIDIA H100 80GB HBM3"]
