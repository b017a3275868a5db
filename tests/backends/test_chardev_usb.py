from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import typed
from agent.devices.inventory import Inventory
from agent.devices.model import Held
from backends.base import (
    ANY_SUBSYSTEM,
    AllocationRefused,
    Device,
    Grant,
    HostPath,
    Node,
    OptionsError,
    PathChange,
    Resource,
    ResourceSpec,
    Uevent,
)
from backends.chardev import CharDev, CharDevOptions, CharDevResource, PathOption
from backends.chardev.selectors import UsbOption, usb_id
from backends.known import Known
from tests.backends.linux.sticks import CONTROLLER, describe, directory, function, stick, tty
from tests.backends.trees import plant, planted_host
from tests.nodes import make_node

FTDI = {"vendor": "0403", "product": "6001"}


def resource(name: str = "example.com/x", usb: Any = FTDI, **options: Any) -> CharDevResource:
    found, mistakes = typed.convert({"usb": usb, **options}, CharDevOptions)
    assert not mistakes
    return Resource(name, ResourceSpec("chardev", found))


def chardev(tmp_path: Path, tree: str, *resources: CharDevResource) -> CharDev:
    return CharDev(planted_host(tmp_path, tree), resources)


def only(backend: CharDev, unit: str) -> Device:
    (device,) = backend.discover(unit).devices
    return device


def problem(backend: CharDev, unit: str) -> str:
    found = backend.discover(unit)
    assert not found.devices
    (problem,) = found.problems
    return problem.sentence


def refused(found: CharDevResource) -> OptionsError:
    with pytest.raises(OptionsError) as error:
        CharDev.check(found)
    return error.value


# --- options ---


@pytest.mark.parametrize("usb", [FTDI, [FTDI, {"vendor": "0x10C4"}], {"vendor": "403", "serial": "A 1"}])
def test_one_or_several_selectors_are_possible(usb: Any) -> None:
    CharDev.check(resource(usb=usb, nodes=["tty", "hidraw"], id="port", permissions="r", count=3))


UNSURE = "is ambiguous without quotes; write"
IMPOSSIBLE = "is no USB ID; write its four hexadecimal digits in quotes, as `lsusb` shows them"


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (1234, f'{UNSURE} "1234" if these are the digits that `lsusb` shows, or "04d2" if 0x4d2 is meant'),
        (403, f'{UNSURE} "0403" if these are the digits that `lsusb` shows, or "0193" if 0x193 is meant'),
        (0x8087, f'{UNSURE} "8087" if 0x8087 is meant'),
        (0x10000, IMPOSSIBLE),
        (-1, IMPOSSIBLE),
    ],
)
def test_a_number_is_refused_and_both_ways_to_read_it_are_shown(number: int, sentence: str) -> None:
    error = refused(resource(usb=[FTDI, {"vendor": number}]))
    assert (error.path, error.sentence) == (("usb", 1, "vendor"), f"{number} {sentence}")


@given(st.integers(0, 0xFFFF))
def test_the_ways_to_read_a_number_are_themselves_accepted(number: int) -> None:
    with pytest.raises(OptionsError) as error:
        CharDev.check(resource(usb={"vendor": "0403", "product": number}))
    written = error.value.sentence.split('"')[1::2]
    assert usb_id(written[-1]) == f"{number:04x}"
    for text in written:
        CharDev.check(resource(usb={"vendor": text}))


@pytest.mark.parametrize("written", ["403", "0403", "0x0403", "0X403"])
def test_ids_are_hexadecimal_with_or_without_0x(written: str) -> None:
    assert usb_id(written) == "0403"
    CharDev.check(resource(usb={"vendor": written}))


@pytest.mark.parametrize(
    ("usb", "path", "words"),
    [
        ({"vendor": ""}, ("usb", "vendor"), "four hexadecimal digits"),
        ({"vendor": "04O3"}, ("usb", "vendor"), "four hexadecimal digits"),
        ({"vendor": "04030"}, ("usb", "vendor"), "four hexadecimal digits"),
        ([{"vendor": "0403", "product": "0x"}], ("usb", 0, "product"), "four hexadecimal digits"),
        ({"vendor": "0403", "serial": ""}, ("usb", "serial"), "empty"),
        ({"vendor": "0403", "serial": "A "}, ("usb", "serial"), "spaces"),
    ],
)
def test_an_impossible_selector_is_refused_with_its_key(usb: Any, path: tuple[Any, ...], words: str) -> None:
    error = refused(resource(usb=usb))
    assert error.path == path
    assert words in error.sentence


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        (CharDevOptions(), "paths", "name one, or say usb or match"),
        (CharDevOptions([PathOption("/dev/a")], usb=UsbOption("1")), "usb", "beside paths"),
        (CharDevOptions(usb=UsbOption("1"), nodes=[]), "nodes", "is empty"),
        (CharDevOptions(usb=UsbOption("1"), permissions="x"), "permissions", "'x'"),
        (CharDevOptions([PathOption("/dev/a")], nodes="tty"), "nodes", "is for usb"),
        (CharDevOptions([PathOption("/dev/a")], id="port"), "id", "is for usb"),
        (CharDevOptions([PathOption("/dev/a")], permissions="rw"), "permissions", "each path"),
    ],
)
def test_what_does_not_go_together_is_refused_with_its_key(options: CharDevOptions, key: str, words: str) -> None:
    error = refused(Resource("example.com/x", ResourceSpec("chardev", options)))
    assert error.path == (key,)
    assert words in error.sentence


