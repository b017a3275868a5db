from __future__ import annotations

import asyncio
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.claims.ledger import Ledger
from agent.discovery.discoverer import Discoverer
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import not_offered
from agent.model import Held
from backends.base import (
    ANY_SUBSYSTEM,
    AllocationRefused,
    Device,
    Grant,
    HostPath,
    Node,
    PathChange,
    Resource,
    ResourceSpec,
    Uevent,
)
from backends.chardev import CharDev, CharDevOptions, CharDevResource, PathOption
from backends.interface.values import Known
from tests.backends.chardev.chardevs import FTDI, NAME, Looked, chardev, configured, only, problems
from tests.backends.linux.sticks import CONTROLLER, describe, directory, function, stick, tty
from tests.backends.trees import plant
from tests.background import running
from tests.nodes import make_node
from tests.wait import limit, pass_time, until

# --- options ---


def resource(name: str = NAME, usb: Any = FTDI, **options: Any) -> CharDevResource:
    return configured(name, usb=usb, **options)


def problem(backend: CharDev, unit: str) -> str:
    (sentence,) = problems(backend, unit)
    return sentence


# --- what is there ---


def test_a_stick_is_a_device_with_its_node_in_dev_bus_usb(tmp_path: Path) -> None:
    backend = chardev(tmp_path, stick("1-2", 5, serial="A50285BI"), resource("squat.ai/ftdi"))
    assert list(backend.units()) == ["usb:1-2"]
    device = only(backend, "usb:1-2")
    assert device == Device(
        key="usb:1-2",
        unit="usb:1-2",
        resource="squat.ai/ftdi",
        hardware=frozenset({"usb:1-2", "node:c:189:4"}),
        exclusive=frozenset({"node:c:189:4"}),
        identity="0403:6001:A50285BI",
        place=frozenset({"usb:0000:00:14.0-usbv2-2"}),
        nodes=(Node(HostPath("/dev/bus/usb/001/005"), "/dev/bus/usb/001/005", "rw"),),
        numa_node=1,
        attributes={
            "id": ("0403:6001:A50285BI",),
            "vendor": ("0403",),
            "product": ("6001",),
            "serial": ("A50285BI",),
            "port": ("1-2",),
            "place": ("0000:00:14.0-usbv2-2",),
            "bus": ("1",),
            "device": ("5",),
            "path": ("/dev/bus/usb/001/005",),
            "name": ("005",),
            "devname": ("bus/usb/001/005",),
            "type": ("character",),
            "major": ("189",),
            "minor": ("4",),
        },
    )
    assert not [*backend.probe(device)]


@pytest.mark.parametrize(
    ("usb", "taken"),
    [
        ({"vendor": "0403"}, True),
        ({"vendor": "0x403", "product": "0x6001"}, True),
        ({"vendor": "0403", "product": "6002"}, False),
        ({"vendor": "0404"}, False),
        ({"vendor": "0403", "serial": "A1"}, True),
        ({"vendor": "0403", "serial": "a1"}, False),
        ([{"vendor": "dead"}, {"vendor": "0403", "serial": "A1"}], True),
        ([{"vendor": "dead"}, {"vendor": "0403", "serial": "A2"}], False),
    ],
)
def test_a_stick_is_taken_if_any_selector_fits(tmp_path: Path, usb: Any, taken: bool) -> None:
    backend = chardev(tmp_path, stick("1-2", 5, serial="A1"), resource(usb=usb))
    assert len(backend.discover("usb:1-2").devices) == taken


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("usb", ["005"]),
        ("tty", ["ttyUSB0", "ttyUSB1"]),
        (["hidraw", "tty"], ["ttyUSB0", "ttyUSB1", "hidraw3"]),
        (["usb", "hidraw"], ["005", "hidraw3"]),
        ("all", ["005", "ttyUSB0", "ttyUSB1", "hidraw3"]),
    ],
)
def test_a_container_gets_the_kinds_of_nodes_that_are_asked_for(
    tmp_path: Path, nodes: str | list[str], names: list[str]
) -> None:
    tree = stick("1-2", 5) + tty("1-2", "ttyUSB0", "188:0") + tty("1-2", "ttyUSB1", "188:1")
    tree += function("1-2", "1-2:1.1/hidraw/hidraw3", "hidraw", "hidraw3", "240:3")
    device = only(chardev(tmp_path, tree, resource(nodes=nodes)), "usb:1-2")
    assert [node.path.name for node in device.nodes] == names
    assert len(device.hardware) == 1 + len(names)


