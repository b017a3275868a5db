"""What a slice says of devices: what the API server takes, the same names for all of a pool, and how each is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from agent.dra import names, slices
from agent.dra.names import Entry
from agent.dra.slices import Offer
from agent.inventory.inventory import Inventory
from agent.model import Health, State
from agent.simulation.api_server import check
from backends.base import HEX4, NUMBER, TEXT, Device
from tests import fakes
from tests.backends.chardev.chardevs import FTDI, Looked, configured
from tests.backends.linux.sticks import device_number, function, stick
from tests.dra.stage import DRIVER, by_claim, claimed
from tests.fakes import device, held

GPU = "example.com/gpu"
KNOWN = {"vendor": HEX4, "minor": NUMBER, "model": TEXT, "uuid": TEXT}


def with_attributes(key: str, **attributes: str) -> Device:
    it = device(key, GPU)
    return replace(it, attributes={**it.attributes, **{name: (value,) for name, value in attributes.items()}})


def offered(it: Inventory, before: Iterable[Offer] = ()) -> list[Offer]:
    return slices.offers(slices.Named(it).of(GPU), it.slots(GPU), it.claims(GPU), before, DRIVER)


def pool(it: Inventory, known: Any = None, driver: str = DRIVER) -> dict[str, Entry]:
    """The devices of the resource, as its slices have them."""
    made = slices.entries(offered(it), GPU, known, driver, (), 1000.0, {})
    devices = [one.entry for one in made.values()]
    check({"devices": devices, "pool": {"resourceSliceCount": 1}})
    return {one["name"]: one for one in devices}


def inventory(*devices: Device, replicas: int = 1) -> Inventory:
    return fakes.inventory(claimed(GPU, replicas), devices=devices)


def test_all_devices_of_a_pool_have_the_same_attributes_typed_as_the_backend_writes_them() -> None:
    one, other = with_attributes("a", vendor="10de", minor="3"), with_attributes("b", model="A very long name " * 9)
    made = pool(inventory(one, other), KNOWN)
    assert made["a"]["attributes"].keys() == made["b"]["attributes"].keys()
    assert made["a"]["attributes"]["minor"] == {"int": 3}
    assert made["b"]["attributes"]["minor"] == {"int": -1}
    assert made["a"]["attributes"]["vendor"] == {"string": "10de"}
    assert made["a"]["attributes"]["resource"] == {"string": GPU}
    assert len(made["b"]["attributes"]["model"]["string"]) == 64


def test_what_all_drivers_call_alike_is_called_so_and_a_numa_node_that_is_unknown_is_none() -> None:
    near = replace(
        device("0000:3b:00.0", GPU, hardware=["pci:0000:3b:00.0"], ancestry=["pci0000:3a", "0000:3a:00.0"]), numa_node=1
    )
    made = pool(inventory(near, device("b", GPU)))
    assert (
        made["0000-3b-00-0"]["attributes"].items()
        >= {
            "resource.kubernetes.io/pciBusID": {"string": "0000:3b:00.0"},
            "resource.kubernetes.io/pcieRoot": {"string": "pci0000:3a"},
            "resource.kubernetes.io/numaNode": {"int": 1},
        }.items()
    )
    assert not any(name.startswith("resource.kubernetes.io/") for name in made["b"]["attributes"])


def test_selectors_for_nvidias_driver_find_nvidias_gpus() -> None:
    uuid = "GPU-5a8c1f3e-0d3b-4b61-9c6e-2f1f3a1b7c90"
    gpu = with_attributes(
        uuid, vendor="10de", uuid=uuid, model="NVIDIA H100 80GB HBM3", brand="Nvidia", architecture="Hopper",
        compute_capability="9.0", driver_version="580.105.08", cuda_version="13.0", addressing_mode="HMM", memory="81559",
    )  # fmt: skip
    theirs = {  # a slice of NVIDIA's driver on a node with H100s, as the repository NVIDIA/aicr shows it
        "addressingMode": {"string": "HMM"},
        "architecture": {"string": "Hopper"},
        "brand": {"string": "Nvidia"},
        "cudaComputeCapability": {"version": "9.0.0"},
        "cudaDriverVersion": {"version": "13.0.0"},
        "driverVersion": {"version": "580.105.8"},
        "productName": {"string": "NVIDIA H100 80GB HBM3"},
        "type": {"string": "gpu"},
        "uuid": {"string": uuid},
    }
    (made,) = pool(inventory(gpu), KNOWN).values()
    assert made["attributes"].items() >= {f"gpu.nvidia.com/{name}": value for name, value in theirs.items()}.items()
    assert made["capacity"] == {name: {"value": "81559Mi"} for name in ("memory", "gpu.nvidia.com/memory")}
    (made,) = pool(inventory(gpu), KNOWN, driver="gpu.nvidia.com").values()
    assert made["attributes"].items() >= theirs.items()
    assert made["capacity"] == {"memory": {"value": "81559Mi"}}


def test_a_selector_for_nvidias_driver_fails_for_no_device_of_a_pool_for_what_is_not_known_of_it() -> None:
    """NVML knows one GPU and not the other; the third is another vendor's, the last a part of a GPU."""
    known = with_attributes(
        "a", vendor="10de", uuid="GPU-a", model="NVIDIA A30", addressing_mode="None", brand="Nvidia"
    )
    unknown = with_attributes("b", vendor="10de", uuid="GPU-b")
    other = with_attributes("c", vendor="1002", uuid="c", model="AMD Instinct MI300X")
    part = with_attributes(
        "d", vendor="10de", uuid="MIG-d", parent="GPU-a", profile="1g.6gb", gi="1", driver_version="535.54"
    )
    made = {name: it["attributes"] for name, it in pool(inventory(known, unknown, other, part), KNOWN).items()}
    assert len({frozenset(it) for it in made.values()}) == 1
    told = {
        name: [it[f"gpu.nvidia.com/{name}"] for it in made.values()]
        for name in ("type", "productName", "profile", "addressingMode", "cudaComputeCapability", "driverVersion")
    }
    text = {name: [it["string"] for it in values] for name, values in told.items() if "string" in values[0]}
    assert text == {
        "type": ["gpu", "gpu", "", "mig"],
        "productName": ["NVIDIA A30", "", "", ""],
        "profile": ["", "", "", "1g.6gb"],
        "addressingMode": ["None", "", "", ""],
    }
    assert told["cudaComputeCapability"] == [{"version": "0.0.0"}] * 4
    assert told["driverVersion"] == [*[{"version": "0.0.0"}] * 3, {"version": "535.54.0"}]


