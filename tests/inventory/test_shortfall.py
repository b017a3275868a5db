from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from agent.inventory import shortfall
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Shortfall, departure, found_missing, not_offered
from agent.runtime.pacing import Clock
from backends.base import Device, Resource
from tests.fakes import KIND, Fake, by_unit, device, held, inventory, reconfigure, resource

A, B = "a.example/one", "b.example/two"
WALL = 1e9


class Node:
    """Lists whose shortfall is looked at, at a time that a test sets."""

    def __init__(self, *devices: Device) -> None:
        self.inventory = inventory(resource(A), resource(B), devices=devices)
        self.now = 0.0
        self.it = Shortfall(self.inventory, Clock(lambda: self.now, lambda: WALL + self.now))

    def show(self, *devices: Device, gone: tuple[str, ...] = ()) -> None:
        self.inventory.update(KIND, {**dict.fromkeys(gone, ()), **by_unit(devices)})

    async def missing(self) -> dict[str, tuple[str, str]]:
        """Device → its resource and the reason, as of now."""
        await self.it.look({KIND})
        return {one.device: (one.resource, one.reason) for one in self.it.missing}


@pytest.mark.parametrize(
    ("attributes", "resources"),
    [
        ({"taken_by": (B,)}, {B}),
        ({}, {A}),  # nobody can tell whom it would join: the first
        ({"taken_by": ("c.example/three",)}, set()),
    ],
)
def test_what_cannot_be_used_is_missing_where_all_that_is_known_of_it_is_selected(
    attributes: dict[str, tuple[str, ...]], resources: set[str]
) -> None:
    broken = replace(device("x", unusable="it has no driver"), attributes=attributes)
    found = found_missing(inventory(resource(A), resource(B), devices=[broken]))
    assert {(one.resource, one.reason, one.message) for one in found} == {
        (name, "unusable", "it has no driver") for name in resources
    }


async def test_hardware_that_is_offered_through_another_device_is_not_missing() -> None:
    whole = device("gpu", A, hardware=("pci:1",), unusable="it is divided")
    part = device("mig", B, unit="u", hardware=("part:1",), depends=("pci:1",))
    assert await Node(whole, part).missing() == {}
    assert await Node(whole).missing() == {"gpu": (A, "unusable")}


def test_hardware_is_told_once_and_not_where_it_is_offered() -> None:
    """As a card that is on vfio-pci: the GPU's backend and that of functions look at it, too."""
    gpu = device("GPU-1", A, unit="g", hardware=("pci:0000:03:00.0",), unusable="it is bound to vfio-pci")
    function = device("0000:03:00.0", unit="f", hardware=("pci:0000:03:00.0", "pci:0000:03:00.1"))
    lists = inventory(resource(A), resource(B), devices=[gpu, function])
    (told,) = not_offered(lists)
    assert (told.found.device.key, told.why) == ("GPU-1", "it is bound to vfio-pci")
    lists.update(KIND, by_unit([device(function.key, B, unit="f", hardware=tuple(function.hardware))]))
    assert not_offered(lists) == []


def test_what_is_so_by_design_is_told_and_not_missing() -> None:
    port = replace(device("port", A, unusable="its port belongs to mlx5_bond_0"), by_design=True)
    lists = inventory(resource(A), resource(B), devices=[port])
    assert [(told.why, told.missing) for told in not_offered(lists)] == [("its port belongs to mlx5_bond_0", None)]
    assert found_missing(lists) == []


async def test_what_a_pod_holds_is_listed_and_not_missing_though_it_has_no_place() -> None:
    node = Node(device("x", A))
    claims = [held(A, "x", device("x", A))]
    node.inventory.claim(claims)
    node.show(device("x", A, unusable="it has no driver"))
    assert await node.missing() == {}
    node.inventory.unclaim(claims)
    assert await node.missing() == {"x": (A, "unusable")}


async def test_what_another_devices_id_keeps_out_is_missing() -> None:
    node = Node(device("x", A, ids=("same",)), device("y", A, ids=("same",)))
    assert await node.missing() == {"y": (A, "conflict")}


def test_what_selectors_take_and_its_resource_cannot_reset_is_missing() -> None:
    resets = replace(resource(A), spec=replace(resource(A).spec, pre_start="reset"))
    stubborn = replace(device("x", A), no_reset="x cannot be reset by itself")
    (missed,) = found_missing(inventory(resets, resource(B), devices=[stubborn, device("y")]))
    assert (missed.device, missed.resource, missed.reason) == ("x", A, "unusable")
    assert f"{A} does not take it: its pre_start is 'reset', and x cannot be reset by itself" in missed.message


