"""Switching a node: with the imported configuration it has the lists and answers that the plugin itself gave.

The answers are those of the running plugins (NVIDIA's, GKE's, AMD's, generic-device-plugin, smarter-device-manager) or, of
the others, what their sources say.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from agent.config.file import read_tables
from agent.config.problems import Problems
from agent.discovery.backend_answers import make_backends
from agent.inventory.inventory import Inventory
from agent.inventory.survey import PATIENCE, survey
from backends import registry
from backends.base import AllocationRefused, Backend, ContainerEdits, Grant
from tests.backends.gpu.gpus import nodes
from tests.backends.machines import amd_gpu, flex_server, hgx_h100, mi300x_cpx, uuid
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import RDMA_CM, adapter
from tests.backends.trees import planted_host
from tests.importing.helpers import import_text

_GPU = "nvidia.com/gpu"
_H100S = hgx_h100()
_CONTROL_NODES = [f"/dev/{name} rw" for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")]


class Node(Struct, frozen=True):
    """A node that was switched."""

    found: Inventory
    backends: Mapping[str, Backend[Any]]

    @classmethod
    async def switched(cls, root: Path, tree: str, theirs: str) -> Node:
        """One with this hardware, from this configuration of a plugin's."""
        tables = tomllib.loads(import_text(theirs).toml)
        resources = read_tables(tables, Problems(Path(), ""), registry, source=None).resources
        backends = make_backends(planted_host(root, tree), resources)
        return cls((await survey(resources, backends, PATIENCE)).inventory, backends)

    @property
    def lists(self) -> dict[str, list[str]]:
        """The IDs of each resource, as far as they can be had."""
        slots = {name: self.found.slots(name) for name in self.found.names()}
        return {name: sorted(i for i, slot in of.items() if slot.health.offered) for name, of in slots.items()}

    def numa_nodes(self, name: str) -> set[int | None]:
        """What the kubelet is told of the devices of a resource."""
        return {slot.device.numa_node for slot in self.found.slots(name).values() if slot.device is not None}

    def answer(self, name: str, *ids: str) -> ContainerEdits:
        """What a container gets with these."""
        resource = self.found.resource(name)
        assert resource is not None
        grants = [Grant(one, device) for one in ids if (device := self.found.slots(name)[one].device) is not None]
        return self.backends[resource.spec.backend].edits(resource, grants)


def mounts(edits: ContainerEdits) -> list[str]:
    """Host path, container path, and whether it can be written; one mount a line."""
    return [f"{it.path} -> {it.container_path} {'ro' if it.read_only else 'rw'}" for it in edits.mounts]


# --- NVIDIA ---


async def test_nvidias_variables_nodes_and_features(tmp_path: Path) -> None:
    flags = "plugin: {passDeviceSpecs: true}, gdsEnabled: true, mofedEnabled: true, gdrcopyEnabled: true"
    node = await Node.switched(tmp_path, _H100S, f"version: v1\nflags: {{{flags}}}\n")
    assert node.lists == {_GPU: sorted(uuid(n) for n in range(8))}
    given = node.answer(_GPU, uuid(1), uuid(5))
    assert given.env == {
        "NVIDIA_VISIBLE_DEVICES": f"{uuid(1)},{uuid(5)}",
        **{f"NVIDIA_{name}": "enabled" for name in ("GDS", "MOFED", "GDRCOPY")},
    }
    assert sorted(nodes(given)) == sorted([*_CONTROL_NODES, "/dev/nvidia1 rw", "/dev/nvidia5 rw"])
    assert (given.mounts, given.annotations, given.cdi_devices) == ((), {}, ())


async def test_nvidias_time_slicing_has_replicas_under_another_name_of_which_a_container_gets_one(
    tmp_path: Path,
) -> None:
    sharing = "renameByDefault: true, failRequestsGreaterThanOne: true, resources: [{name: gpu, replicas: 4}]"
    node = await Node.switched(tmp_path, _H100S, f"version: v1\nsharing: {{timeSlicing: {{{sharing}}}}}\n")
    ids = [f"{uuid(n)}::{k}" for n in range(8) for k in range(4)]
    assert node.lists == {f"{_GPU}.shared": ids}
    assert node.answer(f"{_GPU}.shared", ids[5]).env == {"NVIDIA_VISIBLE_DEVICES": uuid(1)}
    with pytest.raises(AllocationRefused):
        node.answer(f"{_GPU}.shared", *ids[:2])


