from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import AllocationRefused, Device, Grant, HostPath, Uevent
from backends.chardev import CharDev, CharDevResource
from backends.interface.values import Known
from tests.backends.chardev.chardevs import FTDI, NAME, Looked, configured
from tests.backends.linux.sticks import device_number, directory, stick, tty
from tests.backends.trees import planted_host
from tests.nodes import make_node

TTYS = "dev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\ndev/ttyACM0 c 166:0\n"


def paths(*texts: str, count: int = 1, **keys: Any) -> dict[str, Any]:
    """A group of paths."""
    return {"paths": [{"path": text, **keys} for text in texts], "count": count}


# --- options ---


def grouped(*groups: dict[str, Any], name: str = NAME) -> CharDevResource:
    return configured(name, groups=list(groups))


# --- IDs ---


def test_the_devices_of_all_groups_are_the_resources_each_with_its_groups_count(tmp_path: Path) -> None:
    node = Looked(tmp_path, TTYS, grouped(paths("/dev/ttyUSB*"), paths("/dev/ttyACM*", count=2, permissions="r")))
    assert node.listed() == {
        "ttyUSB0": "/dev/ttyUSB0",
        "ttyUSB1": "/dev/ttyUSB1",
        "ttyACM0::0": "/dev/ttyACM0",
        "ttyACM0::1": "/dev/ttyACM0",
    }
    resource = node.backend.resources[0]
    edits = node.backend.edits(resource, [node.grant("ttyACM0::1"), node.grant("ttyUSB1")])
    assert [(one.path.text, one.permissions) for one in edits.nodes] == [("/dev/ttyACM0", "r"), ("/dev/ttyUSB1", "rw")]
    assert node.grant("ttyACM0::1").device.attributes["group"] == ("2",)


def test_ids_are_whole_paths_so_that_no_two_groups_have_one(tmp_path: Path) -> None:
    tree = "dev/a/x c 240:1\ndev/b/x c 240:2\ndev/x0 c 240:3\n"
    resource = grouped(paths("/dev/a/x", count=2), paths("/dev/b/x", count=2), paths("/dev/x*"))
    node = Looked(tmp_path, tree, resource)
    assert sorted(node.listed()) == ["a/x::0", "a/x::1", "b/x::0", "b/x::1", "x0"]
    assert list(CharDev.fixed_ids(resource)) == ["a/x::0", "a/x::1", "b/x::0", "b/x::1"]


def test_ids_stay_when_another_groups_devices_come_and_go(tmp_path: Path) -> None:
    groups = (paths("/dev/ttyUSB*", "/dev/led*", limit=9), paths("/dev/ttyACM*", "/dev/led*", limit=9, shared=True))
    node = Looked(tmp_path, TTYS + "dev/led0 c 240:0\n", grouped(*groups, paths("/dev/ttyUSB*")))
    before = node.listed()
    (tmp_path / "dev/ttyACM0").unlink()
    node.look()
    assert node.listed() == {device_id: key for device_id, key in before.items() if "ACM" not in device_id}
    make_node(tmp_path / "dev/ttyACM0", "c", 166, 0)
    node.look()
    assert node.listed() == before


def test_bundles_of_two_groups_with_a_shared_node_are_named_after_the_others(tmp_path: Path) -> None:
    shared = {"path": "/dev/fuse", "shared": True}
    groups = ({"paths": [shared, {"path": f"/dev/tty{kind}0"}]} for kind in ("USB", "ACM"))
    node = Looked(tmp_path, TTYS + "dev/fuse c 10:229\n", grouped(*groups))
    assert sorted(node.listed()) == ["ttyACM0", "ttyUSB0"]