async def test_what_a_list_has_no_room_for_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.runtime.limits.MESSAGE_LIMIT", 10)
    node = Node(device("x", A), device("y", A), device("z", A))
    assert set((await node.missing()).values()) == {(A, "list-full")}
    assert all("its list is full" in one.message for one in node.it.missing)


async def test_what_was_offered_and_is_gone_is_missing_since_then_until_it_is_back() -> None:
    node = Node(device("x", A), device("y", A))
    await node.it.look({KIND})
    node.now = 5.0
    node.show(gone=("x",))
    assert await node.it.look({KIND}) == ([], [])  # the line about its going has been written
    assert [(it.device, it.reason, it.since) for it in node.it.missing] == [("x", "gone", 5.0)]
    node.now = 9.0
    assert await node.it.look({KIND}) == ([], [])
    assert [it.since for it in node.it.missing] == [5.0]
    node.show(device("x", A))
    begun, ended = await node.it.look({KIND})
    assert (begun, [it.device for it in ended]) == ([], ["x"])


async def test_what_is_gone_and_comes_back_unusable_is_missing_for_that_reason_since_then() -> None:
    node = Node(device("x", A))
    await node.it.look({KIND})
    node.show(gone=("x",))
    await node.it.look({KIND})
    node.now = 7.0
    node.show(device("x", A, unusable="it has no driver"))
    begun, ended = await node.it.look({KIND})
    assert ([(it.reason, it.since) for it in begun], ended) == ([("unusable", 7.0)], [])


async def test_a_gpu_that_is_divided_anew_has_not_lost_its_former_parts() -> None:
    node = Node(device("mig 1", A, unit="gpu", depends=("pci:1",)))
    await node.it.look({KIND})
    node.show(device("mig 2", A, unit="gpu", depends=("pci:1",)))
    assert await node.missing() == {}


async def test_one_of_several_that_share_a_node_is_missing_when_it_goes() -> None:
    node = Node(device("x", A, depends=("node:control",)), device("y", A, depends=("node:control",)))
    await node.it.look({KIND})
    node.show(gone=("x",))
    assert await node.missing() == {"x": (A, "gone")}


async def test_what_comes_back_under_another_name_is_offered_again() -> None:
    node = Node(device("0000:3b:00.0", hardware=("pci:1",), unusable="it has no driver"))
    await node.it.look({KIND})
    node.show(device("GPU-1", A, hardware=("pci:1",)), gone=("0000:3b:00.0",))
    begun, ended = await node.it.look({KIND})
    assert (begun, [it.device for it in ended]) == ([], ["0000:3b:00.0"])


async def test_what_is_built_for_several_resources_is_missing_in_the_first() -> None:
    of = {name: replace(device("x", unusable="no driver"), resource=name) for name in (B, A)}
    node = Node(*(replace(it, unit=name) for name, it in of.items()))
    assert await node.missing() == {"x": (A, "unusable")}


def test_a_template_that_could_not_name_it_is_not_what_it_is_meant_for() -> None:
    parts = replace(resource("n.example/mig-{profile}"), spec=replace(resource(A).spec, select=()))
    found = found_missing(inventory(parts, resource(A), devices=[device("gpu", A, unusable="it has no driver")]))
    assert [one.resource for one in found] == [A]


async def test_what_a_pod_holds_is_listed_as_gone_and_missing_once_the_pod_ends() -> None:
    x = device("x", A)
    node = Node(x)
    claims = [held(A, "x", x)]
    node.inventory.claim(claims)
    await node.it.look({KIND})
    node.show(gone=("x",))
    assert await node.missing() == {}
    assert node.it.gone(x.hardware) is x
    node.inventory.unclaim(claims)
    assert await node.missing() == {"x": (A, "gone")}
    node.show(x)
    assert await node.missing() == {}
    assert node.it.gone(x.hardware) is None


async def test_what_is_not_configured_any_more_is_not_missing() -> None:
    node = Node(device("x", A))
    await node.it.look({KIND})
    kept: list[Resource[Any]] = [resource(B)]
    reconfigure(node.inventory, kept, {KIND: Fake(*kept)})
    node.show(gone=("x",))
    assert await node.missing() == {}


async def test_what_an_earlier_run_offered_is_missing_once_its_backend_has_looked_and_not_found_it() -> None:
    x = device("x", A, numa_node=1)
    before = Node(replace(x, attributes={**x.attributes, "hca": ("mlx5_0",)}), device("y", A))
    await before.it.look({KIND})
    before.now = 5.0
    before.show(gone=("y",))
    await before.it.look({KIND})
    after = Node()
    after.now = 60.0
    after.it.restore(before.it.offered, another_boot=False)
    assert await after.it.look(()) == ([], [])
    begun, _ = await after.it.look({KIND})
    assert {(it.device, it.reason, it.since) for it in begun} == {("x", "gone", 60.0), ("y", "gone", 5.0)}
    seen = after.it.gone({"x"})
    assert seen
    assert (seen.numa_node, seen.attributes) == (1, {"hca": ("mlx5_0",)})
    after.show(device("x", A))
    begun, ended = await after.it.look({KIND})
    assert (begun, [it.device for it in ended]) == ([], ["x"])
    assert {(it.device, it.went) for it in after.it.offered} == {("x", 0.0), ("y", WALL + 5.0)}


