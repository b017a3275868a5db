"""Where devices stand, and what is said of the whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from agent.console.http.html import Html, h, join, many
from agent.console.http.sections import attention, troubles
from agent.console.http.topology import Machine, Node, Place, missing, tiles
from agent.console.views import Device, Resource, Status
from tests.console.http import nodes


def device(key: str, numa: int | None = None, *ancestry: str, state: str = "Healthy", reason: str = "") -> Device:
    return Device(key, (key,), state, reason, numa_node=numa, ancestry=ancestry)


def machine(*devices: Device) -> list[Node]:
    where = Machine()
    for tile in tiles("a.b/c", devices):
        where.put(tile)
    return where.nodes()


def keys(place: Place) -> list[str]:
    return [tile.key for tile in place.tiles]


def test_nodes_by_number_then_unknown_ones_then_what_is_on_no_bus() -> None:
    found = machine(device("x"), device("y", None, "pci0000:00"), device("b", 10), device("a", 2))
    assert [(node.number, node.on_bus) for node in found] == [(2, True), (10, True), (None, True), (None, False)]


def test_devices_below_one_switch_stand_together_though_each_has_a_port_of_its_own() -> None:
    pair = [device(key, 0, "host bridge", "port", "switch", key + "'s port") for key in ("a", "b")]
    (node,) = machine(*pair, device("c", 0, "host bridge", "another port"))
    (place,) = node.place.below
    assert (keys(node.place), keys(place), place.below) == (["c"], ["a", "b"], ())


def test_a_switch_below_a_switch_is_a_place_in_it() -> None:
    every = [
        device(key, 0, "host bridge", "switch", *more)
        for key, more in zip("abc", ((), ("two",), ("two",)), strict=True)
    ]
    (node,) = machine(*every)
    (place,) = node.place.below
    assert (keys(place), [keys(inner) for inner in place.below]) == (["a"], [["b", "c"]])


def test_parts_stand_below_their_whole() -> None:
    (node,) = machine(device("gpu", 0, "root"), *(device(f"mig{n}", 0, "root", "0000:3b:00.0") for n in range(2)))
    assert (keys(node.place), keys(node.place.below[0])) == (["gpu"], ["mig0", "mig1"])


def test_what_no_pod_can_get_stands_where_it_would_stand() -> None:
    gpus = [*tiles("nvidia.com/gpu", [nodes.gpu(n) for n in (0, 1, 3)]), *missing([nodes.unusable(2)])]
    where = Machine()
    for tile in gpus:
        where.put(tile)
    (node,) = where.nodes()
    assert [[tile.title for tile in place.tiles] for place in node.place.below] == [
        ["H100 · nvidia0", "H100 · nvidia1"],
        ["H100 · nvidia2", "H100 · nvidia3"],
    ]


def test_a_gpu_whose_driver_does_not_name_it_stands_between_the_others() -> None:
    nameless = replace(nodes.unusable(1), device="0000:2b:00.0", name="", model="", ancestry=())
    gpus = [*tiles("nvidia.com/gpu", [nodes.gpu(n, ancestry=()) for n in (0, 2)]), *missing([nameless])]
    where = Machine()
    for tile in gpus:
        where.put(tile)
    (node,) = where.nodes()
    assert [tile.title for tile in node.place.tiles] == ["H100 · nvidia0", "0000:2b:00.0", "H100 · nvidia2"]


def test_devices_are_in_the_order_that_people_count_in() -> None:
    (node,) = machine(device("tty10"), device("tty9"), device("0000:3b:00.0"), device("0000:0a:00.0"))
    assert keys(node.place) == ["0000:0a:00.0", "0000:3b:00.0", "tty9", "tty10"]


def test_a_device_whose_ids_differ_is_one_tile_and_as_bad_as_the_worst() -> None:
    (tile,) = tiles("a.b/c", (device("x"), device("x", state="Unhealthy"), device("x", state="Degraded")))
    assert [view.state for view in tile.views] == ["Unhealthy", "Degraded", "Healthy"]


# --- what is wrong ---


def titles(status: Status) -> Iterator[tuple[str, str]]:
    every = [tile for one in status.resources for tile in tiles(one.name, one.devices)]
    every += missing(status.unclaimed)
    yield from ((trouble.state, trouble.title) for trouble in troubles(status, every))


def test_the_worst_comes_first_and_like_things_together() -> None:
    assert list(titles(nodes.busy())) == [
        ("Unhealthy", "A resource is not served"),
        ("Unhealthy", "nvidia.com/gpu: xid-79"),
        ("Degraded", "3 × example.com/vf: port-down"),
        ("Degraded", "infiniband · 0000:d8:00.0"),
    ]


def test_devices_with_one_reason_are_one_trouble_whatever_their_resource_and_problems_of_one_backend_too() -> None:
    vf = device("vf", state="Unhealthy", reason="port-down")
    shown = nodes.broken()
    other = Resource("example.com/vf", "sriov", True, True, "another plugin has registered it", devices=(vf,))
    found = [title for _, title in titles(replace(shown, resources=(*shown.resources, other)))]
    assert "2 × rdma/hca, example.com/vf: port-down" in found
    assert "rdma/hca, example.com/vf" in found
    assert "2 × infiniband" in found
    assert "Fairlead itself: restarts" in found


def test_what_no_pod_can_get_is_told_with_each_reason_by_name() -> None:
    lacking = (nodes.unusable(2), nodes.unusable(5, "the NVIDIA driver excludes it (NVreg_ExcludedGpus)"))
    shown = nodes.node(unclaimed=lacking)
    assert list(titles(shown)) == [("Degraded", "2 × nvidia.com/gpu: unusable")]
    told = str(attention(troubles(shown, list(missing(shown.unclaimed)))))
    assert ">H100 · nvidia2</a> it has no driver; nvidia is needed</p>" in told
    assert ">H100 · nvidia5</a> the NVIDIA driver excludes it (NVreg_ExcludedGpus)</p>" in told


def test_without_a_kubelet_that_alone_is_said_of_registration() -> None:
    kubelet = replace(nodes.node().kubelet, present=False)
    status = nodes.node(Resource("a.b/c", "gpu", False, False), kubelet=kubelet)
    assert list(titles(status)) == [("Unhealthy", "The kubelet is not there")]


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"mistakes": ("3: no key 'x'",)}, "/etc/fairlead/config.toml has mistakes and was not reloaded"),
        ({"needs_restart": ("agent.plugin_dir",)}, "A restart is needed"),
    ],
)
def test_what_is_the_matter_with_the_configuration(changes: dict[str, tuple[str, ...]], title: str) -> None:
    configuration = replace(nodes.node().configuration, **changes)
    assert list(titles(nodes.node(configuration=configuration))) == [("Degraded", title)]


# --- elements ---


def test_text_is_escaped_and_html_is_not() -> None:
    assert h("p", "<&", Html("<br>"), None, ["a", h("b", "c")], class_="x", title='"', hidden=True, id=None) == (
        '<p class="x" title="&quot;" hidden>&lt;&amp;<br>a<b>c</b></p>'
    )
    assert join("a", "<") == "a&lt;"


def test_numbers_have_their_nouns() -> None:
    assert (many(1, "device"), many(1234, "device")) == ("1 device", "1,234 devices")