def test_a_stick_without_a_kind_of_node_that_is_asked_for_is_not_offered_and_the_reason_is_told(
    tmp_path: Path,
) -> None:
    more = f"sys/{directory('1-2')}/product = FT232R"
    backend = chardev(tmp_path, stick("1-2", 5) + more, resource(nodes=["usb", "tty", "hidraw"]))
    assert only(backend, "usb:1-2").unusable == "it has no tty and no hidraw node; is its driver there?"


def test_a_stick_whose_driver_is_unloaded_is_told_to_lack_it_not_to_be_gone(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-2", 5, serial="A") + tty("1-2", "ttyUSB0", "188:0"), resource(nodes="tty"))
    held = node.hold("0403:6001:A")
    (tmp_path / "dev/ttyUSB0").unlink()
    node.look()
    assert node.state("0403:6001:A") == "unusable"
    assert not_offered(node.inventory) == [], "what a pod holds is listed"
    node.inventory.unclaim([held])
    (missing,) = [it.missing for it in not_offered(node.inventory)]
    assert missing is not None
    assert (missing.reason, missing.message) == ("unusable", "/dev/ttyUSB0 does not exist")


@pytest.mark.parametrize(("connected", "told"), [("3", 0), ("1999", 0), ("2000", 1), ("garbage", 1)])
def test_a_stick_that_has_just_been_plugged_in_has_time_for_its_drivers(
    tmp_path: Path, connected: str, told: int
) -> None:
    tree = stick("1-2", 5) + f"sys/{directory('1-2')}/power/connected_duration = {connected}"
    found = chardev(tmp_path, tree, resource(nodes="tty")).discover("usb:1-2")
    assert (len([device for device in found.devices if device.unusable]), found.problems) == (told, ())
    assert all(device.unusable for device in found.devices)


@pytest.mark.parametrize("together", [None, "all"])
async def test_a_stick_whose_driver_does_not_come_is_told_as_soon_as_it_had_its_time(
    tmp_path: Path, together: str | None
) -> None:
    connected = f"sys/{directory('1-2')}/power/connected_duration"
    backend = chardev(tmp_path, f"{stick('1-2', 5)}{connected} = 3", resource(nodes="tty", together=together))
    loop = asyncio.get_running_loop()
    it = Discoverer(
        "chardev",
        backend,
        lambda _: None,
        resync=math.inf,
        probe=math.inf,
        unit_deadline=math.inf,
        clock=lambda: loop.time(),
    )
    async with running(it.run):
        async with limit("the first scan"):
            await it.first_scan.wait()
        (tmp_path / connected).write_text("2003")
        pass_time(1.997)
        await until(lambda: it.problems or it.selectable(), "what keeps the stick from its resource is told")
        assert "it has no tty node" in str((it.problems, it.selectable()))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("missing", "/dev/bus/usb/001/005 does not exist"),
        ("other", "/dev/bus/usb/001/005 is c:189:9, but the kernel says c:189:4"),
        ("plain", "is a plain file"),
    ],
)
def test_a_node_that_is_not_the_sticks_is_never_handed_out(tmp_path: Path, fault: str, words: str) -> None:
    backend = chardev(tmp_path, stick("1-2", 5, serial="A"), resource())
    device, node = only(backend, "usb:1-2"), tmp_path / "dev/bus/usb/001/005"
    node.unlink()
    if fault == "other":
        make_node(node, "c", 189, 9)
    elif fault == "plain":
        node.touch()
    assert words in only(backend, "usb:1-2").unusable
    (signal,) = backend.probe(device)
    assert (signal.hardware, signal.reason) == (
        "node:c:189:4",
        "node-missing" if fault == "missing" else "node-replaced",
    )
    with pytest.raises(AllocationRefused, match=r"A of example\.com/x was unplugged or plugged in again"):
        backend.claim(resource(), [Grant("0403:6001:A", device)])