@pytest.mark.parametrize(("came", "missing"), [(("3", "4"), set()), (("3",), {"1", "2"}), ((), {"1", "2"})])
async def test_what_has_other_addresses_after_a_boot_is_not_missing_but_one_less_is(
    came: tuple[str, ...], missing: set[str]
) -> None:
    before = Node(device("1", A), device("2", A), device("z", B))
    await before.it.look({KIND})
    after = Node(*(device(name, A) for name in came), device("z", B))
    after.it.restore(before.it.offered, another_boot=True)
    assert (await after.missing()).keys() == missing
    assert (await after.missing()).keys() == missing


async def test_what_has_other_addresses_after_a_boot_is_not_missing_though_it_is_found_in_stages() -> None:
    before = Node(device("1", A), device("2", A))
    await before.it.look({KIND})
    after = Node(device("3", A))
    after.it.restore(before.it.offered, another_boot=True)
    assert await after.it.look(()) == ([], [])
    after.show(device("4", A, unusable="it has no driver"))
    assert await after.missing() == {"4": (A, "unusable")}
    assert [it.device for it in after.it.offered] == ["3"]


async def test_what_could_not_be_used_before_it_went_is_missing() -> None:
    node = Node(device("GPU-1", A, hardware=("pci:1",)))
    await node.it.look({KIND})
    node.show(device("0000:3b:00.0", A, unit="GPU-1", hardware=("pci:1",), unusable="it has no driver"))
    assert await node.missing() == {"0000:3b:00.0": (A, "unusable")}
    node.show(gone=("GPU-1",))
    assert await node.missing() == {"GPU-1": (A, "gone")}


async def test_one_key_in_two_resources_is_missing_in_the_one_that_is_left() -> None:
    node = Node(*(replace(device("x", name, unit=name, hardware=(name,)), resource=name) for name in (A, B)))
    await node.it.look({KIND})
    node.show(gone=(A, B))
    assert set(await node.missing()) == {"x"}
    kept: list[Resource[Any]] = [resource(A)]
    reconfigure(node.inventory, kept, {KIND: Fake(*kept)})
    assert await node.missing() == {"x": (A, "gone")}
    node.now = 86401.0
    assert await node.missing() == {}


async def test_a_name_that_could_not_be_written_down_is_not_kept() -> None:
    x = device("x", A)
    node = Node(replace(x, attributes={**x.attributes, "ifname": ("\udcff",), "hca": ("mlx5_0",)}))
    await node.it.look({KIND})
    assert [it.attributes for it in node.it.offered] == [{"hca": ("mlx5_0",)}]


async def test_what_went_is_forgotten_after_a_day() -> None:
    node = Node(device("x", A))
    await node.it.look({KIND})
    node.show(gone=("x",))
    await node.it.look({KIND})
    node.now = 86400.0
    assert await node.missing() == {"x": (A, "gone")}
    node.now = 86401.0
    assert await node.missing() == {}
    assert await node.missing() == {}


async def test_no_more_than_so_many_that_went_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shortfall, "_MOST_GONE", 3)
    node = Node(*(device(f"x{n}", A) for n in range(5)))
    await node.it.look({KIND})
    for n in range(5):
        node.now = float(n)
        node.show(gone=(f"x{n}",))
        await node.it.look({KIND})
    assert {it.device for it in node.it.missing} == {"x2", "x3", "x4"}


def test_a_look_without_a_daemon_finds_the_same() -> None:
    it: Inventory = inventory(resource(A), devices=[device("x", A), device("y", unusable="no driver")])
    assert [(one.device, one.resource) for one in found_missing(it)] == [("y", A)]


@pytest.mark.parametrize(
    ("now", "why"),
    [
        ((), ("gone", "it is not there any more")),
        ((device("x", A, unusable="it has no driver"),), ("unusable", "it has no driver")),
        ((device("x", B),), ("elsewhere", f"{B} has it now")),
        ((device("x"),), ("unselected", f"{A} does not take it")),
    ],
)
def test_why_a_device_has_left_its_list(now: tuple[Device, ...], why: tuple[str, str]) -> None:
    reason, sentence = departure(inventory(resource(A), resource(B), devices=now), device("x", A))
    assert (reason, sentence[: len(why[1])]) == why