async def test_nvidias_volume_mounts_by_index_below_a_driver_root(tmp_path: Path) -> None:
    flags = (
        "nvidiaDriverRoot: /run/nvidia/driver, "
        "plugin: {deviceListStrategy: [volume-mounts], deviceIDStrategy: index, passDeviceSpecs: true}"
    )
    given = (await Node.switched(tmp_path, _H100S, f"flags: {{{flags}}}\n")).answer(_GPU, uuid(3))
    assert given.env == {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}
    assert mounts(given) == ["/dev/null -> /var/run/nvidia-container-devices/3 rw"]
    assert "/run/nvidia/driver/dev/nvidia3 -> /dev/nvidia3 rw" in nodes(given)


async def test_nvidias_mps_and_imex_channel(tmp_path: Path) -> None:
    ready = "run/nvidia/mps/nvidia.com/gpu/{}\n"
    tree = (
        _H100S
        + "dev/nvidia-caps-imex-channels/channel0 c 234:0\n"
        + ready.format(".started")
        + ready.format("pipe/nvidia-cuda-mps-control.pid")
    )
    sharing = "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 10}]}}"
    node = await Node.switched(tmp_path, tree, f"version: v1\n{sharing}\nimex: {{channelIDs: [0], required: true}}\n")
    assert len(node.lists[_GPU]) == 80
    given = node.answer(_GPU, f"{uuid(2)}::7")
    assert given.env == {
        "NVIDIA_VISIBLE_DEVICES": uuid(2),
        "NVIDIA_IMEX_CHANNELS": "0",
        "CUDA_MPS_PIPE_DIRECTORY": "/mps/nvidia.com/gpu/pipe",
    }
    assert mounts(given) == [
        "/run/nvidia/mps/nvidia.com/gpu/pipe -> /mps/nvidia.com/gpu/pipe rw",
        "/run/nvidia/mps/shm -> /dev/shm rw",
    ]
    with pytest.raises(AllocationRefused):
        node.answer(_GPU, f"{uuid(2)}::7", f"{uuid(3)}::7")


# --- GKE ---

_GKE = "kind: DaemonSet\nspec: {containers: [{image: nvidia-gpu-device-plugin}]}\n---\n"
_OF_GKE = [
    "/home/kubernetes/bin/nvidia -> /usr/local/nvidia ro",
    "/home/kubernetes/bin/nvidia/vulkan/icd.d -> /etc/vulkan/icd.d ro",
]


