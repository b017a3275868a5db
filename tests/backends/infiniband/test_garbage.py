"""The backend `infiniband` where an adapter is half removed or cannot be read: the pool of all others is as it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from backends.base import Device, Grant, Problem
from backends.infiniband import InfiniBand
from tests.backends.infiniband.test_backend import resource
from tests.backends.rdma_trees import DOWN, ETHERNET, RDMA_CM, PortTree, adapter, rxe
from tests.backends.trees import planted_host

PF, VF, OTHER = "0000:3b:00.0", "0000:3b:00.2", "0000:86:00.0"
TREE = (
    RDMA_CM
    + adapter("mlx5_0", PF, (PortTree(), DOWN), number=0, first_port=0, virtual=[VF], netdevs=["ib0"])
    + adapter("mlx5_1", VF, number=1, first_port=2, physical=PF)
    + rxe(number=7)
)
ALONE = adapter("mlx5_9", OTHER, (ETHERNET,), number=9, first_port=9, kind="020000", netdevs=["eth9"])

SHARED, APART = resource("rdma/shared", shared=2), resource("rdma/apart", select=[{"address": (OTHER,)}])


def everything(found: InfiniBand) -> tuple[dict[str, Device], list[Problem]]:
    """All that the daemon asks of what it found."""
    looks = {unit: found.discover(unit) for unit in found.units()}
    devices = {device.key: device for look in looks.values() for device in look.devices}
    for device in devices.values():
        list(found.probe(device))
        for made in found.resources:
            if not device.unusable and device.resource in (None, made.name) and found.ids(made, device):
                found.edits(made, [Grant(one, device) for one in found.ids(made, device)])
    return devices, [problem for look in looks.values() for problem in look.problems]


def test_one_unreadable_adapter_does_not_take_the_pool_of_all_others(tmp_path: Path) -> None:
    found = InfiniBand(planted_host(tmp_path, TREE + ALONE), [resource("rdma/shared", shared=2)])
    verbs = tmp_path / f"sys/devices/pci0000:00/{OTHER}/infiniband_mad"
    shutil.rmtree(verbs)
    verbs.symlink_to(verbs.name)  # a loop
    with pytest.raises(OSError, match="symbolic links"):
        found.discover(OTHER)
    said = found.discover("pool:rdma/shared")
    assert said.devices[0].attributes["pool"] == ("mlx5_0", "mlx5_1", "rxe0")
    assert [problem.subject for problem in said.problems] == [OTHER]


def test_one_half_removed_adapter_does_not_take_the_pool_of_all_others(tmp_path: Path) -> None:
    """Its uverbs is left, and does not say any more whose it is: the kernel answers ENODEV (ibdev_show)."""
    found = InfiniBand(planted_host(tmp_path, TREE + ALONE), [resource("rdma/shared", shared=2)])
    (tmp_path / f"sys/devices/pci0000:00/{VF}/infiniband_verbs/uverbs1/ibdev").unlink()
    (tmp_path / "sys/class/infiniband/mlx5_1").unlink()
    (tmp_path / f"sys/devices/pci0000:00/{VF}/infiniband").rename(tmp_path / "gone")
    for name in ("umad2", "issm2"):
        (tmp_path / f"sys/devices/pci0000:00/{VF}/infiniband_mad/{name}/ibdev").unlink()
    devices, _ = everything(found)
    assert devices["pool"].attributes["pool"] == ("mlx5_0", "mlx5_9", "rxe0")
    assert "made no RDMA device" in devices[VF].unusable
