"""Which events concern which adapters."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from backends.base import ALL, All, Hint, HostPath, Known, LinkChange, PathChange, Seconds, Uevent
from backends.infiniband import InfiniBand
from backends.linux import rdma
from tests.backends.infiniband.test_backend import PF, VF, resource
from tests.backends.rdma_trees import adapter, hca, rxe
from tests.backends.trees import planted_host

BELOW = "pci0000:3a/0000:3a:01.0"
AT = f"/devices/{BELOW}/{PF}"
SF = f"{PF}/mlx5_core.sf.4"
POOL = "pool:rdma/shared"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> InfiniBand:
    tree = adapter("mlx5_0", PF, below=BELOW, netdevs=["ib0"])
    tree += adapter("mlx5_1", VF, below=BELOW, physical=PF, number=1)
    tree += hca("mlx5_2", f"{BELOW}/{SF}", number=2)
    tree += rxe("rxe0", "eth0", number=3)
    shared = resource("rdma/shared", shared=2, select=[{"hca": ("mlx5_0",)}], poll=Seconds(1))
    return InfiniBand(planted_host(tmp_path_factory.mktemp("node"), tree), [shared, resource()])


def affected(found: InfiniBand, hint: Hint) -> set[str] | All:
    known = Known({unit: found.discover(unit).devices for unit in found.units()})
    units: Iterable[str] | All = found.affects(hint, known)
    return units if units is ALL else set(units)


def event(path: str, subsystem: str, action: str = "change", **properties: str) -> Uevent:
    return Uevent(action, subsystem, path, properties=properties)


@pytest.mark.parametrize(
    ("hint", "units"),
    [
        (event(f"{AT}/infiniband/mlx5_0", "infiniband", "add"), {PF, POOL}),
        (event(f"{AT}/infiniband_verbs/uverbs0", "infiniband_verbs", "remove"), {PF, POOL}),
        (event(f"{AT}/infiniband_mad/umad0", "infiniband_mad", "add"), {PF, POOL}),
        (event(f"{AT}/mlx5_core.sf.4/infiniband/mlx5_2", "infiniband", "add"), {SF, POOL}),
        (event("/devices/virtual/infiniband/rxe1", "infiniband", "add"), {"rxe1", POOL}),
        (event(f"{AT}/net/ib0", "net", "add"), {PF, VF, SF, POOL}),
        (event(AT, "pci", "unbind"), {PF, VF, SF}),
        (event(f"/devices/{BELOW}", "pci", "remove"), {PF, VF, SF, "0000:3a:01.0"}),
        (event("/devices/virtual/misc/rdma_cm", "misc", "add"), ALL),
        (PathChange(rdma.NODES), ALL),
        (PathChange(rdma.RDMA_CM), ALL),
        (PathChange(rdma.NODES / "umad1"), {VF}),
        (LinkChange("ib0", 7), {PF}),
        (LinkChange("eth0", 2), {"rxe0"}),
        (event("/devices/virtual/net/veth0", "net", "add"), set()),
        (event("/devices/virtual/misc/kvm", "misc"), set()),
        (event("/devices/pci0000:00/0000:00:02.0/net/eth9", "net", "add"), set()),
        (PathChange(HostPath("/dev/nvidia0")), set()),
        (LinkChange("veth0", 9), set()),
    ],
)
def test_an_event_leads_to_its_adapters(found: InfiniBand, hint: Hint, units: set[str] | All) -> None:
    assert affected(found, hint) == units


def test_an_adapter_that_is_renamed_leads_to_both_names(found: InfiniBand) -> None:
    renamed = event(
        "/devices/virtual/infiniband/mlx5_9", "infiniband", "move", DEVPATH_OLD="/devices/virtual/infiniband/rxe0"
    )
    assert affected(found, renamed) == {"mlx5_9", "rxe0", POOL}


def test_a_node_without_hardware_leads_to_all_adapters_without(found: InfiniBand) -> None:
    units = affected(found, event("/devices/virtual/infiniband_verbs/uverbs3", "infiniband_verbs", "remove"))
    assert units == {"rxe0", "uverbs3", POOL}


def test_it_listens_to_what_tells_of_adapters_and_polls_for_what_does_not(found: InfiniBand) -> None:
    watches = found.watches(Known())
    assert {"infiniband", "infiniband_verbs", "infiniband_mad", "pci", "net"} <= watches.subsystems
    assert watches.directories == {rdma.NODES}
    assert watches.facts == {"ERROR_EVENT"}
    assert watches.links
    assert watches.poll == 1.0