def test_a_device_of_which_more_is_known_than_a_slice_takes_loses_first_what_is_said_twice() -> None:
    gpu = with_attributes(
        "a", vendor="10de", uuid="GPU-a", model="NVIDIA A30", **{f"more_{number:02}": "x" for number in range(14)}
    )
    (made,) = pool(inventory(gpu)).values()
    check({"devices": [made], "pool": {"resourceSliceCount": 1}})
    names = {name for name in made["attributes"] if "/" not in name}
    assert {f"more_{number:02}" for number in range(14)} < names
    assert not {"model", "uuid"} & names


def test_tokens_are_one_device_with_a_capacity_less_what_pods_have_by_device_plugin() -> None:
    ids = [f"kvm::{number}" for number in range(1000)]
    it = inventory(kvm := device("kvm", GPU, ids=ids), replicas=1000)
    (made,) = pool(it).values()
    assert made["allowMultipleAllocations"] is True
    assert made["capacity"]["tokens"]["value"] == "1k"
    it.claim([held(GPU, "kvm::0", kvm), by_claim(held(GPU, "kvm::1", kvm))])
    (made,) = pool(it).values()
    assert made["capacity"]["tokens"]["value"] == "999", "the claim's share is counted by the scheduler"


def test_what_a_pod_has_by_device_plugin_is_in_no_slice_and_what_one_has_by_a_claim_stays() -> None:
    one, other = device("one", GPU), device("other", GPU)
    it = inventory(one, other)
    it.claim([held(GPU, "one", one), by_claim(held(GPU, "other", other))])
    assert list(pool(it)) == ["other"]
    it.unclaim([held(GPU, "one", one)])
    assert list(pool(it)) == ["one", "other"]


def test_what_a_pod_has_by_a_claim_of_the_drivers_name_before_is_in_no_slice_there_or_gone() -> None:
    one, other = device("one", GPU), device("other", GPU)
    it = inventory(one, other)
    before = offered(it)
    claim = by_claim(held(GPU, "one", one))
    assert claim.claim is not None
    it.claim([replace(claim, claim=replace(claim.claim, driver="before.dev")), by_claim(held(GPU, "other", other))])
    assert [offer.name for offer in offered(it, before)] == ["other"]
    it.update(fakes.KIND, fakes.by_unit([other]))
    assert [offer.name for offer in offered(it, before)] == ["other"]