async def test_gkes_whole_gpus(tmp_path: Path) -> None:
    node = await Node.switched(tmp_path, _H100S, _GKE)
    assert node.lists == {_GPU: [f"nvidia{n}" for n in range(8)]}
    given = node.answer(_GPU, "nvidia7")
    names = ("nvidia7", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia-uvm-tools")
    assert nodes(given) == [f"/dev/{name} mrw" for name in names]
    assert mounts(given) == _OF_GKE
    assert (given.env, given.annotations) == ({}, {})


@pytest.mark.parametrize("clients", [1, 2])
async def test_gkes_time_sharing_names_each_client_and_refuses_two(tmp_path: Path, clients: int) -> None:
    sharing = f"{{GPUSharingStrategy: time-sharing, MaxSharedClientsPerGPU: {clients}}}"
    node = await Node.switched(tmp_path, _H100S, f"{_GKE}GPUSharingConfig: {sharing}\n")
    assert node.lists == {_GPU: [f"nvidia{n}/vgpu{k}" for n in range(8) for k in range(clients)]}
    assert nodes(node.answer(_GPU, "nvidia3/vgpu0"))[0] == "/dev/nvidia3 mrw"
    with pytest.raises(AllocationRefused):
        node.answer(_GPU, "nvidia0/vgpu0", "nvidia1/vgpu0")


# --- AMD, Intel ---


async def test_amds_gpus_whole_and_divided(tmp_path: Path) -> None:
    args = "kind: DaemonSet\nspec: {containers: [{image: rocm/k8s-device-plugin, args: [-resource_naming_strategy=mixed]}]}"
    whole = (
        amd_gpu("0000:23:00.0", 30, partition=("SPX", "NPS1")) + "sys/class/kfd/kfd/topology/nodes/9/properties = x 1\n"
    )
    node = await Node.switched(tmp_path, mi300x_cpx() + whole, args)
    assert node.lists["amd.com/cpx_nps4"] == ["0000:0c:00.0", *(f"amdgpu_xcp_{n}" for n in range(1, 4))]
    given = node.answer("amd.com/cpx_nps4", "0000:0c:00.0", "amdgpu_xcp_2")
    drm = [f"/dev/dri/{name} rw" for n in (0, 2) for name in (f"card{n}", f"renderD{128 + n}")]
    assert nodes(given) == ["/dev/kfd rw", *drm]
    assert (given.env, given.mounts) == ({}, ())


async def test_intels_gpus_by_driver_for_two_pods_each_and_for_a_monitor(tmp_path: Path) -> None:
    spec = "{sharedDevNum: 2, enableMonitoring: true, monitoringMode: split, denyIDs: '0x1234'}"
    node = await Node.switched(tmp_path, flex_server(), f"kind: GpuDevicePlugin\nspec: {spec}\n")
    prefix = "gpu.intel.com"
    assert node.lists == {
        f"{prefix}/i915": ["card0-0", "card0-1"],
        f"{prefix}/xe": ["card1-0", "card1-1"],
        f"{prefix}/i915_monitoring": ["all"],
        f"{prefix}/xe_monitoring": ["all"],
    }
    given = node.answer(f"{prefix}/i915", "card0-1")
    assert nodes(given) == ["/dev/dri/card0 rw", "/dev/dri/renderD128 rw"]
    links = [f"/dev/dri/by-path/pci-0000:4d:00.0-{kind}" for kind in ("card", "render")]
    assert mounts(given) == [f"{link} -> {link} ro" for link in links]
    assert nodes(node.answer(f"{prefix}/xe_monitoring", "all")) == ["/dev/dri/card1 rw", "/dev/dri/renderD129 rw"]


# --- RDMA, KubeVirt ---


async def test_each_token_of_a_shared_pool_gives_all_its_adapters_and_pools_may_have_the_same(tmp_path: Path) -> None:
    tree = RDMA_CM + "".join(
        adapter(f"mlx5_{n}", f"0000:{3 + n}b:00.0", below=f"pci0000:0{n}", number=n, numa_node=n, netdevs=(f"ib{n}",))
        for n in range(2)
    )
    pools = [
        {"resourceName": "one", "rdmaHcaMax": 3, "selectors": {"ifNames": ["ib1"]}},
        {"resourceName": "all", "rdmaHcaMax": 2, "selectors": {"vendors": ["15b3"]}},
    ]
    node = await Node.switched(tmp_path, tree, f"configList: {pools}\n")
    assert node.lists == {
        "rdma/one": [f"rdma/one::{n}" for n in range(3)],
        "rdma/all": ["rdma/all::0", "rdma/all::1"],
    }
    own = [[f"/dev/infiniband/{name}{n} rwm" for name in ("issm", "umad", "uverbs")] for n in range(2)]
    cm = "/dev/infiniband/rdma_cm rwm"
    assert sorted(nodes(node.answer("rdma/one", "rdma/one::1"))) == sorted([*own[1], cm])
    assert sorted(nodes(node.answer("rdma/all", "rdma/all::0"))) == sorted([*own[0], *own[1], cm])
    assert node.answer("rdma/all", "rdma/all::0").env == {}
    assert node.numa_nodes("rdma/one") == {None}, "whose hint its plugin did not give"


async def test_kubevirts_functions_go_by_their_groups(tmp_path: Path) -> None:
    tree = "dev/vfio/vfio c 10:196\ndev/vfio/17 c 243:17\n" + function(
        "0000:3b:00.0", "10de:1eb8", driver="vfio-pci", group=17
    )
    pci = (
        "[{pciVendorSelector: '10DE:1eb8', resourceName: nvidia.com/TU104GL_Tesla-T4, externalResourceProvider: true}]"
    )
    node = await Node.switched(tmp_path, tree, f"permittedHostDevices: {{pciHostDevices: {pci}}}\n")
    name = "nvidia.com/TU104GL_Tesla-T4"
    assert node.lists == {name: ["17"]}
    given = node.answer(name, "17")
    assert given.env == {"PCI_RESOURCE_NVIDIA_COM_TU104GL_TESLA-T4": "0000:3b:00.0"}
    assert nodes(given) == ["/dev/vfio/vfio mrw", "/dev/vfio/17 mrw"]


# --- device nodes ---


async def test_generics_groups_counts_directories_and_mounts(tmp_path: Path) -> None:
    tree = "dev/fuse c 10:229\ndev/snd/controlC0 c 116:0\ndev/snd/timer c 116:33\ndev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\netc/asound.conf\n"
    devices = """
devices:
- {name: fuse, groups: [{count: 3, paths: [{path: /dev/fuse}]}]}
- {name: serial, groups: [{paths: [{path: "/dev/ttyUSB*", mountPath: /dev/serial/, permissions: rw}]}]}
- {name: audio, groups: [{paths: [{path: /dev/snd}]}]}
- name: sound
  groups: [{paths: [{path: /dev/snd/controlC0, mountPath: /dev/c}, {path: /etc/asound.conf, type: Mount, readOnly: true}]}]
"""
    node = await Node.switched(tmp_path, tree, devices)
    counts = {name: len(ids) for name, ids in node.lists.items()}
    assert counts == {"squat.ai/fuse": 3, "squat.ai/serial": 2, "squat.ai/audio": 1, "squat.ai/sound": 1}
    every = {name: [node.answer(name, one) for one in ids] for name, ids in node.lists.items()}
    assert [nodes(it) for it in every["squat.ai/fuse"]] == [["/dev/fuse mrw"]] * 3
    assert [nodes(it) for it in every["squat.ai/serial"]] == [
        [f"/dev/ttyUSB{n} -> /dev/serial/ttyUSB{n} rw"] for n in range(2)
    ]
    assert nodes(every["squat.ai/audio"][0]) == ["/dev/snd/controlC0 mrw", "/dev/snd/timer mrw"]
    assert nodes(every["squat.ai/sound"][0]) == ["/dev/snd/controlC0 -> /dev/c mrw"]
    assert mounts(every["squat.ai/sound"][0]) == ["/etc/asound.conf -> /etc/asound.conf ro"]


async def test_smarter_has_a_resource_for_each_node_named_after_its_path(tmp_path: Path) -> None:
    tree = "dev/video0 c 81:0\ndev/video11 c 81:11\ndev/net/tun c 10:200\ndev/kvm c 10:232\ndev/a.b c 10:1\n"
    most = {"^video[0-9]*$": 2, "^net/tun$": 1, "kvm": 1, r"^a\.b$": 1, "nvidia-gpu": 3}
    entries = "".join(f"- {{devicematch: '{pattern}', nummaxdevices: {count}}}\n" for pattern, count in most.items())
    node = await Node.switched(tmp_path, tree + "sys/devices/soc0/family = Tegra\n", entries)
    counts = {name.removeprefix("smarter-devices/"): len(ids) for name, ids in node.lists.items()}
    assert counts == {"video0": 2, "video11": 2, "net_tun": 1, "kvm": 1, "a_b": 1, "nvidia-gpu0": 3}
    (tun,) = node.lists["smarter-devices/net_tun"]
    assert nodes(node.answer("smarter-devices/net_tun", tun)) == ["/dev/net/tun rw"]
    jetson = node.answer("smarter-devices/nvidia-gpu0", node.lists["smarter-devices/nvidia-gpu0"][0])
    assert (jetson.env, jetson.nodes) == ({"NVIDIA_VISIBLE_DEVICES": "0"}, ())