def test_hubs_and_what_is_behind_them_are_devices_of_their_own(tmp_path: Path) -> None:
    tree = stick("1-2", 5, "05e3", "0608") + stick("1-2.1", 6, serial="A") + stick("1-2.4", 7, serial="B")
    backend = chardev(tmp_path, tree, resource(), resource("example.com/hub", {"vendor": "05e3"}))
    assert {unit: only(backend, unit).resource for unit in backend.units()} == {
        "usb:1-2": "example.com/hub",
        "usb:1-2.1": "example.com/x",
        "usb:1-2.4": "example.com/x",
    }


def test_a_root_hub_is_found_if_it_is_selected(tmp_path: Path) -> None:
    at = f"{CONTROLLER}/usb1"
    facts = {"busnum": "1", "devnum": "1", "idVendor": "1d6b", "idProduct": "0002", "serial": "0000:00:14.0",
             "dev": "189:0", "uevent": "DEVNAME=bus/usb/001/001"}  # fmt: skip
    tree = stick("1-2", 5) + "".join(f"sys/{at}/{name} = {text}\n" for name, text in facts.items())
    tree += f"sys/{at}/subsystem -> bus/usb\ndev/bus/usb/001/001 c 189:0\nsys/bus/usb/devices/usb1 -> ../../../{at}"
    backend = chardev(tmp_path, tree, resource(usb={"vendor": "1d6b", "product": "0002"}))
    devices = [device for unit in backend.units() for device in backend.discover(unit).devices]
    assert [device.attributes["id"] for device in devices] == [("1d6b:0002:0000:00:14.0",)]


def test_no_usb_is_no_problem_and_what_cannot_be_listed_is_one(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource())
    assert list(backend.units()) == []
    assert not backend.discover("usb:").problems
    assert not backend.discover("usb:1-2").problems
    plant(tmp_path, "sys/bus/usb/devices")  # a file
    assert list(backend.units()) == ["usb:"]
    sentence = "USB devices cannot be listed: /sys/bus/usb/devices cannot be read: not a directory"
    assert problem(backend, "usb:") == sentence


# --- IDs ---


@pytest.mark.parametrize(
    ("serial", "options", "ids"),
    [
        ("A1", {}, ["0403:6001:A1"]),
        ("A1", {"id": "serial"}, ["0403:6001:A1"]),
        ("A1", {"id": "port"}, ["0000:00:14.0-usbv2-2.3"]),
        (None, {}, ["0000:00:14.0-usbv2-2.3"]),
        ("A/1", {"count": 2}, ["0403:6001:A/1::0", "0403:6001:A/1::1"]),
        (None, {"count": 2}, ["0000:00:14.0-usbv2-2.3::0", "0000:00:14.0-usbv2-2.3::1"]),
    ],
)
def test_ids_are_by_serial_or_else_by_port(
    tmp_path: Path, serial: str | None, options: dict[str, Any], ids: list[str]
) -> None:
    found = resource(**options)
    backend = chardev(tmp_path, stick("1-2.3", 5, serial=serial), found)
    assert list(backend.ids(found, only(backend, "usb:1-2.3"))) == ids
    assert not [*CharDev.fixed_ids(found)]