def test_a_taint_says_since_when_and_why_in_words_that_a_label_may_have() -> None:
    it = inventory(device("a", GPU))
    it.set_health({"a": Health(State.UNHEALTHY, "it's on fire!", "", since=60.0)})
    (made,) = pool(it).values()
    assert made["taints"] == [
        {
            "key": "fairlead.dev/unhealthy",
            "value": "it-s-on-fire",
            "effect": "NoSchedule",
            "timeAdded": "1970-01-01T00:17:40Z",
        }
    ]


def test_two_devices_with_one_key_have_two_names() -> None:
    one = device("same", GPU, ids=["first"], unit="u", hardware=["1"])
    other = device("same", GPU, ids=["second"], unit="v", hardware=["2"])
    assert list(pool(inventory(one, other))) == ["first", "second"]


@pytest.mark.parametrize(
    ("number", "written"),
    [(0, "0"), (1, "1"), (999, "999"), (1000, "1k"), (1500, "1500"), (10_000_000, "10M"), (10**9, "1G")],
)
def test_a_quantity_is_written_as_the_api_server_writes_it(number: int, written: str) -> None:
    assert slices.decimal(number) == written


def test_a_device_that_has_gone_stays_in_its_slice_with_a_taint_while_a_claim_has_it() -> None:
    it = inventory(device("a", GPU), device("b", GPU))
    before = offered(it)
    claim = by_claim(held(GPU, "a", device("a", GPU)))
    it.claim([claim])
    it.update(fakes.KIND, {"a": ()})
    gone, well = offered(it, before)[::-1]
    assert (gone.name, gone.health.reason, gone.is_held, well.name) == ("a", "gone", True, "b")
    made = slices.entries([gone, well], GPU, None, DRIVER, ["a"], 1000.0, {})
    assert made["a"].entry["taints"][0]["effect"] == "NoExecute"
    it.unclaim([claim])
    assert [one.name for one in offered(it, before)] == ["b"]


def test_of_many_resources_only_those_whose_devices_are_others_have_their_devices_named_again() -> None:
    other = "example.com/other"
    it = fakes.inventory(claimed(GPU), claimed(other), devices=[device("a", GPU), device("b", GPU), device("c", other)])
    known = slices.Named(it)
    before = {name: known.of(name) for name in (GPU, other)}
    assert [*before[GPU], *before[other]] == ["a", "b", "c"]
    with patch.object(slices, "device_name", side_effect=names.device_name) as named:
        it.set_health({"b": Health(State.UNHEALTHY, "dead", "It is dead.")})
        assert known.of(GPU) is before[GPU]
        assert not named.called
        it.update(fakes.KIND, fakes.by_unit([device("d", other)]))
        assert known.of(GPU) is before[GPU]
        assert [*known.of(other)] == ["c", "d"]
        assert [call.args for call in named.call_args_list] == [("c",), ("d",)]


def test_of_a_stick_and_its_nodes_in_one_pool_a_scheduler_gives_the_one_or_the_others(tmp_path: Path) -> None:
    """As pods by device plugin get them: nodes of one stick may be in several pods, the stick beside one of them in none."""
    tree = stick("1-2", 5, serial="A1") + stick("1-3", 6, serial="B2")
    for number in (0, 1):
        name, below = f"ttyUSB{number}", f"1-2:1.{number}/ttyUSB{number}/tty/ttyUSB{number}"
        tree += function("1-2", below, "tty", name, f"188:{number}") + device_number("1-2", below, f"188:{number}")
    groups: list[dict[str, Any]] = [{"usb": FTDI}, {"paths": [{"path": "/dev/ttyUSB*"}]}]
    node = Looked(tmp_path, tree + "dev/ttyUSB7 c 188:7\n", configured(GPU, groups=groups))
    found = slices.offers(slices.Named(node.inventory).of(GPU), node.inventory.slots(GPU), {})
    counters, takes = slices.exclusions(found)
    whole = "usb--c1-2"
    assert counters == {whole: 2}
    assert takes == {whole: {whole: 2}, "dev-tty--wusb0": {whole: 1}, "dev-tty--wusb1": {whole: 1}}
