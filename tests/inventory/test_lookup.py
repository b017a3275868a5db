"""What a person calls hardware."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import permutations

import pytest

from agent.inventory import lookup
from agent.inventory.inventory import Inventory
from agent.inventory.lookup import AmbiguousError, Place
from agent.runtime.errors import FairleadError, unknown
from backends.base import Device, HostPath, Node
from tests.fakes import KIND, Fake, by_unit, device, held, resource


def find(name: str, *groups: Iterable[Place]) -> frozenset[str]:
    return asyncio.run(lookup.find(name, *groups))


GPU = Place(
    frozenset({"pci:0000:3b:00.0", "pci:0000:3b:00.1"}), "GPU-4711", "nvidia.com/gpu", ("GPU-4711::0", "GPU-4711::1")
)
VF = Place(frozenset({"pci:0000:3c:01.0"}), "vf", depends=frozenset({"pci:0000:3c:00.0"}))
KVM = Place(frozenset({"node:c:10:232"}), "/dev/kvm", "devices.kubevirt.io/kvm", ("0", "1"))
TUN = Place(frozenset({"node:c:10:200"}), "/dev/net/tun", "devices.kubevirt.io/tun", ("0", "1"))
PLACES = (GPU, VF, KVM, TUN)


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("pci:0000:3b:00.1", {"pci:0000:3b:00.1"}),
        ("0000:3b:00.1", {"pci:0000:3b:00.1"}),
        ("c:10:232", {"node:c:10:232"}),
        ("0000:3c:00.0", {"pci:0000:3c:00.0"}),
        ("GPU-4711", GPU.hardware),
        ("GPU-4711::1", GPU.hardware),
        ("nvidia.com/gpu/GPU-4711::1", GPU.hardware),
        ("/dev/kvm", KVM.hardware),
        ("devices.kubevirt.io/tun/0", TUN.hardware),
    ],
)
def test_hardware_is_found_by_its_name_or_address_and_what_a_device_owns_by_key_or_id(
    name: str, hardware: set[str]
) -> None:
    assert find(name, PLACES) == hardware


def test_an_id_that_several_devices_have_is_refused_with_what_tells_them_apart() -> None:
    with pytest.raises(AmbiguousError) as refused:
        find("0", PLACES)
    assert refused.value.sentence == (
        "'0' may be node:c:10:200 of devices.kubevirt.io/tun or node:c:10:232 of devices.kubevirt.io/kvm; "
        "name the one you mean"
    )


def test_two_devices_on_the_same_hardware_are_no_contradiction() -> None:
    assert find("same", [Place(frozenset({"h"}), "same"), Place(frozenset({"h"}), "other", "r", ("same",))]) == {"h"}


HCA = Place(frozenset({"pci:0000:23:00.0", "rdma:0000:23:00.0"}), "0000:23:00.0", "rdma/hca", ("0000:23:00.0",))
SUBFUNCTION = Place(
    frozenset({"rdma:0000:23:00.0-sf1"}), "0000:23:00.0-sf1", "rdma/sf", depends=frozenset({"pci:0000:23:00.0"})
)
PASSED_ON = Place(
    frozenset({"pci:0000:3b:00.0", "pci:0000:3b:00.1"}), "0000:3b:00.0", depends=frozenset({"iommu:0000:3b:00.0"})
)
NVIDIA = Place(frozenset({"pci:0000:3b:00.0"}), "GPU-1", "nvidia.com/gpu", ("GPU-1",))
GROUP = Place(frozenset({"pci:0000:4d:00.0"}), "0000:4d:00.0", depends=frozenset({"iommu:1"}))
POOL = Place(frozenset({"pci:0000:23:00.0", "rdma:0000:23:00.0"}), "pool", "rdma/shared", ("0", "1"))


@pytest.mark.parametrize(
    ("name", "hardware"),
    [
        ("0000:23:00.0", HCA.hardware),
        ("rdma/hca/0000:23:00.0", HCA.hardware),
        ("rdma:0000:23:00.0", {"rdma:0000:23:00.0"}),
        ("0000:23:00.0-sf1", SUBFUNCTION.hardware),
        ("0000:3b:00.0", PASSED_ON.hardware),
        ("0000:3b:00.1", {"pci:0000:3b:00.1"}),
        ("GPU-1", NVIDIA.hardware),
        ("1", {"iommu:1"}),
    ],
)
def test_an_address_is_a_pci_function_with_what_its_device_owns_whatever_else_has_that_address(
    name: str, hardware: set[str]
) -> None:
    for places in permutations((HCA, SUBFUNCTION, PASSED_ON, NVIDIA, GROUP)):
        assert find(name, places) == hardware


@pytest.mark.parametrize("name", ["3b:00.0", "0000:3B:00.0", "00000000:3B:00.0", "PCI:0000:3b:00", "3b:00"])
def test_a_pci_address_may_be_written_as_lspci_nvidia_smi_and_the_kernels_log_have_it(name: str) -> None:
    assert find(name, iter([HCA, NVIDIA, GROUP])) == NVIDIA.hardware


def test_an_address_of_several_is_refused_however_it_is_written() -> None:
    one, other = (Place(frozenset({f"{what}:0000:3b:00.0"}), what) for what in ("node", "rdma"))
    for name in ("0000:3b:00.0", "3b:00.0"):
        with pytest.raises(AmbiguousError, match=r"may be node:0000:3b:00\.0 or rdma:0000:3b:00\.0"):
            find(name, [one, other])


def test_an_address_in_another_domain_is_not_taken_for_one_in_the_first() -> None:
    with pytest.raises(FairleadError, match=r"no device '0001:3b:00\.0'"):
        find("0001:3b:00.0", PLACES)


def test_a_number_that_is_an_id_and_a_group_is_refused() -> None:
    with pytest.raises(AmbiguousError) as refused:
        find("1", [GROUP, POOL])
    assert refused.value.sentence == (
        "'1' may be iommu:1 or pci:0000:23:00.0, rdma:0000:23:00.0 of rdma/shared; name the one you mean"
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [("0000:3b:0.1", "0000:3b:00.1"), ("GPX-4711", "GPU-4711"), ("/dev/kwm", "/dev/kvm")],
)
def test_a_name_that_nothing_has_is_answered_with_the_nearest(name: str, meant: str) -> None:
    with pytest.raises(FairleadError) as refused:
        find(name, PLACES)
    assert refused.value.sentence == f"there is no device {name!r}; did you mean {meant!r}?"


def placed(key: str, *paths: str, parts: tuple[frozenset[str], ...] = (), **attributes: str) -> Place:
    """A device that has these nodes and attributes."""
    nodes = tuple(Node(HostPath(path), path, "rw") for path in paths)
    values = {name: tuple(value.split()) for name, value in attributes.items()}
    found = Device(key, key, frozenset({f"pci:{key}"}), nodes=nodes, parts=parts, attributes=values)
    return Place(found.hardware, key, "r", (key,), device=found)


HCAS = (
    placed("a", "/dev/infiniband/uverbs0", "/dev/infiniband/rdma_cm", hca="mlx5_0", ifname="ens1f0", vendor="15b3"),
    placed("b", "/dev/infiniband/uverbs1", "/dev/infiniband/rdma_cm", hca="mlx5_1", ifname="ens1f1", vendor="10de"),
)


@pytest.mark.parametrize("name", ["mlx5_1", "ens1f1", "/dev/infiniband/uverbs1", "infiniband/uverbs1", "uverbs1"])
def test_a_device_may_be_called_by_a_node_or_an_attribute_that_it_alone_has(name: str) -> None:
    assert find(name, iter(HCAS)) == {"pci:b"}


def test_a_node_of_several_devices_names_none_of_them_and_not_all_of_very_many() -> None:
    with pytest.raises(AmbiguousError) as refused:
        find("rdma_cm", HCAS)
    assert refused.value.sentence == "'rdma_cm' may be pci:a of r or pci:b of r; name the one you mean"
    with pytest.raises(AmbiguousError, match=r"pci:3 of r or 12 more; name the one you mean"):
        find("x", [placed(f"{n:x}", "/dev/x") for n in range(20)])


def test_a_key_or_an_id_goes_before_an_attribute_of_another_and_a_number_is_no_name() -> None:
    assert find("a", (*HCAS, placed("c", hca="a"))) == {"pci:a"}
    for number in ("10de", "0", "0x15b3"):
        with pytest.raises(FairleadError, match=f"no device '{number}'"):
            find(number, (*HCAS, placed("c", minor="0", subsystem="0x15b3")))


def test_an_attribute_with_its_name_is_found_also_where_its_value_is_a_number() -> None:
    cards = (placed("c", serial="692251001124"), placed("d", serial="692251001125", uuid="692251001124"))
    assert find("serial=692251001124", cards) == {"pci:c"}
    for name in ("692251001124", "serial=", "serial", "=692251001124", "uuid=692251001125"):
        with pytest.raises(FairleadError, match="no device"):
            find(name, cards)


def test_a_part_of_a_pool_is_not_taken_for_the_whole_pool() -> None:
    pool = placed("pool", parts=(frozenset({"pci:a"}), frozenset({"pci:b"})), hca="mlx5_0 mlx5_1")
    with pytest.raises(AmbiguousError) as refused:
        find("mlx5_0", [pool])
    assert refused.value.sentence == "'mlx5_0' is a part of 'pool', which is pci:a, pci:b; name the one you mean"


def test_on_a_node_without_devices_there_is_none() -> None:
    with pytest.raises(FairleadError, match=r"there is no device 'x'; there are none at all"):
        find("x", ())


def test_the_inventory_finds_what_it_offers_what_nobody_has_and_what_is_gone_and_still_held() -> None:
    resources = [resource("a.example/one")]
    it = Inventory(resources, {KIND: Fake(*resources)})
    offered = device("d", "a.example/one", hardware=["pci:1"], ids=["d::0"])
    gone = device("old", "a.example/one", hardware=["pci:3"])
    it.update(KIND, by_unit([offered, device("lost", hardware=["pci:2"])]))
    it.claim([held("a.example/one", "old", gone), held("a.example/one", "forgotten")])
    found = {name: find(name, it.places()) for name in ("d", "d::0", "a.example/one/d::0", "lost", "old", "3")}
    assert [hardware for (hardware,) in found.values()] == ["pci:1", "pci:1", "pci:1", "pci:2", "pci:3", "pci:3"]


def test_an_id_with_another_card_behind_it_is_the_card_that_is_there() -> None:
    resources = [resource("a.example/one")]
    it = Inventory(resources, {KIND: Fake(*resources)})
    it.claim([held("a.example/one", "d", device("d", hardware=["pci:1"]))])
    it.update(KIND, by_unit([device("d", "a.example/one", hardware=["pci:2"])]))
    assert find("d", it.places()) == {"pci:2"}


GPUS = tuple(
    Place(
        frozenset({f"pci:0000:{n}b:00.0"}),
        uuid,
        "nvidia.com/gpu",
        (uuid,),
        device=Device(
            uuid,
            uuid,
            frozenset({f"pci:0000:{n}b:00.0"}),
            nodes=(Node(HostPath(f"/dev/nvidia{n}"), f"/dev/nvidia{n}", "rw"),),
            attributes={"vendor": ("10de",), "minor": (str(n),)},
        ),
    )
    for n, uuid in ((3, "GPU-5f3c2a3b-8d1e-4c77"), (5, "GPU-5f3c9999-0000-1111"))
)


@pytest.mark.parametrize(
    "name", ["GPU-5f3c2", "gpu-5F3C2A3B", "GPU-5f3c2a3b-8d…", "GPU-5f3c2a3b...", "5f3c2a3b", "5f3c2a3b-8d"]
)
def test_the_beginning_of_one_id_is_that_device(name: str) -> None:
    assert find(name, GPUS) == GPUS[0].hardware


def test_the_beginning_of_several_ids_is_none_of_them_and_says_so() -> None:
    with pytest.raises(AmbiguousError) as refused:
        find("GPU-5f3c", GPUS)
    assert refused.value.sentence == (
        "'GPU-5f3c' begins 2 names, such as GPU-5f3c2a3b-8d1e-4c77 and GPU-5f3c9999-0000-1111; "
        "write more of the one you mean"
    )
    for short in ("GPU", "5f3c", ""):
        with pytest.raises(FairleadError, match="no device"):
            find(short, GPUS)


@pytest.mark.parametrize(
    "name", ["nvidia5", "/dev/nvidia5", "GPU-5f3c9999-0000-1111", "nvidia.com/gpu/GPU-5f3c9999-0000-1111"]
)
def test_what_was_offered_is_found_by_what_it_was_called_then(name: str) -> None:
    there = Place(frozenset({"pci:0000:5b:00.0"}), "0000:5b:00.0", device=Device("u", "0000:5b:00.0", frozenset()))
    assert find(name, [there, GPUS[0]], (), [GPUS[1]]) == {"pci:0000:5b:00.0"}


def test_a_name_is_the_device_that_has_it_now_not_the_one_that_had_it() -> None:
    old = GPUS[1]._replace(hardware=frozenset({"pci:old"}))
    assert find("nvidia5", GPUS, (), [old]) == GPUS[1].hardware


@pytest.mark.parametrize(
    ("known", "said"),
    [
        ([f"nvidia{n}" for n in range(8)], "are nvidia0 to nvidia7"),
        (["nvidia2", "nvidia5", "nvidiactl"], "are nvidia2, nvidia5"),
        (["nvidia5"], "is nvidia5"),
    ],
)
def test_of_names_with_another_number_none_is_suggested(known: list[str], said: str) -> None:
    assert unknown("device", "nvidia9", known, elsewhere="look") == f"there is no device 'nvidia9'; there {said}"


def test_a_miss_says_what_was_meant_and_lists_nothing() -> None:
    with pytest.raises(FairleadError, match=r"no device 'nvida5'; did you mean 'nvidia5'\?$"):
        find("nvida5", GPUS)
    with pytest.raises(FairleadError) as refused:
        find("toaster", [Place(frozenset({f"h{n}"}), f"card-{n}") for n in range(15)])
    assert refused.value.sentence == "there is no device 'toaster'; `fairlead devices` lists what there is"
