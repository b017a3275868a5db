"""The `sriov` backend: what is offered, chosen and left to the host, and what a container gets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.inventory.ownership import is_same
from agent.inventory.shortfall import not_offered
from agent.inventory.survey import survey
from agent.model import Held
from backends.base import (
    AllocationRefused,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    Known,
    Released,
    Resource,
    ResourceSpec,
    Selector,
    Uevent,
    Verdict,
)
from backends.infiniband import InfiniBand
from backends.sriov import Sriov, SriovOptions, SriovResource
from tests.backends.kernel_calls import kernel_calls
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import DOWN, ETHERNET, RDMA_CM, exclusive, hca
from tests.backends.sriov.sriov_trees import (
    CONNECTX,
    E810,
    ROUTES,
    everything,
    small,
    subfunction,
    vdpa_device,
    vfio_function,
)
from tests.backends.trees import planted_host

VHOST = "dev/vhost-net c 10:238\ndev/net/tun c 10:200\n"


def resource(*select: Selector, name: str = "intel.com/sriov_net", replicas: int = 1, **options: Any) -> SriovResource:
    return Resource(name, ResourceSpec("sriov", SriovOptions(**options), select=select, replicas=replicas))


def backend(root: Path, tree: str, *resources: SriovResource) -> Sriov:
    return Sriov(planted_host(root, ROUTES + tree), resources or (resource(),))


def offered(found: Sriov) -> dict[str, list[str]]:
    """Resource → the IDs that it offers: of the first resource that could have them."""
    every: dict[str, list[str]] = {of.name: [] for of in found.resources}
    taken: set[str] = set()
    for device in devices(found):
        if device.unusable:
            continue
        of = found.resource(str(device.resource))
        if of.refuses(device) is None and device.key not in taken:
            every[of.name].append(device.key)
            taken.add(device.key)
    return every


def devices(found: Sriov) -> list[Device]:
    return [device for unit in found.units() for device in found.discover(unit).devices]


def edits(found: Sriov, *addresses: str) -> ContainerEdits:
    (of,) = found.resources
    return found.edits(of, [Grant(a, device) for a in addresses for device in found.discover(a).devices])


def nodes(said: ContainerEdits) -> list[tuple[str, str, str]]:
    return [(node.path.text, node.container_path, node.permissions) for node in said.nodes]


def info(said: ContainerEdits, name: str = "PCIDEVICE_INTEL_COM_SRIOV_NET_INFO") -> Any:
    return json.loads(said.env[name])


# --- what is offered ---


@pytest.fixture(scope="module")
def both_cards(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """An E810 and a ConnectX with 64 virtual functions each."""
    return planted_host(tmp_path_factory.mktemp("cards"), everything())


@pytest.mark.parametrize(("rdma", "most"), [(False, 31), (True, 56)])
def test_one_of_many_virtual_functions_is_read_with_few_calls(both_cards: Host, rdma: bool, most: int) -> None:
    found = Sriov(both_cards, (resource(rdma=rdma),))
    assert kernel_calls(lambda: found.discover(CONNECTX.vf(7))) <= most


def numbers(*chosen: int) -> tuple[str, ...]:
    return tuple(map(str, chosen))


@pytest.mark.parametrize(
    ("selectors", "options", "expected"),
    [
        ([], {}, [*map(E810.vf, range(64)), *map(CONNECTX.vf, range(64))]),
        ([{"vendor": ("8086",), "device": ("1889",)}], {}, [*map(E810.vf, range(64))]),
        ([{"driver": ("mlx5_core",)}], {}, [*map(CONNECTX.vf, range(64))]),
        ([{"pf": ("ENS1F0",), "vf": numbers(0, 3, 4, 5)}], {}, [*map(E810.vf, (0, 3, 4, 5))]),
        ([{"physical": (CONNECTX.address,), "vf": numbers(63)}], {}, [CONNECTX.vf(63)]),
        ([{"pf": ("ens1f0",), "vf": numbers(1)}, {"pf": ("ens2f0np0",), "vf": numbers(2)}], {}, [E810.vf(1), CONNECTX.vf(2)]),
        ([{"address": (E810.vf(7),)}], {}, [E810.vf(7)]),
        ([{"link_layer": ("infiniband",)}], {}, []),
        ([], {"rdma": True}, [*map(CONNECTX.vf, range(64))]),
        ([{"function": ("physical",)}], {}, []),
    ],
    ids=["all", "model", "driver", "pf", "root", "either pf", "address", "link", "rdma", "the cards themselves"],
)  # fmt: skip
def test_virtual_functions_are_chosen_as_they_were(
    both_cards: Host, selectors: Sequence[Selector], options: Any, expected: list[str]
) -> None:
    found = Sriov(both_cards, [resource(*selectors, **options)])
    assert offered(found) == {"intel.com/sriov_net": expected}


def test_a_function_belongs_to_the_first_resource_that_has_all_that_it_asks_for(tmp_path: Path) -> None:
    tree = small(E810).tree() + small(CONNECTX, 2).tree() + RDMA_CM
    some, with_rdma, rest = (
        resource({"pf": ("ens1f0",), "vf": numbers(1, 2)}, name="a.b/some"),
        resource(name="a.b/rdma", rdma=True),
        resource(name="a.b/rest"),
    )
    found = backend(tmp_path, tree, some, with_rdma, rest)
    built = [device.resource for device in found.discover(CONNECTX.vf(0)).devices]
    assert built == ["a.b/rdma", "a.b/rest"]  # a pod may have it of the second
    assert offered(found) == {
        "a.b/some": [E810.vf(1), E810.vf(2)],
        "a.b/rdma": [CONNECTX.vf(0), CONNECTX.vf(1)],
        "a.b/rest": [E810.vf(0), E810.vf(3)],
    }


async def test_of_a_function_that_no_resource_takes_each_tells_why(tmp_path: Path) -> None:
    one, two = resource({"pf": ("eth0",)}, name="a.b/one"), resource({"vf": ("7",)}, name="a.b/two")
    # which takes no network card, whatever it selects
    accelerators = resource({"vendor": ("8086",)}, name="a.b/acc", device_type="accelerator")
    found = backend(tmp_path, small(E810, 1).tree(), one, two, accelerators)
    known = (await survey(found.resources, {"sriov": found}, 5.0)).inventory
    (why,) = {it.why for it in not_offered(known)}
    assert why == "a.b/one does not take it: pf is ens1f0, not eth0; a.b/two does not take it: vf is 0, not 7"


async def test_a_selector_is_told_what_functions_have_that_another_resource_takes(tmp_path: Path) -> None:
    mine, mistaken = resource({"pf": ("ens1f0",)}, name="a.b/mine"), resource({"pf": ("ens1f0_0",)}, name="a.b/x")
    found = backend(tmp_path, small(E810).tree(), mine, mistaken)
    ((_, problem),) = (await survey(found.resources, {"sriov": found}, 5.0)).problems
    assert problem.sentence == (
        "a.b/x: its selector pf = 'ens1f0_0' matches nothing; the sriov backend found pf ens1f0 (4), unknown (1)"
    )


def test_each_resource_is_told_what_a_function_lacks_for_it(tmp_path: Path) -> None:
    found = backend(tmp_path, small(E810).tree(), resource(name="a.b/rdma", rdma=True), resource(name="a.b/any"))
    told = {device.resource: device.unusable for device in found.discover(E810.vf(0)).devices}
    assert told == {"a.b/rdma": "it has no RDMA device, which a.b/rdma asks for (rdma)", "a.b/any": ""}


def test_a_device_is_its_function_and_hangs_on_the_card(tmp_path: Path) -> None:
    tree = small(E810).tree()
    found = backend(tmp_path, tree)
    device = next(device for device in devices(found) if device.key == E810.vf(2))
    assert device.unit == E810.vf(2)
    assert device.hardware == {f"pci:{E810.vf(2)}"}
    assert device.depends == {f"pci:{E810.address}", f"link:{E810.address}"}
    assert {name: device.attributes[name] for name in ("pf", "vf", "ifname", "link_layer", "function")} == {
        "pf": ("ens1f0",),
        "vf": ("2",),
        "ifname": ("ens1f0v2",),
        "link_layer": ("Ethernet",),
        "function": ("virtual",),
    }
    assert device.numa_node == 0
    excluded = Sriov(Host.below(tmp_path), [resource(topology=False)])
    assert {device.numa_node for device in devices(excluded)} == {None}


def test_a_card_without_virtual_functions_is_offered_and_one_that_the_host_needs_is_not(tmp_path: Path) -> None:
    idle, used = small(E810, 0), replace(small(CONNECTX, 0), rdma=False)
    tree = idle.tree() + used.tree()
    tree += "proc/1/net/route = Iface\\nbond0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    tree += "sys/class/net/bond0 -> ../../devices/virtual/net/bond0\nsys/devices/virtual/net/bond0/\n"
    tree += f"sys/devices/{used.below}/{used.address}/net/{used.netdev}/upper_bond0 -> ../x\n"
    found = backend(tmp_path, tree)
    assert offered(found) == {"intel.com/sriov_net": [idle.address]}
    (withheld,) = found.discover(used.address).devices
    assert (withheld.resource, withheld.unusable, withheld.by_design) == (
        "intel.com/sriov_net",
        f"it carries the default route, through {used.netdev} and bond0",
        True,
    )
    elsewhere = Sriov(found.host, [resource({"vendor": ("8086",)})])
    assert elsewhere.discover(used.address).devices == ()  # what no resource wants is not shown


@pytest.mark.parametrize("virtual", [0, 1], ids=["a card", "a virtual function that is down"])
def test_a_port_of_open_vswitch_is_left_to_the_host_until_it_leaves(tmp_path: Path, virtual: int) -> None:
    """As the kernel links it (net/openvswitch/vport-netdev.c); tests/guest/uplinks.py has a kernel do so."""
    card = small(E810, virtual)
    function_, name = (card.vf(0), f"{card.netdev}v0") if virtual else (card.address, card.netdev)
    found = backend(tmp_path, card.tree() + "sys/class/net/ovs-system -> ../../devices/virtual/net/ovs-system\n")
    (offer,) = found.discover(function_).devices
    link = tmp_path / f"sys/class/net/{name}/master"
    link.symlink_to("/sys/devices/virtual/net/ovs-system")
    (withheld,) = found.discover(function_).devices
    assert withheld.unusable == f"it has the network interface {name}, which is part of ovs-system"
    with pytest.raises(AllocationRefused, match="which is part of ovs-system"):
        found.claim(found.resources[0], [Grant(offer.key, offer)])
    link.unlink()
    assert found.discover(function_).devices == (offer,)


def test_a_card_with_an_address_is_offered_as_elsewhere_and_says_so(tmp_path: Path) -> None:
    card = small(E810, 0)
    connected = f"{card.netdev}\t0002A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"
    found = Sriov(planted_host(tmp_path, f"{ROUTES.rstrip()}\\n{connected}\n{card.tree()}"), [resource()])
    (device,) = found.discover(card.address).devices
    assert not device.unusable
    (signal,) = found.probe(device)
    assert (signal.reason, signal.verdict) == ("has-address", Verdict.INFO)
    assert f"has an address or a route of the host at the network interface {card.netdev}" in signal.message


def test_without_the_routes_virtual_functions_are_offered_and_whole_cards_are_not(tmp_path: Path) -> None:
    idle = small(CONNECTX, 0)
    found = Sriov(planted_host(tmp_path, idle.tree() + small(E810, 1).tree()), [resource()])
    assert offered(found) == {"intel.com/sriov_net": [E810.vf(0)]}
    assert "the routes cannot be read" in found.discover(idle.address).devices[0].unusable


def test_an_adapter_that_manages_nvswitches_is_left_to_fabric_manager(tmp_path: Path) -> None:
    one, mark = "0000:05:00.0", {"vpd": "x SMDL=SW_MNG"}
    found = backend(tmp_path, function(one, "15b3:1021", kind="020700", driver="mlx5_core", files=mark))
    assert offered(found) == {"intel.com/sriov_net": []}
    (device,) = found.discover(one).devices
    assert device.by_design
    assert device.unusable.startswith("it leads to the NVSwitches between the GPUs")


def test_a_card_with_virtual_functions_and_a_function_without_a_driver_are_told_and_not_offered(tmp_path: Path) -> None:
    tree = small(E810).tree(bare=[3]) + E810.virtual_function(3, None)
    found = backend(tmp_path, tree, resource({"driver": ("iavf",)}))
    assert offered(found) == {"intel.com/sriov_net": [E810.vf(n) for n in range(3)]}
    why = "it has 4 virtual functions, which would go with it"
    assert found.discover(E810.address).beside[0].unusable == why
    meant = backend(tmp_path / "meant", tree, resource({"function": ("physical",)}))
    assert meant.discover(E810.address).devices[0].unusable == why
    assert found.discover(E810.vf(3)).devices[0].unusable == "it has no driver"


def test_the_card_s_own_interface_is_found_among_those_of_switchdev_ports(tmp_path: Path) -> None:
    card = small(CONNECTX, 1)
    at = f"sys/devices/{card.below}/{card.address}/net"
    tree = card.tree() + f"sys/class/net/aaa -> ../../devices/{card.below}/{card.address}/net/aaa\n"
    tree += f"{at}/aaa/phys_port_name = pf0vf0\n{at}/{card.netdev}/phys_port_name = p0\n"
    (device,) = devices(backend(tmp_path, tree))
    assert device.attributes["pf"] == (card.netdev,)


def test_an_accelerator_is_offered_to_a_resource_for_accelerators_alone(tmp_path: Path) -> None:
    tree = function("0000:f7:00.0", "8086:0d5d", kind="120000", driver="vfio-pci", group=5) + small(E810, 1).tree()
    cards, nets = resource(name="intel.com/fec", device_type="accelerator"), resource()
    assert offered(backend(tmp_path, tree, cards, nets)) == {
        "intel.com/fec": ["0000:f7:00.0"],
        "intel.com/sriov_net": [E810.vf(0)],
    }


@pytest.mark.parametrize(
    ("selector", "takes"),
    [({"pkey": ("0x8001",)}, True), ({"pkey": ("0x7fff",)}, False), ({"link_layer": ("InfiniBand",)}, True)],
)
def test_an_infiniband_function_is_chosen_by_its_partition_key(tmp_path: Path, selector: Selector, takes: bool) -> None:
    card = replace(small(CONNECTX, 1), kind="020700")
    key = f"{card.vf_path(0)}/infiniband/mlx5_2/ports/1/pkeys/0 = 0x8001\n"
    assert offered(backend(tmp_path, card.tree() + key, resource(selector))) == {
        "intel.com/sriov_net": [card.vf(0)] if takes else []
    }


def test_an_interface_in_a_pod_takes_no_function_from_its_resource(tmp_path: Path) -> None:
    tree = small(E810, 1).tree(bare=[0]) + E810.virtual_function(0, net=[], files={})
    found = backend(tmp_path, tree, resource({"ifname": ("ens1f0v0",), "pf": ("ens1f0",)}))
    assert offered(found) == {"intel.com/sriov_net": [E810.vf(0)]}
    assert list(found.probe(devices(found)[0])) == []


def test_a_card_with_subfunctions_is_not_offered_beside_them(tmp_path: Path) -> None:
    tree = small(CONNECTX, 0).tree() + subfunction(CONNECTX, 2, 88)
    cards, sfs = resource(), resource(name="a.b/sf", device_type="auxNetDevice")
    found = backend(tmp_path, tree, cards, sfs)
    assert offered(found) == {"intel.com/sriov_net": [], "a.b/sf": ["mlx5_core.sf.2"]}
    no_subfunctions = backend(tmp_path, tree, cards)
    assert no_subfunctions.discover("mlx5_core.sf.2") == Discovery(), "its events come, though no resource wants it"
    (card,) = found.discover(CONNECTX.address).devices
    assert card.unusable == "it has 1 subfunction, which would go with it"


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ({}, [2, 3, 4]),
        ({"pf": ("ens2f0np0",), "sfnum": numbers(88, 89)}, [2, 3]),
        ({"physical": (CONNECTX.address,), "vendor": ("15b3",)}, [2, 3, 4]),
        ({"sfnum": numbers(1)}, []),
    ],
)
def test_subfunctions_are_chosen_by_their_card_and_number_beside_its_virtual_functions(
    tmp_path: Path, selector: Selector, expected: list[int]
) -> None:
    tree = small(CONNECTX, 1).tree() + "".join(subfunction(CONNECTX, index, 86 + index) for index in (2, 3, 4))
    cards, sfs = resource(), resource(*filter(None, [selector]), name="a.b/sf", device_type="auxNetDevice")
    assert offered(backend(tmp_path, tree, cards, sfs)) == {
        "intel.com/sriov_net": [CONNECTX.vf(0)],
        "a.b/sf": [f"mlx5_core.sf.{index}" for index in expected],
    }


def test_a_subfunction_is_told_by_its_name_and_comes_with_its_rdma_nodes(tmp_path: Path) -> None:
    tree = small(CONNECTX, 0).tree() + RDMA_CM + subfunction(CONNECTX, 2, 88, rdma=True)
    found = backend(tmp_path, tree, resource(device_type="auxNetDevice", rdma=True))
    (device,) = devices(found)
    assert device.hardware == {"aux:mlx5_core.sf.2", f"rdma:{CONNECTX.address}-sf88"}
    (adapter,) = InfiniBand(Host.below(tmp_path), []).discover(f"{CONNECTX.address}/mlx5_core.sf.2").devices
    assert adapter.hardware <= device.hardware  # so that only one of the two backends' resources has it
    said = edits(found, "mlx5_core.sf.2")
    assert said.env["PCIDEVICE_INTEL_COM_SRIOV_NET"] == "mlx5_core.sf.2"
    assert info(said)["mlx5_core.sf.2"]["generic"] == {"deviceID": "mlx5_core.sf.2"}
    assert info(said)["mlx5_core.sf.2"]["rdma"]["uverbs"] == "/dev/infiniband/uverbs2"
    found.claim(found.resources[0], [Grant(device.key, device)])
    assert not (tmp_path / "run/k8s.cni.cncf.io").exists()
    assert [one.reason for one in found.probe(device)] == []
    (tmp_path / f"sys/class/net/{CONNECTX.netdev}/operstate").write_text("down\n")
    assert [one.reason for one in found.probe(device)] == ["link-down"]
    known = Known({device.unit: (device,)})
    of_it = f"/devices/{CONNECTX.below}/{CONNECTX.address}/mlx5_core.sf"
    assert found.affects(Uevent("remove", "auxiliary", f"{of_it}.2"), known) == ("mlx5_core.sf.2",)
    assert found.affects(Uevent("add", "auxiliary", f"{of_it}.2/mlx5_core.eth.2"), known) == ()


def test_a_subfunction_that_has_the_name_of_another_after_a_boot_is_another(tmp_path: Path) -> None:
    """Each port of a card has one with the same number, and the kernel numbers their devices as they come."""
    other = replace(CONNECTX, address="0000:5e:00.1", netdev="ens2f1np1")
    trees = small(CONNECTX, 0).tree() + small(other, 0).tree()
    before, after = (
        next(
            device
            for device in devices(backend(tmp_path / when, tree, resource(device_type="auxNetDevice")))
            if device.key == "mlx5_core.sf.2"
        )
        for when, tree in (
            ("before", trees + subfunction(CONNECTX, 2, 88)),
            ("after", trees + subfunction(other, 2, 88)),
        )
    )
    claim = Held.of("a.b/sf", before.key, "sriov", before)
    assert is_same(claim, before)
    assert not is_same(claim, after)


# --- what a container gets ---


def test_the_container_learns_its_functions_in_the_order_of_their_ids(tmp_path: Path) -> None:
    found = backend(tmp_path, small(E810).tree(), resource(name="intel.com/My-pool.v2"))
    said = edits(found, E810.vf(2), E810.vf(0))
    assert said.env == {
        "PCIDEVICE_INTEL_COM_MY-POOL_V2": "0000:3b:01.2,0000:3b:01.0",
        "PCIDEVICE_INTEL_COM_MY-POOL_V2_INFO": '{"0000:3b:01.0":{"generic":{"deviceID":"0000:3b:01.0"}},'
        '"0000:3b:01.2":{"generic":{"deviceID":"0000:3b:01.2"}}}',
    }
    assert not said.nodes


@pytest.mark.parametrize("noiommu", [False, True])
def test_a_function_on_vfio_comes_with_its_group(tmp_path: Path, noiommu: bool) -> None:
    tree = small(E810, 2).tree(bare=[0, 1]) + "dev/vfio/vfio c 10:196\n"
    tree += vfio_function(E810, 0, 70, noiommu=noiommu) + vfio_function(E810, 1, 71, noiommu=noiommu)
    found = backend(tmp_path, tree)
    said = edits(found, E810.vf(0), E810.vf(1))
    on_host = "/dev/vfio/noiommu-" if noiommu else "/dev/vfio/"
    assert nodes(said) == [
        ("/dev/vfio/vfio", "/dev/vfio/vfio", "rw"),
        (f"{on_host}70", "/dev/vfio/70", "rw"),
        (f"{on_host}71", "/dev/vfio/71", "rw"),
    ]
    assert info(said)[E810.vf(1)]["vfio"] == {"mount": "/dev/vfio/vfio", "dev-mount": "/dev/vfio/71"}
    assert [list(found.probe(device)) for device in devices(found)] == [[], []]


def test_a_function_on_uio_comes_with_its_node(tmp_path: Path) -> None:
    tree = small(E810, 1).tree(bare=[0]) + E810.virtual_function(0, "igb_uio") + f"{E810.vf_path(0)}/uio/uio4/\n"
    said = edits(backend(tmp_path, tree), E810.vf(0))
    assert nodes(said) == [("/dev/uio4", "/dev/uio4", "rw")]
    assert info(said)[E810.vf(0)]["uio"] == {"mount": "/dev/uio4"}


@pytest.mark.parametrize("in_a_pod", [False, True], ids=["on the host", "in another pod's namespace"])
def test_rdma_comes_with_the_nodes_of_every_port(tmp_path: Path, in_a_pod: bool) -> None:
    place = f"{CONNECTX.below}/{CONNECTX.vf(0)}"
    tree = small(CONNECTX, 1).tree(bare=[0]) + RDMA_CM + exclusive()
    tree += replace(CONNECTX, rdma=False).virtual_function(0)
    tree += hca("mlx5_2", place, (ETHERNET, DOWN), number=2, seen=not in_a_pod)
    said = edits(backend(tmp_path, tree, resource(rdma=True)), CONNECTX.vf(0))
    names = ["issm2", "issm3", "umad2", "umad3", "uverbs2", "rdma_cm"]
    assert nodes(said) == [(f"/dev/infiniband/{name}", f"/dev/infiniband/{name}", "rw") for name in names]
    assert info(said)[CONNECTX.vf(0)]["rdma"] == {
        "issm": "/dev/infiniband/issm3",
        "umad": "/dev/infiniband/umad3",
        "uverbs": "/dev/infiniband/uverbs2",
        "rdma_cm": "/dev/infiniband/rdma_cm",
        "rdma_dev": "mlx5_2",
    }


def test_vhost_net_comes_with_both_nodes_or_none(tmp_path: Path) -> None:
    found = backend(tmp_path, small(E810, 1).tree() + VHOST, resource(vhost_net=True))
    said = edits(found, E810.vf(0))
    assert nodes(said) == [(name, name, "rw") for name in ("/dev/vhost-net", "/dev/net/tun")]
    assert info(said)[E810.vf(0)]["vhost"] == {"net-mount": "/dev/vhost-net", "tun-mount": "/dev/net/tun"}
    (tmp_path / "dev/net/tun").unlink()
    said = edits(found, E810.vf(0))
    assert (nodes(said), "vhost" in info(said)[E810.vf(0)]) == ([], False)


@pytest.mark.parametrize(("driver", "kind"), [("vhost_vdpa", "vhost"), ("virtio_vdpa", "virtio")])
def test_a_vdpa_device_comes_with_its_node_if_it_has_one(tmp_path: Path, driver: str, kind: Any) -> None:
    tree = small(CONNECTX, 2).tree() + vdpa_device(CONNECTX, 0, "green", driver, "vhost-vdpa-3")
    found = backend(tmp_path, tree, resource(vdpa=kind, name="a.b/vdpa"))
    assert offered(found) == {"a.b/vdpa": [CONNECTX.vf(0)]}
    said = edits(found, CONNECTX.vf(0))
    node = "/dev/vhost-vdpa-3"
    has_node = kind == "vhost"
    assert nodes(said) == ([(node, node, "rw")] if has_node else [])
    assert info(said, "PCIDEVICE_A_B_VDPA_INFO")[CONNECTX.vf(0)]["vdpa"] == ({"mount": node} if has_node else {})
    found.claim(found.resources[0], [Grant(CONNECTX.vf(0), devices(found)[0])])
    assert told(tmp_path, "a.b-vdpa", CONNECTX.vf(0)) == {
        "type": "vdpa",
        "version": "1.1.0",
        "vdpa": {"parent-device": "green", "driver": kind, "pci-address": CONNECTX.vf(0)}
        | ({"path": node} if has_node else {}),
    }


def test_additional_info_is_merged_and_written_as_go_writes_it(tmp_path: Path) -> None:
    more = {"*": {"mtu": "9000", "zone": "<a&b>"}, E810.vf(1): {"mtu": "1500"}}
    said = edits(backend(tmp_path, small(E810).tree(), resource(additional_info=more)), E810.vf(0), E810.vf(1))
    text = said.env["PCIDEVICE_INTEL_COM_SRIOV_NET_INFO"]
    assert text.startswith(r'{"0000:3b:01.0":{"extra":{"mtu":"9000","zone":"\u003ca\u0026b\u003e"},"generic":')
    assert info(said)[E810.vf(1)]["extra"] == {"mtu": "1500", "zone": "<a&b>"}


# --- what CNI plugins are told ---


def told(root: Path, resource_part: str, device_id: str) -> Any:
    directory = root / "run/k8s.cni.cncf.io/devinfo/dp"
    return json.loads((directory / f"{resource_part}-{device_id}-device.json").read_text())


def test_cni_plugins_are_told_before_the_answer_and_until_no_pod_holds_it(tmp_path: Path) -> None:
    tree = ROUTES + small(CONNECTX, 2).tree() + RDMA_CM
    found = backend(tmp_path, tree, resource(rdma=True))
    (of,) = found.resources
    every = devices(found)
    found.claim(of, [Grant(device.key, device) for device in every])
    assert told(tmp_path, "intel.com-sriov_net", CONNECTX.vf(0)) == {
        "type": "pci",
        "version": "1.1.0",
        "pci": {"pci-address": CONNECTX.vf(0), "rdma-device": "mlx5_2"},
    }
    later = Sriov(found.host, ())  # by the next run, which has no such resource
    later.release([Released(of.name, CONNECTX.vf(0), every[0].hardware)], frozenset())
    names = [path.name for path in (tmp_path / "run/k8s.cni.cncf.io/devinfo/dp").iterdir()]
    assert names == [f"intel.com-sriov_net-{CONNECTX.vf(1)}-device.json"]


def test_a_pod_is_refused_a_card_that_the_default_route_leads_through_by_now(tmp_path: Path) -> None:
    idle = small(E810, 0)
    found = backend(tmp_path, idle.tree())
    (device,) = devices(found)
    line = "ens1f0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"
    (tmp_path / "proc/1/net/route").write_text(f"Iface\n{line}")
    with pytest.raises(AllocationRefused, match="carries the default route, through ens1f0"):
        found.claim(found.resources[0], [Grant(device.key, device)])