def test_a_stick_whose_serial_is_not_known_has_no_id_that_would_last(tmp_path: Path) -> None:
    ways = [resource("a/a"), resource("a/b", id="port"), resource("a/c", {"vendor": "0403", "serial": "A1"}, id="port")]
    backend = chardev(tmp_path, stick("1-2", 5), *ways)
    describe(tmp_path, "1-2", 3)
    found = backend.discover("usb:1-2")
    why = "its serial is not known, the kernel could not read it when the device was plugged in"
    assert {device.resource: device.unusable for device in found.devices} == {
        "a/a": f'{why}; plug it in again, or say id = "port"',
        "a/b": "",
    }
    assert [it.sentence for it in found.problems] == [f"USB device 0403:6001 at 1-2 is not offered by a/c: {why}"]


def test_what_an_id_needs_and_is_not_there_is_a_reason(tmp_path: Path) -> None:
    backend = chardev(tmp_path, stick("1-2", 5), resource(id="serial"))
    assert only(backend, "usb:1-2").unusable == 'it has no serial; say id = "port"'
    backend = CharDev(backend.host, [resource()])
    (tmp_path / "sys" / CONTROLLER / "usb1/version").unlink()
    assert "its root hub does not say its version" in only(backend, "usb:1-2").unusable


def test_of_two_sticks_with_one_serial_one_is_offered_and_the_other_is_refused_with_a_reason(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-3", 5, serial="0001"), resource())
    assert node.listed() == {"0403:6001:0001": "usb:1-3"}
    node.hold("0403:6001:0001")
    node.plug("1-2", 6, serial="0001")
    node.look()
    assert node.listed() == {"0403:6001:0001": "usb:1-3"}  # what a pod holds stays the stick it has
    (unclaimed,) = node.inventory.unclaimed()
    assert unclaimed.device.key == "usb:1-2"
    assert unclaimed.why == "example.com/x selects it, but its ID 0403:6001:0001 is that of usb:1-3"


def test_a_stick_keeps_its_id_elsewhere_but_is_offered_there_only_once_its_pod_has_ended(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-2", 5, serial="A1"), resource())
    held = node.hold("0403:6001:A1")
    node.unplug("1-2")
    node.look()
    assert node.listed() == {"0403:6001:A1": "gone"}
    node.plug("1-4", 6, serial="A1")
    node.look()
    assert node.listed() == {"0403:6001:A1": "usb:1-4"}
    assert node.state("0403:6001:A1") == "node-replaced"  # the pod's node is gone for good
    node.inventory.unclaim([held])
    assert node.state("0403:6001:A1") == ""


def test_a_stick_that_is_plugged_in_again_keeps_its_id_and_is_well_again_once_its_pod_has_ended(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-2", 5, serial="A1"), resource(count=2))
    held = node.hold("0403:6001:A1::0")
    node.unplug("1-2")
    node.plug("1-2", 6, serial="A1")
    node.look()
    assert node.listed() == {"0403:6001:A1::0": "usb:1-2", "0403:6001:A1::1": "usb:1-2"}
    assert node.state("0403:6001:A1::0") == "node-replaced"  # the pod's /dev/bus/usb/001/005 leads nowhere
    assert node.inventory.slots(NAME)["0403:6001:A1::0"].health.message == (
        "it is node:c:189:5, usb:1-2 now; the pod that holds it was given node:c:189:4, usb:1-2"
    )
    assert node.state("0403:6001:A1::1") == ""
    node.inventory.unclaim([held])
    assert node.state("0403:6001:A1::0") == ""


def test_a_stick_that_is_plugged_in_again_is_its_pods_where_the_number_is_the_same_or_there_was_a_boot(
    tmp_path: Path,
) -> None:
    tree = stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0")
    node = Looked(tmp_path, tree, resource(nodes="tty"))
    held = node.hold("0403:6001:A1")
    node.unplug("1-2")
    (tmp_path / "dev/ttyUSB0").unlink()
    node.plug("1-2", 6, serial="A1")
    plant(tmp_path, tty("1-2", "ttyUSB0", "188:0"))
    node.look()
    assert node.state("0403:6001:A1") == ""
    node.unplug("1-2")
    (tmp_path / "dev/ttyUSB0").unlink()
    node.plug("1-2", 7, serial="A1")
    plant(tmp_path, tty("1-2", "ttyUSB1", "188:1"))
    node.look()
    assert node.state("0403:6001:A1") == "node-replaced"
    node.inventory.claim([replace(held, rebooted=True)])
    assert node.state("0403:6001:A1") == ""


def test_a_stick_that_is_plugged_in_again_after_a_boot_is_not_the_one_its_pod_has_since(tmp_path: Path) -> None:
    slot = (NAME, "0403:6001:A1")
    node = Looked(tmp_path, stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0"), resource(nodes="all"))
    held, ledger = node.hold(slot[1]), Ledger()
    node.unplug("1-2")
    (tmp_path / "dev/ttyUSB0").unlink()
    node.plug("1-2", 4, serial="A1")
    node.look()
    node.inventory.claim(ledger.restore([held], 0.0, rebooted=True))

    def seen() -> list[Held]:
        return ledger.adopt({slot: "chardev"}, {slot: node.grant(slot[1]).device}, 0.0)

    assert seen() == [], "its driver has made no node yet"
    plant(tmp_path, tty("1-2", "ttyUSB1", "188:1"))
    node.look()
    node.inventory.claim(seen())
    assert (node.state(slot[1]), seen()) == ("", [])
    node.unplug("1-2")
    (tmp_path / "dev/ttyUSB1").unlink()
    node.plug("1-2", 6, serial="A1")
    plant(tmp_path, tty("1-2", "ttyUSB2", "188:2"))
    node.look()
    assert (node.state(slot[1]), seen()) == ("node-replaced", [])


def test_a_stick_that_its_pod_takes_from_its_driver_is_as_well_as_before(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0"), resource(nodes="all"))
    node.hold("0403:6001:A1")
    shutil.rmtree(next((tmp_path / "sys" / directory("1-2")).glob("1-2:1.0")))
    (tmp_path / "dev/ttyUSB0").unlink()
    node.look()
    assert node.listed() == {"0403:6001:A1": "usb:1-2"}
    assert node.state("0403:6001:A1") == ""


def test_another_stick_at_the_port_of_one_that_a_pod_has_is_another_device(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-2", 5, serial="A1"), resource())
    node.hold("0403:6001:A1")
    node.unplug("1-2")
    node.plug("1-2", 7, serial="A2")
    node.look()
    assert node.listed() == {"0403:6001:A1": "gone", "0403:6001:A2": "usb:1-2"}


def test_a_node_that_a_pod_still_has_is_not_given_to_a_second_pod_as_another_sticks(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0")
    node = Looked(tmp_path, tree, resource(nodes="tty"))
    held = node.hold("0403:6001:A1")
    node.unplug("1-2")
    (tmp_path / "dev/ttyUSB0").unlink()
    node.plug("1-3", 6, serial="A2")
    plant(tmp_path, tty("1-3", "ttyUSB0", "188:0"))
    node.look()
    assert node.listed() == {"0403:6001:A1": "gone"}
    (unclaimed,) = node.inventory.unclaimed()
    assert unclaimed.why == "example.com/x selects it, but node:c:188:0 is held by a pod as 0403:6001:A1"
    node.inventory.unclaim([held])
    assert node.listed() == {"0403:6001:A2": "usb:1-3"}


# --- re-enumeration ---


def test_the_same_stick_at_another_number_is_the_same_device_with_another_node(tmp_path: Path) -> None:
    node = Looked(tmp_path, stick("1-2", 5, serial="A1"), resource())
    before = only(node.backend, "usb:1-2")
    node.unplug("1-2")
    assert not node.backend.discover("usb:1-2").devices
    with pytest.raises(AllocationRefused, match="plugged in again this moment"):
        node.backend.claim(resource(), [Grant("x", before)])
    node.plug("1-2", 6, serial="A1")
    after = only(node.backend, "usb:1-2")
    assert (after.key, after.identity, after.attributes["id"]) == (before.key, before.identity, before.attributes["id"])
    assert after.nodes[0].path == HostPath("/dev/bus/usb/001/006")
    with pytest.raises(AllocationRefused):
        node.backend.claim(resource(), [Grant("x", before)])
    node.backend.claim(resource(), [Grant("x", after)])


def test_only_what_the_config_does_not_name_is_looked_at_again_before_it_is_given(tmp_path: Path) -> None:
    path = Resource("a/path", ResourceSpec("chardev", CharDevOptions([PathOption("/dev/kvm")])))
    backend = chardev(tmp_path, "", path, resource())
    assert backend.needs_claim(resource())
    assert not backend.needs_claim(path)


def event(devpath: str, action: str = "add", subsystem: str = "tty") -> Uevent:
    return Uevent(action, subsystem, f"/{devpath}")


def test_an_event_affects_the_stick_it_is_about_or_happens_below(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource())
    at = directory("1-2.3")
    for devpath in (at, f"{at}/1-2.3:1.0", f"{at}/1-2.3:1.0/ttyUSB0/tty/ttyUSB0"):
        for action in ("add", "remove", "bind", "unbind", "move"):
            assert backend.affects(event(devpath, action), Known()) == ["usb:1-2.3"]
    assert backend.affects(event(f"{CONTROLLER}/usb1"), Known()) == ["usb:usb1"]
    assert backend.affects(event(at, "change"), Known()) == []
    assert backend.affects(event(CONTROLLER), Known()) == []
    assert backend.affects(event("devices/virtual/tty/tty0"), Known()) == []
    assert backend.affects(PathChange(HostPath("/dev/ttyUSB0")), Known()) == []


@pytest.mark.parametrize(
    ("nodes", "subsystems"),
    [
        ("usb", {"usb"}),
        (["tty", "hidraw"], {"usb", "tty", "hidraw"}),
        ("all", {ANY_SUBSYSTEM}),
        (["all"], {ANY_SUBSYSTEM}),
    ],
)
def test_the_events_of_what_is_handed_out_are_listened_to(tmp_path: Path, nodes: Any, subsystems: set[str]) -> None:
    watches = chardev(tmp_path, "", resource(nodes=nodes)).watches(Known())
    assert watches.subsystems == subsystems
    assert not watches.directories


# --- edits ---


def test_the_container_learns_bus_and_device_as_kubevirt_tells_them(tmp_path: Path) -> None:
    found = resource("kubevirt.io/a-b.c", {"vendor": "0403"}, count=2, permissions="mrw")
    backend = chardev(tmp_path, stick("1-2", 5, serial="A") + stick("2-1", 17, serial="B"), found)
    one, two = only(backend, "usb:1-2"), only(backend, "usb:2-1")
    edits = backend.edits(found, [Grant("B::0", two), Grant("A::0", one), Grant("A::1", one)])
    assert edits.env == {"USB_RESOURCE_KUBEVIRT_IO_A-B_C": "2:17,1:5"}
    assert edits.nodes == (*two.nodes, *one.nodes)
    assert {node.permissions for node in edits.nodes} == {"mrw"}


def test_sticks_have_names_of_their_own_where_the_name_is_a_template(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A1") + stick("1-3", 6, serial="B2")
    backend = chardev(tmp_path, tree, resource("example.com/serial-{serial}"))
    made = Inventory(backend.resources, {"chardev": backend})
    made.update("chardev", {unit: backend.discover(unit).devices for unit in backend.units()})
    assert {name: len(made.slots(name)) for name in made.names()} == {
        "example.com/serial-A1": 1,
        "example.com/serial-B2": 1,
    }
    (slot,) = made.slots("example.com/serial-A1").values()
    named = made.resource("example.com/serial-A1")
    assert slot.device is not None
    assert named is not None
    assert backend.needs_claim(named)
    backend.claim(named, [Grant(slot.id, slot.device)])
    edits = backend.edits(named, [Grant(slot.id, slot.device)])
    assert list(edits.env) == ["USB_RESOURCE_EXAMPLE_COM_SERIAL-A1"]