def test_mistyped_keys_are_mistakes() -> None:
    _, mistakes = typed.convert({"usb": [{"vendor": "1", "serials": "x"}, {}], "id": "bus"}, CharDevOptions)
    assert [path for path, _ in mistakes] == [("usb", 0, "serials"), ("usb", 1), ("id",)]


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
    assert problem(backend, "usb:1-2") == (
        "USB device 0403:6001 FT232R at 1-2 is not offered by example.com/x: it has no tty and no hidraw node; "
        "is its driver there?"
    )


@pytest.mark.parametrize(("connected", "problems"), [("3", 0), ("1999", 0), ("2000", 1), ("garbage", 1)])
def test_a_stick_that_has_just_been_plugged_in_has_time_for_its_drivers(
    tmp_path: Path, connected: str, problems: int
) -> None:
    tree = stick("1-2", 5) + f"sys/{directory('1-2')}/power/connected_duration = {connected}"
    found = chardev(tmp_path, tree, resource(nodes="tty")).discover("usb:1-2")
    assert (len(found.devices), len(found.problems)) == (0, problems)


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
    assert words in problem(backend, "usb:1-2")
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
    assert [device.resource for device in found.devices] == ["a/b"]
    why = "its serial is not known, the kernel could not read it when the device was plugged in"
    assert [problem.sentence for problem in found.problems] == [
        f'USB device 0403:6001 at 1-2 is not offered by a/a: {why}; plug it in again, or say id = "port"',
        f"USB device 0403:6001 at 1-2 is not offered by a/c: {why}",
    ]


def test_what_an_id_needs_and_is_not_there_is_a_reason(tmp_path: Path) -> None:
    backend = chardev(tmp_path, stick("1-2", 5), resource(id="serial"))
    assert 'it has no serial; say id = "port"' in problem(backend, "usb:1-2")
    backend = CharDev(backend.host, [resource()])
    (tmp_path / "sys" / CONTROLLER / "usb1/version").unlink()
    assert "its root hub does not say its version" in problem(backend, "usb:1-2")


class Plugged:
    """The backend and the inventory behind it, as the daemon has them."""

    def __init__(self, tmp_path: Path, tree: str, *resources: CharDevResource) -> None:
        self.root = tmp_path
        self.backend = chardev(tmp_path, tree, *resources)
        self.inventory = Inventory(resources, {"chardev": self.backend})
        self.units: set[str] = set()

    def look(self) -> None:
        units = set(self.backend.units())
        found = {unit: self.backend.discover(unit).devices for unit in units | self.units}
        self.units = units
        self.inventory.update("chardev", found)

    def slots(self, name: str = "example.com/x") -> dict[str, str]:
        """ID → where its stick is, or why it has none."""
        slots = self.inventory.slots(name)
        return {slot.id: slot.device.key if slot.device else slot.health.reason for slot in slots.values()}

    def unplug(self, port: str) -> None:
        (self.root / "sys/bus/usb/devices" / port).unlink()
        shutil.rmtree(self.root / "sys" / directory(port))

    def plug(self, port: str, number: int, **options: Any) -> None:
        plant(self.root, stick(port, number, **options))

    def state(self, slot: str) -> str:
        """Why the kubelet is told Unhealthy; empty if it is told Healthy."""
        return self.inventory.slots("example.com/x")[slot].health.reason

    def hold(self, slot: str) -> Held:
        """A pod is given this."""
        device = self.inventory.slots("example.com/x")[slot].device
        assert device is not None
        held = Held("example.com/x", slot, "chardev", device.hardware, device.identity)
        self.inventory.claim([held])
        return held


