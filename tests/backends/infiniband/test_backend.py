"""The `infiniband` backend: what is offered, under which IDs, and what a container gets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.base import (
    ContainerEdits,
    Device,
    Grant,
    Host,
    Known,
    Resource,
    ResourceSpec,
    Selector,
    Uevent,
)
from backends.infiniband import InfiniBand, InfiniBandOptions, InfiniBandResource
from backends.linux import rdma
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import DOWN, ETHERNET, RDMA_CM, PortTree, adapter, exclusive, hca, rxe
from tests.backends.trees import plant, planted_host

PF = "0000:3b:00.0"
VF = "0000:3b:00.1"


def resource(
    name: str = "example.com/hca", *, select: Sequence[Selector] = (), exclude: Sequence[Selector] = (), **options: Any
) -> InfiniBandResource:
    replicas = options.pop("replicas", 1)
    spec = ResourceSpec(
        "infiniband", InfiniBandOptions(**options), select=tuple(select), exclude=tuple(exclude), replicas=replicas
    )
    return Resource(name, spec)


def backend(tmp_path: Path, tree: str, *resources: InfiniBandResource) -> InfiniBand:
    return InfiniBand(planted_host(tmp_path, tree), resources or (resource(),))


def device(tmp_path: Path, tree: str, unit: str = PF, *resources: InfiniBandResource) -> Device:
    (found,) = backend(tmp_path, tree, *resources).discover(unit).devices
    return found


def edits(found: InfiniBand, *units: str) -> ContainerEdits:
    (of,) = found.resources
    devices = [device for unit in units for device in found.discover(unit).devices]
    return found.edits(of, [Grant(device.key, device) for device in devices])


def paths(said: ContainerEdits) -> list[str]:
    return [node.path.text for node in said.nodes]


# --- what it is ---


def test_an_adapter_is_its_pci_function_and_its_ports(tmp_path: Path) -> None:
    tree = adapter("mlx5_0", PF, below="pci0000:3a/0000:3a:01.0", numa_node=1, netdevs=["ib0"])
    found = device(tmp_path, tree)
    assert (found.key, found.unit) == (PF, PF)
    assert found.hardware == {f"pci:{PF}", f"rdma:{PF}"}
    assert found.depends == frozenset()
    assert found.identity == "b83f:d203:00a1:0001"
    assert found.bindings.keys() == found.hardware
    assert all(binding.startswith("mlx5_core:") for binding in found.bindings.values())
    assert (found.numa_node, found.ancestry) == (1, ("pci0000:3a", "0000:3a:01.0"))
    assert not found.unusable


def test_its_attributes_are_what_people_select_by(tmp_path: Path) -> None:
    found = device(tmp_path, adapter("mlx5_0", PF, (PortTree(), DOWN), netdevs=["ib0", "ib1"]))
    expected = {
        "hca": ("mlx5_0",),
        "port": ("mlx5_0:1", "mlx5_0:2"),
        "link_layer": ("InfiniBand", "InfiniBand"),
        "state": ("ACTIVE", "DOWN"),
        "rate": ("400", "unknown"),
        "node_guid": ("b83f:d203:00a1:0001",),
        "board_id": ("MT_0000000838",),
        "fw_ver": ("28.39.1002",),
        "hca_type": ("MT4129",),
        "ifname": ("ib0", "ib1"),
        "vendor": ("15b3",),
        "device": ("1021",),
        "driver": ("mlx5_core",),
        "address": (PF,),
        "function": ("physical",),
    }
    assert {name: found.attributes[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("selector", "takes"),
    [
        ({"vendor": ("15b3",)}, True),
        ({"device": ("1021", "101e")}, True),
        ({"driver": ("mlx5_core",)}, True),
        ({"ifname": ("ib0",)}, True),
        ({"link_layer": ("infiniband",)}, True),
        ({"hca": ("mlx5_1",)}, False),
        ({"state": ("DOWN",)}, False),
        ({"link_layer": ("Ethernet",)}, False),
    ],
)
def test_selectors_of_k8s_rdma_shared_dev_plugin_have_their_attributes(
    tmp_path: Path, selector: Selector, takes: bool
) -> None:
    found = device(tmp_path, adapter("mlx5_0", PF, netdevs=["ib0"]))
    assert (resource(select=[selector]).refuses(found) is None) is takes


def test_a_virtual_function_depends_on_the_function_but_not_on_the_ports_of_its_physical_one(tmp_path: Path) -> None:
    """RoCE goes on through virtual functions while the physical function's own interface is down."""
    found = device(tmp_path, adapter("mlx5_1", VF, physical=PF, guid="0000:0000:0000:0000"), VF)
    assert found.hardware == {f"pci:{VF}", f"rdma:{VF}"}
    assert found.depends == {f"pci:{PF}"}


