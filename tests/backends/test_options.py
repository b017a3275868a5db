"""What a resource of each kind of hardware may say, as a user writes it: all else is refused with its key, all of it at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pytest

from agent.config import ConfigError, load

NEEDED: Final[Mapping[str, tuple[str, ...]]] = {
    "cex": ("apqns = [{ adapter = 1, domain = 6 }]",),
    "mdev": ('select = { type = "GRID T4-1Q" }',),
    "stub": ("devices = 1",),
    "vfio": ('select = { id = "10de:1eb8" }',),
}
"""The lines without which a resource of a kind is wrong, or takes everything; for rows that do not say it themselves."""
_GKE: Final = 'style = "gke"\n'
_MAKING: Final = 'select = { pf = "ens1f0", vf = ["0", "1"] }\n'


def wrong(tmp_path: Path, kind: str, said: str, needed: Sequence[str] | None = None) -> dict[str, str]:
    """The keys with which a resource of this kind is refused, and why."""
    keys = {line.partition(" = ")[0] for line in said.splitlines()}
    lines = ['name = "a.com/x"', f'backend = "{kind}"', *(NEEDED.get(kind, ()) if needed is None else needed)]
    file = tmp_path / "config.toml"
    file.write_text("\n".join(["[[resource]]", *(it for it in lines if it.partition(" = ")[0] not in keys), said]))
    try:
        load(file)
    except ConfigError as error:
        return {it.path.removeprefix("resource[0]").removeprefix("."): it.sentence for it in error.problems}
    return {}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("cex", 'apqns = [{ adapter = 1, domain = 6, machine = "A" }, { adapter = 1, domain = 6, machine = "B" }]'),
        ("cex", "apqns = []"),
        ("gpu", ""),
        ("gpu", f'{_GKE}xid_critical = "all"\nfail_requests_greater_than_one = true'),
        ("gpu", 'device_list_strategy = ["envvar", "cdi-cri"]\nxid_critical = "all"\nxid_ignored = [13]'),
        ("infiniband", ""),
        ("stub", "devices = 0"),
        ("vfio", ""),
        ("vfio", 'bind = "start"'),
        ("vfio", 'bind = "allocate"\nrelease = "restore"\nforce = ["0000:3b:00.0", "10000:e1:00.0"]'),
        ("vfio", 'name = "a.com/{device}"\nbind = "start"'),
        ("vfio", "vgpu_type = 558"),
        ("vfio", 'select = { driver = ["nvme", "vfio-pci"] }\nbind = "allocate"'),
        ("vfio", 'select = { driver = "nvme" }'),
    ],
)
def test_what_is_possible_passes(tmp_path: Path, kind: str, said: str) -> None:
    assert wrong(tmp_path, kind, said) == {}


@pytest.mark.parametrize(
    ("kind", "said", "expected"),
    [
        ("cex", "apqns = [{ adapter = 256, domain = 0 }]", "apqns[0].adapter"),
        ("cex", "apqns = [{ adapter = 0, domain = -1 }]", "apqns[0].domain"),
        ("cex", 'apqns = [{ adapter = 1, domain = 6 }, { adapter = 1, domain = 6, machine = "A" }]', "apqns[1]"),
        ("cex", "min_generation = 3", "min_generation"),
        ("cex", "overcommit = 0", "overcommit"),
        ("cex", 'name = "a.com/{mode}"', "name"),
        ("gpu", "device_list_strategy = []", "device_list_strategy: is empty"),
        ("gpu", 'device_driver_root = "run/nvidia"', "device_driver_root: 'run/nvidia' is not an absolute path"),
        ("gpu", _GKE + "pass_device_specs = true", 'pass_device_specs: with style = "gke" it would do nothing'),
        ("gpu", _GKE + 'device_list_strategy = "cdi-cri"', "device_list_strategy: is for NVIDIA's own style"),
        ("gpu", 'driver_path = "/opt/nvidia"', 'driver_path: is for style = "gke"'),
        ("gpu", _GKE + 'vulkan_mount = "icd"', "vulkan_mount: 'icd' is not an absolute path"),
        ("gpu", 'sharing = "mps"', 'replicas: is 1; with sharing = "mps" it is 2 to 48'),
        ("gpu", 'sharing = "mps"\nreplicas = 49', "replicas: is 49"),
        ("gpu", 'name = "a.com/{model}"\nsharing = "mps"\nreplicas = 2', "sharing: write the resource's name out"),
        ("gpu", _GKE + 'imex = "required"', "imex: is for NVIDIA's own style"),
        ("gpu", "xid_critical = [79, 0]", "xid_critical[1]: is 0; XIDs are numbers from 1"),
        ("gpu", "xid_critical = [79]\nxid_ignored = [13, 79]", "xid_ignored[1]: 79 is among xid_critical too"),
        ("gpu", 'xid_critical = "all"\nxid_ignored = "all"', "xid_ignored: and so is xid_critical"),
        (
            "gpu",
            'device_list_strategy = []\ndevice_driver_root = "x"\nxid_ignored = [-1]',
            "device_list_strategy | device_driver_root | xid_ignored[0]",
        ),
        ("infiniband", 'permissions = "rx"', "permissions: is 'rx'; it must be made of"),
        ("infiniband", 'permissions = ""', "permissions: is ''"),
        ("infiniband", "ports = []", "ports: names no port"),
        ("infiniband", "ports = [1, 0]", "ports[1]: is 0; ports are numbered from 1"),
        (
            "infiniband",
            'name = "a.com/{state}"',
            "name: asks for state, which may change, or be out of sight while a pod has",
        ),
        ("infiniband", 'name = "a.com/{hca}"\nshared = 2', "shared: puts all adapters behind the same tokens"),
        ("infiniband", 'counters = ["symbol_error", "../state"]', "counters[1]: '../state' is no counter"),
        ("infiniband", "shared = 0", "shared: is 0; it must be from 1"),
        ("infiniband", "shared = 2\nreplicas = 2", "replicas: is beside shared"),
        ("infiniband", 'shared = 2\nselect = { state = "ACTIVE" }', "select: chooses by state, which only"),
        ("infiniband", 'shared = 2\nexclude = { rate = "10" }', "exclude: chooses by rate, which only"),
        ("infiniband", 'ports = []\npermissions = "x"', "ports | permissions"),
        ("mdev", "replicas = 2", "replicas: one virtual machine at a time"),
        ("mdev", 'create = true\nselect = { parent = "0000:3b:00.0" }', "select[0]"),
        (
            "mdev",
            'create = true\nselect = [{ type = "a" }, { type = "b", uuid = "22222222-2222-4222-8222-222222222222" }]',
            "select[1].uuid",
        ),
        ("solarflare", 'libraries = ["usr/lib"]', "libraries[0]"),
        ("solarflare", "device_info = true\nreplicas = 2", "device_info"),
        ("solarflare", 'name = "a.com/{ifname}"', "name"),
        ("sriov", "replicas = 2", "replicas"),
        ("sriov", 'rdma = true\nvdpa = "vhost"', "vdpa"),
        ("sriov", 'device_type = "accelerator"\nvhost_net = true', "vhost_net"),
        ("sriov", 'name = "a.com/{pf}"', "name"),
        ("sriov", _MAKING + "create = { ens1f0 = 0 }", "create.ens1f0"),
        ("sriov", _MAKING + "create = {}\nautoprobe = false", "autoprobe"),
        ("sriov", _MAKING + 'create = { ens1f0 = 4 }\nname = "a.com/{device}"', "create"),
        ("sriov", _MAKING + 'create = { ens1f0 = 4 }\ndevice_type = "accelerator"', "create"),
        ("stub", "devices = -1", "devices"),
        ("stub", "devices = [{}, { count = -1 }]", "devices[1].count"),
        ("stub", "devices = [{ numa_node = -1 }]", "devices[0].numa_node"),
        ("stub", 'file = "health"', "file"),
        ("stub", "devises = 2", "devises"),
        (
            "stub",
            'devices = [{ count = -1 }, { numa_node = -2 }]\nfile = "here"',
            "devices[0].count | devices[1].numa_node | file",
        ),
        ("vfio", "replicas = 2", "replicas"),
        ("vfio", 'name = "a.com/{driver}"\nbind = "start"', "name"),
        ("vfio", 'bind = "never"\nrelease = "restore"', "release"),
        ("vfio", 'bind = "start"\nrelease = "restore"', "release"),
        ("vfio", "vgpu_type = 0", "vgpu_type"),
        ("vfio", 'vgpu_type = 558\nbind = "start"', "vgpu_type: never bound"),
        ("vfio", 'vgpu_type = 558\nselect = { vgpu_type = "558" }', "vgpu_type: selected or named by"),
        ("vfio", 'vgpu_type = 558\npre_start = "reset"', "vgpu_type: the driver alone resets"),
        ("vfio", 'force = ["0000:3b:00.0"]', "force"),
        ("vfio", 'bind = "start"\nforce = ["0000:3b:00.0", "3b:00.0"]', "force[1]"),
        (
            "vfio",
            'bind = "allocate"\nselect = [{ id = "10de:1eb8" }, { driver = "nvme" }]',
            "select[1].driver: is nvme, which bind would change: nothing would be selected any more; add vfio-pci",
        ),
        ("vfio", 'replicas = 3\nrelease = "restore"\nforce = ["x"]', "replicas | release | force | force[0]"),
    ],
)
def test_what_is_impossible_is_refused_with_its_key(tmp_path: Path, kind: str, said: str, expected: str) -> None:
    """`expected` has the keys, each with words of why: all that is wrong is told at once."""
    found = wrong(tmp_path, kind, said)
    words = dict(part.partition(": ")[::2] for part in expected.split(" | "))
    assert found.keys() == words.keys()
    assert all(words[key] in found[key] for key in words), found


@pytest.mark.parametrize(
    ("kind", "said", "why"),
    [
        ("mdev", "create = true", 'as in select = { type = "GRID T4-1Q" }'),
        ("vfio", "", 'select = { id = "10de:1eb8" }'),
    ],
)
def test_a_resource_that_would_take_all_there_is_is_refused(tmp_path: Path, kind: str, said: str, why: str) -> None:
    (sentence,) = wrong(tmp_path, kind, said, needed=()).values()
    assert why in sentence