def test_of_two_sticks_with_one_serial_one_is_offered_and_the_other_is_refused_with_a_reason(tmp_path: Path) -> None:
    node = Plugged(tmp_path, stick("1-3", 5, serial="0001"), resource())
    node.look()
    assert node.slots() == {"0403:6001:0001": "usb:1-3"}
    node.hold("0403:6001:0001")
    node.plug("1-2", 6, serial="0001")
    node.look()
    assert node.slots() == {"0403:6001:0001": "usb:1-3"}  # what a pod holds stays the stick it has
    (unclaimed,) = node.inventory.unclaimed()
    assert unclaimed.device.key == "usb:1-2"
    assert unclaimed.why == "example.com/x selects it, but its ID 0403:6001:0001 is that of usb:1-3"


def test_sticks_with_one_serial_are_all_offered_by_port(tmp_path: Path) -> None:
    tree = stick("1-2", 6, serial="0001") + stick("1-3", 5, serial="0001")
    node = Plugged(tmp_path, tree, resource(id="port"))
    node.look()
    assert node.slots() == {"0000:00:14.0-usbv2-2": "usb:1-2", "0000:00:14.0-usbv2-3": "usb:1-3"}


def test_a_stick_keeps_its_id_elsewhere_but_is_offered_there_only_once_its_pod_has_ended(tmp_path: Path) -> None:
    node = Plugged(tmp_path, stick("1-2", 5, serial="A1"), resource())
    node.look()
    held = node.hold("0403:6001:A1")
    node.unplug("1-2")
    node.look()
    assert node.slots() == {"0403:6001:A1": "gone"}
    node.plug("1-4", 6, serial="A1")
    node.look()
    assert node.slots() == {"0403:6001:A1": "usb:1-4"}
    assert node.state("0403:6001:A1") == "replaced"  # the pod's node is gone for good
    node.inventory.unclaim([held])
    assert node.state("0403:6001:A1") == ""


def test_a_stick_keeps_its_id_and_its_pod_when_it_is_plugged_in_again(tmp_path: Path) -> None:
    node = Plugged(tmp_path, stick("1-2", 5, serial="A1"), resource())
    node.look()
    node.hold("0403:6001:A1")
    node.unplug("1-2")
    node.plug("1-2", 6, serial="A1")
    node.look()
    assert node.slots() == {"0403:6001:A1": "usb:1-2"}
    assert node.state("0403:6001:A1") == ""
    node.unplug("1-2")
    node.plug("1-2", 7, serial="A2")
    node.look()
    assert node.slots() == {"0403:6001:A1": "gone", "0403:6001:A2": "usb:1-2"}


def test_a_node_that_a_pod_still_has_is_not_given_to_a_second_pod_as_another_sticks(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0")
    node = Plugged(tmp_path, tree, resource(nodes="tty"))
    node.look()
    held = node.hold("0403:6001:A1")
    node.unplug("1-2")
    (tmp_path / "dev/ttyUSB0").unlink()
    node.plug("1-3", 6, serial="A2")
    plant(tmp_path, tty("1-3", "ttyUSB0", "188:0"))
    node.look()
    assert node.slots() == {"0403:6001:A1": "gone"}
    (unclaimed,) = node.inventory.unclaimed()
    assert unclaimed.why == "example.com/x selects it, but node:c:188:0 is held by a pod as 0403:6001:A1"
    node.inventory.unclaim([held])
    assert node.slots() == {"0403:6001:A2": "usb:1-3"}


def test_a_path_and_a_stick_never_both_own_a_tty(tmp_path: Path) -> None:
    tree = stick("1-2", 5, serial="A1") + tty("1-2", "ttyUSB0", "188:0")
    path = Resource("a/path", ResourceSpec("chardev", CharDevOptions([PathOption("/dev/ttyUSB0")])))
    node = Plugged(tmp_path, tree, path, resource("a/stick", nodes="all"))
    node.look()
    assert [(one.device.key, one.why.split("; ")[0]) for one in node.inventory.unclaimed()] == [
        ("usb:1-2", "a/stick selects it, but node:c:188:0 belongs to a/path")
    ]


# --- re-enumeration ---


def test_the_same_stick_at_another_number_is_the_same_device_with_another_node(tmp_path: Path) -> None:
    node = Plugged(tmp_path, stick("1-2", 5, serial="A1"), resource())
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


def test_options_of_the_issue_are_read() -> None:
    table = {"usb": [{"vendor": "0403", "product": "6001", "serial": "x"}], "nodes": "all", "count": 2}
    options = msgspec.convert(table, CharDevOptions)
    assert options.usb == [UsbOption("0403", "6001", "x")]


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