FILES = ("a", "b", "c0", "c1", "c2")
GLOBS = st.sampled_from(["/dev/a", "/dev/b", "/dev/c*", "/dev/c[01]", "/dev/*", "/dev/c2"])
GROUPS = st.lists(
    st.builds(
        lambda texts, count: paths(*texts, count=count), st.lists(GLOBS, min_size=1, max_size=2), st.integers(1, 2)
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.sets(st.sampled_from(FILES)))
def test_every_node_is_offered_by_one_device_at_most_and_whatever_is_not_has_a_reason(
    groups: list[dict[str, Any]], files: set[str]
) -> None:
    resource = grouped(*groups)
    with tempfile.TemporaryDirectory() as root:
        tree = "".join(f"dev/{file} c 240:{FILES.index(file)}\n" for file in files)
        node = Looked(Path(root), tree, resource)
    devices = {slot.device.key: slot.device for slot in node.inventory.slots(NAME).values() if slot.device}
    owned = [one.path for device in devices.values() for one in device.nodes]
    assert len(owned) == len(set(owned))
    assert all(NAME in why for why in node.refused().values())
    for slot_id, key in node.listed().items():
        assert slot_id.split("::")[0] == key.removeprefix("/dev/")


# --- what two groups take ---


def test_sticks_that_are_shared_are_offered_by_every_group_and_resource_that_takes_them(tmp_path: Path) -> None:
    both = "example.com/both"
    camera: dict[str, Any] = {"vendor": "046d"}
    one: dict[str, Any] = {"usb": FTDI}
    tree = stick("1-2", 5, serial="A") + stick("1-3", 6, vendor="046d", serial="B")
    pair: dict[str, Any] = {"usb": [FTDI, camera], "together": "all"}
    apart = Looked(tmp_path, tree, grouped(one, pair), configured(both, **pair))
    assert (len(apart.listed()), len(apart.listed(both))) == (1, 0)
    shared = [{**group, "shared": True} for group in (one, pair)]
    node = Looked(tmp_path / "shared", tree, grouped(*shared), configured(both, **shared[1]))
    assert (sorted(node.listed()), list(node.listed(both))) == (
        ["0403:6001+046d:*", "0403:6001:A"],
        ["0403:6001+046d:*"],
    )
    held = node.hold("0403:6001:A")
    node.look()
    assert {*node.listed(), *node.listed(both)} == {"0403:6001:A", "0403:6001+046d:*"}
    assert node.state("0403:6001+046d:*") == ""
    assert held.hardware.isdisjoint(node.grant("0403:6001+046d:*", both).device.hardware)
    (signal,) = _without_node(node, "dev/bus/usb/001/005").probe(device := node.grant("0403:6001:A").device)
    assert signal.hardware in device.depends


def _without_node(node: Looked, path: str) -> CharDev:
    (node.root / path).unlink()
    return node.backend


def test_a_node_that_two_groups_take_is_the_first_ones(tmp_path: Path) -> None:
    node = Looked(tmp_path, TTYS, grouped(paths("/dev/ttyUSB*", count=2), paths("/dev/tty*"), paths("/dev/ttyUSB0")))
    assert sorted(node.listed()) == ["ttyACM0", "ttyUSB0::0", "ttyUSB0::1", "ttyUSB1::0", "ttyUSB1::1"]
    assert node.refused() == {}


def test_two_names_of_a_node_in_two_groups_are_one_device(tmp_path: Path) -> None:
    tree = "dev/ttyACM0 c 166:0\ndev/serial/by-id/x -> ../../ttyACM0\n"
    node = Looked(tmp_path, tree, grouped(paths("/dev/serial/by-id/*"), paths("/dev/ttyACM*")))
    assert node.listed() == {"ttyACM0": "/dev/ttyACM0"}


def test_what_groups_of_two_ways_take_is_offered_once_and_the_reason_is_told(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0")
    node = Looked(tmp_path, tree, grouped({"usb": FTDI, "nodes": "tty"}, paths("/dev/ttyUSB*")))
    assert node.listed() == {"ttyUSB0": "/dev/ttyUSB0"}
    assert node.refused() == {"usb:1-2": f"{NAME} selects it, but node:c:188:0 is offered as /dev/ttyUSB0 already"}


def test_a_stick_belongs_to_the_first_group_that_selects_it_even_while_it_cannot_be_offered(tmp_path: Path) -> None:
    groups = ({"usb": {**FTDI, "serial": "A1"}, "nodes": "tty"}, {"usb": FTDI, "count": 2})
    node = Looked(tmp_path, stick("1-2", 5, serial="A1") + stick("1-3", 6, serial="B2"), grouped(*groups))
    assert list(node.listed()) == ["0403:6001:B2::0", "0403:6001:B2::1"]
    (device,) = node.backend.discover("usb:1-2").devices
    assert "has no tty node" in device.unusable


def test_a_match_of_two_groups_is_the_first_ones(tmp_path: Path) -> None:
    below = "1-2:1.0/ttyUSB0/tty/ttyUSB0"
    links = f"sys/class/tty/ttyUSB0 -> ../../{directory('1-2')}/{below}\n" + device_number("1-2", below, "188:0")
    tree = stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0") + links
    by_vendor = {"match": {"subsystem": "tty", "attributes": {"idVendor": "0403"}}, "count": 2, "permissions": "r"}
    node = Looked(tmp_path, tree, grouped(by_vendor, {"match": {"subsystem": "tty"}}))
    assert list(node.listed()) == ["ttyUSB0::0", "ttyUSB0::1"]
    assert node.grant("ttyUSB0::0").device.nodes[0].permissions == "r"


# --- allocating ---


def test_a_resource_of_paths_and_sticks_looks_again_at_its_sticks_alone(tmp_path: Path) -> None:
    resource = grouped(paths("/dev/ttyACM*"), {"usb": FTDI})
    plain = grouped(paths("/dev/a"), paths("/dev/b"), name="example.com/plain")
    node = Looked(tmp_path, TTYS + stick("1-2", 5, serial="A1"), resource, plain)
    assert [node.backend.needs_claim(each) for each in (resource, plain)] == [True, False]
    both = [node.grant("0403:6001:A1"), node.grant("ttyACM0")]
    node.backend.claim(resource, both)
    (tmp_path / "dev/ttyACM0").unlink()
    node.backend.claim(resource, both)
    (tmp_path / "dev/bus/usb/001/005").unlink()
    with pytest.raises(AllocationRefused, match="unplugged"):
        node.backend.claim(resource, both)


def test_the_container_learns_of_sticks_where_it_has_any(tmp_path: Path) -> None:
    resource = grouped(paths("/dev/ttyACM*"), {"usb": FTDI})
    node = Looked(tmp_path, TTYS + stick("1-2", 5, serial="A1"), resource)
    assert node.backend.edits(resource, [node.grant("ttyACM0")]).env == {}
    both = [node.grant("ttyACM0"), node.grant("0403:6001:A1")]
    assert node.backend.edits(resource, both).env == {"USB_RESOURCE_EXAMPLE_COM_X": "1:5"}


# --- sticks together ---

CAPTURE = {"vendor": "534d", "product": "2109"}
SERIAL = {"vendor": "0403"}
CAPTURE_STICK = ("534d", "2109")


def test_all_sticks_of_a_group_are_one_device_named_after_what_selects_them(tmp_path: Path) -> None:
    tree = stick("1-3", 6, serial="B") + stick("1-2", 5, serial="A") + stick("1-4", 7, *CAPTURE_STICK)
    resource = grouped({"usb": [CAPTURE, SERIAL], "together": "all", "count": 2})
    node = Looked(tmp_path, tree + stick("1-5", 8, "1d6b"), resource)
    assert node.listed() == {f"534d:2109+0403:*::{n}": "534d:2109+0403:*" for n in (0, 1)}
    device = node.grant("534d:2109+0403:*::1").device
    assert device.identity == "534d:2109: + 0403:6001:A + 0403:6001:B"
    assert device.numa_node == 1
    assert {"usb:1-2", "usb:1-3", "usb:1-4"} <= device.hardware
    edits = node.backend.edits(resource, [Grant("x", device)])
    assert [one.path.text for one in edits.nodes] == [f"/dev/bus/usb/001/00{n}" for n in (7, 5, 6)]
    assert edits.env == {"USB_RESOURCE_EXAMPLE_COM_X": "1:7,1:5,1:6"}


def test_sticks_with_one_serial_or_none_that_is_known_are_all_together(tmp_path: Path) -> None:
    tree = "".join(stick(f"1-{n}", n, serial=serial) for n, serial in ((2, "same"), (3, "same"), (4, "\x07")))
    node = Looked(tmp_path, tree, grouped({"usb": SERIAL, "together": "all"}))
    assert len(node.grant("0403:*").device.nodes) == 3
    assert node.backend.discover("usb-set:example.com/x#1").problems == ()


def test_what_joins_or_leaves_changes_the_identity_and_not_the_id(tmp_path: Path) -> None:
    resource = grouped({"usb": [CAPTURE, SERIAL], "together": "all"})
    node = Looked(tmp_path, stick("1-2", 5, serial="A"), resource)
    node.hold("534d:2109+0403:*")
    planted_host(tmp_path, stick("1-4", 7, *CAPTURE_STICK))
    node.look()
    assert node.state("534d:2109+0403:*") == "node-replaced"


def test_one_stick_of_each_selector_makes_a_set_named_after_the_first(tmp_path: Path) -> None:
    tree = stick("1-3", 6, serial="B") + stick("1-2", 5, serial="A") + stick("1-4", 7, *CAPTURE_STICK, serial="C")
    resource = grouped({"usb": [SERIAL, CAPTURE], "together": "each"})
    node = Looked(tmp_path, tree, resource)
    assert list(node.listed()) == ["0403:6001:A"]
    assert node.grant("0403:6001:A").device.identity == "0403:6001:A + 534d:2109:C"
    (unit,) = node.backend.units()
    assert [problem.sentence for problem in node.backend.discover(unit).problems] == [
        f"{NAME}: 2 of 0403:* and 1 of 534d:2109 are plugged in: what is left over is in no set"
    ]
    planted_host(tmp_path, stick("1-6", 9, *CAPTURE_STICK, serial="D"))
    node.look()
    assert list(node.listed()) == ["0403:6001:A", "0403:6001:B"]
    assert node.backend.discover(unit).problems == ()


def test_two_sticks_of_a_set_with_one_serial_are_told_apart_by_port_only(tmp_path: Path) -> None:
    tree = "".join(stick(f"1-{n}", n, serial="same") + stick(f"1-{n + 4}", n + 4, *CAPTURE_STICK) for n in (2, 3))
    selectors = {"usb": [SERIAL, CAPTURE], "together": "each"}
    node = Looked(tmp_path, tree, grouped(selectors))
    assert list(node.listed()) == ["0403:6001:same"]
    (unit,) = node.backend.units()
    assert 'its serial is also that of the one at 1-2; say id = "port"' in "".join(
        problem.sentence for problem in node.backend.discover(unit).problems
    )
    node = Looked(tmp_path, "", grouped({**selectors, "id": "port"}))
    assert list(node.listed()) == ["0000:00:14.0-usbv2-2", "0000:00:14.0-usbv2-3"]


def test_a_stick_that_lacks_its_nodes_is_in_no_set_and_the_reason_is_told(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A") + tty("1-2", "ttyUSB0", "188:0") + stick("1-4", 7, *CAPTURE_STICK)
    resource = grouped({"usb": [SERIAL, CAPTURE], "together": "all", "nodes": "tty"})
    node = Looked(tmp_path, tree, resource)
    assert node.grant("0403:*+534d:2109").device.identity == "0403:6001:A"
    (problem,) = node.backend.discover("usb-set:example.com/x#1").problems
    assert problem.sentence.startswith(f"USB device 534d:2109 at 1-4 is not offered by {NAME}: it has no tty node")


def test_without_sticks_there_is_no_set_and_what_cannot_be_listed_is_told(tmp_path: Path) -> None:
    resource = grouped({"usb": SERIAL, "together": "all"}, {"usb": [SERIAL, CAPTURE], "together": "each"})
    node = Looked(tmp_path, "", resource)
    assert node.listed() == {}
    planted_host(tmp_path, "sys/bus/usb/devices")
    found = [node.backend.discover(unit).problems[0].sentence for unit in node.backend.units()]
    assert len(found) == 2
    assert all("cannot be listed" in sentence for sentence in found)


def test_a_stick_that_comes_or_goes_affects_all_sets(tmp_path: Path) -> None:
    backend = CharDev(planted_host(tmp_path, ""), [grouped({"usb": SERIAL, "together": "all", "nodes": "tty"})])
    below = f"/{directory('1-2')}/1-2:1.0/ttyUSB0"
    known = Known()
    assert backend.affects(Uevent("add", "tty", below, HostPath("/dev/ttyUSB0")), known) == ["usb-set:example.com/x#1"]
    assert backend.affects(Uevent("change", "usb", below), known) == []
    assert backend.affects(Uevent("add", "block", "/devices/virtual/block/loop0"), known) == []
    assert backend.watches(known).subsystems == {"usb", "tty"}


def test_a_sets_health_is_that_of_its_nodes(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A") + stick("1-4", 7, *CAPTURE_STICK)
    node = Looked(tmp_path, tree, grouped({"usb": [SERIAL, CAPTURE], "together": "each"}))
    device: Device = node.grant("0403:6001:A").device
    assert list(node.backend.probe(device)) == []
    (tmp_path / "dev/bus/usb/001/007").unlink()
    assert [signal.reason for signal in node.backend.probe(device)] == ["node-missing"]