def test_a_virtual_function_that_is_given_a_guid_while_a_pod_has_it_is_the_same(tmp_path: Path) -> None:
    """As ib-sriov-cni does when the pod starts."""
    found = backend(tmp_path, adapter("mlx5_1", VF, physical=PF, guid="0000:0000:0000:0000"))
    (before,) = found.discover(VF).devices
    found.host.local(rdma.INFINIBAND / "mlx5_1/node_guid").write_text("b83f:d203:00a1:00ff\n")
    (after,) = found.discover(VF).devices
    assert after.attributes["node_guid"] == ("b83f:d203:00a1:00ff",)
    assert before.identity == after.identity == "15b3:1021 15b3:0041"


def test_a_subfunction_is_known_by_the_number_it_was_given(tmp_path: Path) -> None:
    aux = f"pci0000:00/{PF}/mlx5_core.sf.4"
    tree = adapter("mlx5_0", PF) + hca("mlx5_2", aux, (ETHERNET,), number=2) + f"sys/devices/{aux}/sfnum = 88\n"
    found = device(tmp_path, tree, f"{PF}/mlx5_core.sf.4")
    assert found.key == f"{PF}-sf88"
    assert found.hardware == {f"rdma:{PF}-sf88"}
    assert found.depends == {f"pci:{PF}"}
    assert found.ancestry[-1] == PF
    assert found.attributes["function"] == ("subfunction",)
    assert "address" not in found.attributes


def test_a_subfunction_without_a_number_is_known_by_its_device(tmp_path: Path) -> None:
    tree = adapter("mlx5_0", PF) + hca("mlx5_2", f"pci0000:00/{PF}/mlx5_core.sf.4", number=2)
    assert device(tmp_path, tree, f"{PF}/mlx5_core.sf.4").key == f"{PF}-mlx5_core.sf.4"


def test_software_is_known_by_its_name(tmp_path: Path) -> None:
    found = device(tmp_path, rxe(), "rxe0")
    assert (found.key, found.depends) == ("rxe0", frozenset())
    assert found.hardware == {"rdma:rxe0"}
    assert found.attributes["ifname"] == ("eth0",)
    assert (found.numa_node, found.ancestry) == (None, ())


def test_an_hgx_has_eight_adapters_and_their_virtual_functions(tmp_path: Path) -> None:
    tree = RDMA_CM
    for n in range(8):
        pf, vf = f"0000:{n:02x}:00.0", f"0000:{n:02x}:00.1"
        tree += adapter(f"mlx5_{n}", pf, number=n, guid=f"b83f:d203:00a1:{n:04x}", virtual=[vf], numa_node=n // 4)
        tree += adapter(f"mlx5_{n + 8}", vf, (DOWN,), number=n + 8, physical=pf, guid="0000:0000:0000:0000")
    found = backend(tmp_path, tree, resource(exclude=[{"function": ("virtual",)}]))
    devices = [device for unit in found.units() for device in found.discover(unit).devices]
    assert len(devices) == 16
    taken = [device for device in devices if found.resources[0].refuses(device) is None]
    assert [(device.key, device.numa_node) for device in taken] == [(f"0000:{n:02x}:00.0", n // 4) for n in range(8)]
    assert len({device.identity for device in taken}) == 8


def test_the_second_port_of_a_roce_lag_is_told_as_that_and_not_missed(tmp_path: Path) -> None:
    """As `rdma link` and /proc/net/bonding/bond1 show it on nodes of others: one RDMA device, on the first function."""
    first, second = "0000:01:00.0", "0000:01:00.1"
    tree = adapter("mlx5_bond_1", first, (ETHERNET,), netdevs=["enp1s0f0np0"])
    tree += function(second, "15b3:1021", below="pci0000:00", kind="020000", driver="mlx5_core")
    tree += "sys/devices/virtual/net/bond1/bonding/slaves = enp1s0f0np0 enp1s0f1np1\n"
    tree += "sys/class/net/bond1 -> ../../devices/virtual/net/bond1\n"
    for address, name in ((first, "enp1s0f0np0"), (second, "enp1s0f1np1")):
        at = f"devices/pci0000:00/{address}/net/{name}"
        tree += f"sys/class/net/{name} -> ../../{at}\nsys/{at}/master -> ../../../../virtual/net/bond1\n"
    found = backend(tmp_path, tree)
    (port,) = found.discover(second).devices
    assert (port.unusable, port.by_design) == (
        "its port belongs to mlx5_bond_1, the RDMA device of all ports of its bond",
        True,
    )
    begins = Uevent("add", "infiniband", f"/devices/pci0000:00/{first}/infiniband/mlx5_bond_1")
    concerned = found.affects(begins, Known({second: (port,)}))
    assert isinstance(concerned, Iterable)
    assert {first, second} <= {*concerned}
    (tmp_path / "sys/devices/virtual/net/bond1/bonding/slaves").write_text("enp1s0f1np1\n")
    (port,) = found.discover(second).devices
    assert (port.unusable[:39], port.by_design) == ("its driver mlx5_core has made no RDMA d", False)


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        (None, "it has no driver"),
        ("vfio-pci", "it is bound to vfio-pci, for virtual machines"),
        ("mlx5_core", "its driver mlx5_core has made no RDMA device; is mlx5_ib loaded?"),
    ],
)
def test_a_function_that_could_be_an_adapter_says_why_it_is_none(tmp_path: Path, driver: str | None, why: str) -> None:
    found = backend(tmp_path, function(PF, "15b3:1021", kind="020000", driver=driver))
    assert list(found.units()) == [PF]
    (bare,) = found.discover(PF).devices
    assert (bare.key, bare.unusable, list(bare.hardware)) == (PF, why, [f"pci:{PF}"])
    assert list(found.probe(bare)) == []


def test_other_functions_are_not_looked_at(tmp_path: Path) -> None:
    tree = function(PF, "10de:2330") + function(VF, "8086:1592", kind="020000")
    found = backend(tmp_path, tree)
    assert list(found.units()) == []
    assert not found.discover(PF).devices
    assert not found.discover(VF).devices


def test_a_host_without_rdma_has_nothing(tmp_path: Path) -> None:
    found = backend(tmp_path, "")
    assert list(found.units()) == []
    assert not found.discover("mlx5_0").devices


def test_a_port_that_is_asked_for_and_not_there_is_a_problem(tmp_path: Path) -> None:
    found = backend(tmp_path, adapter("mlx5_0", PF), resource(ports=[1, 2])).discover(PF)
    assert [problem.sentence for problem in found.problems] == ["mlx5_0 has no port 2, which example.com/hca asks for"]


# --- what a container gets ---


def test_a_container_gets_every_ports_nodes_and_one_rdma_cm(tmp_path: Path) -> None:
    """Golden: sriov-network-device-plugin, but for port 2, which it loses."""
    tree = RDMA_CM + adapter("mlx4_0", PF, (PortTree(), PortTree()))
    said = edits(backend(tmp_path, tree), PF)
    names = ["issm0", "issm1", "umad0", "umad1", "uverbs0", "rdma_cm"]
    assert paths(said) == [f"/dev/infiniband/{name}" for name in names]
    assert {node.permissions for node in said.nodes} == {"rw"}
    assert all(node.path.text == node.container_path for node in said.nodes)
    assert (said.env, said.mounts, said.annotations) == ({}, (), {})


def test_two_adapters_share_one_rdma_cm_which_comes_last(tmp_path: Path) -> None:
    tree = RDMA_CM + adapter("mlx5_0", PF) + adapter("mlx5_1", VF, number=1)
    said = edits(backend(tmp_path, tree), PF, VF, PF)
    names = ["issm0", "umad0", "uverbs0", "issm1", "umad1", "uverbs1", "rdma_cm"]
    assert paths(said) == [f"/dev/infiniband/{name}" for name in names]


def test_management_nodes_can_be_kept_back(tmp_path: Path) -> None:
    found = backend(tmp_path, RDMA_CM + adapter("mlx5_0", PF), resource(umad=False, issm=False, permissions="rwm"))
    said = edits(found, PF)
    assert paths(said) == ["/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm"]
    assert {node.permissions for node in said.nodes} == {"rwm"}


def test_without_rdma_ucm_there_is_no_rdma_cm(tmp_path: Path) -> None:
    assert "/dev/infiniband/rdma_cm" not in paths(edits(backend(tmp_path, adapter("mlx5_0", PF)), PF))


def test_ids_are_places_and_replicas_of_them(tmp_path: Path) -> None:
    one, several = resource(), resource("example.com/half", replicas=2)
    found = backend(tmp_path, adapter("mlx5_0", PF), one, several)
    (of,) = found.discover(PF).devices
    assert found.ids(one, of) == (PF,)
    assert found.ids(several, of) == (f"{PF}::0", f"{PF}::1")
    assert found.prefers(one)


# --- in another network namespace ---


def moved(tmp_path: Path, *resources: InfiniBandResource) -> tuple[InfiniBand, Device, Device]:
    """The backend, and the adapter before and after a pod took it along."""
    found = backend(tmp_path, exclusive() + RDMA_CM + adapter("mlx5_0", PF, netdevs=["ib0"]), *resources)
    (before,) = found.discover(PF).devices
    take_away(found.host)
    (after,) = found.discover(PF).devices
    return found, before, after


def take_away(host: Host) -> None:
    (host.sys / "class/infiniband/mlx5_0").unlink()
    at = host.sys / f"devices/pci0000:00/{PF}/infiniband"
    at.rename(host.root / "elsewhere")
    (host.sys / f"devices/pci0000:00/{PF}/net/ib0").rmdir()


def test_an_adapter_that_a_pod_took_along_stays(tmp_path: Path) -> None:
    found, before, after = moved(tmp_path)
    assert list(found.units()) == [PF]
    for name in ("key", "unit", "hardware", "depends", "nodes", "numa_node", "ancestry", "bindings"):
        assert getattr(after, name) == getattr(before, name)
    assert after.attributes["hca"] == ("mlx5_0",)
    assert after.identity == ""  # it cannot be seen, and so nobody can say that it is another


def test_it_stays_in_the_resource_that_chose_it_by_what_can_no_longer_be_seen(tmp_path: Path) -> None:
    by_link = resource(select=[{"link_layer": ("InfiniBand",), "ifname": ("ib0", "ib1"), "vendor": ("15b3",)}])
    by_guid = resource("example.com/other", select=[{"vendor": ("8086",), "board_id": ("x",)}])
    _, before, after = moved(tmp_path, by_link, by_guid)
    assert [of.refuses(before) is None for of in (by_link, by_guid)] == [True, False]
    assert [of.refuses(after) is None for of in (by_link, by_guid)] == [True, False]


def test_a_late_module_is_seen_when_it_comes(tmp_path: Path) -> None:
    found = backend(tmp_path, function(PF, "15b3:1021", kind="020700", driver="mlx5_core"))
    assert found.discover(PF).devices[0].unusable
    plant(tmp_path, hca("mlx5_0", f"pci0000:00/{PF}"))
    (late,) = found.discover(PF).devices
    assert (late.key, late.unusable) == (PF, "")


# The words around the mark are made up; the mark is what NVIDIA's nvidia-fabricmanager-start.sh looks for.
SWITCH_MANAGEMENT = {"vpd": "ConnectX-7 MCX0 V0 SMDL=SW_MNG RV"}


@pytest.mark.parametrize("how", [{"files": SWITCH_MANAGEMENT}, {"subsystem": "15b3:0087"}])
def test_an_adapter_that_manages_nvswitches_is_not_offered_unless_it_is_named(tmp_path: Path, how: Any) -> None:
    tree = adapter("mlx5_0", PF, **how)
    found = device(tmp_path, tree, PF, resource(select=[{"vendor": ("15b3",)}]))
    assert found.unusable.startswith("it leads to the NVSwitches between the GPUs, not to a network")
    assert found.nodes == ()
    for name, value in {"address": PF, "hca": "mlx5_0", "manages": "nvswitches"}.items():
        named = device(tmp_path / name, tree, PF, resource(select=[{name: (value,)}]))
        assert named.unusable == ""
        assert named.nodes
    assert device(tmp_path / "late", tree, PF, resource(), resource("a.b/c", select=[{"hca": ("mlx5_0",)}])).unusable


def test_an_adapter_whose_product_data_names_no_switches_is_offered(tmp_path: Path) -> None:
    tree = adapter("mlx5_0", PF, subsystem="15b3:0087", files={"vpd": "ConnectX-7 MCX0 V0 SMDL=MODEL RV"})
    assert device(tmp_path, tree).unusable == ""


def test_a_pool_leaves_out_what_manages_nvswitches(tmp_path: Path) -> None:
    tree = adapter("mlx5_0", PF, files=SWITCH_MANAGEMENT) + adapter("mlx5_1", "0000:5e:00.0", number=1)
    shared = resource(shared=2)
    (pool,) = backend(tmp_path, tree, shared).discover(f"pool:{shared.name}").devices
    assert pool.attributes["pool"] == ("mlx5_1",)
