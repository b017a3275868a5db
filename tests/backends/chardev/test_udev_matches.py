from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from backends.base import Device, Host, HostPath, Node, PathChange, Uevent
from backends.chardev import CharDev, CharDevResource
from backends.interface.values import Known
from tests.backends.chardev.chardevs import NAME, chardev, configured, only, problems
from tests.backends.linux.sticks import device_number, directory, record, stick, tty

UNIT = "udev:c:188:0"
AT = f"sys/{directory('1-2')}/1-2:1.0"
BY_ID = "serial/by-id/usb-FTDI_A1-if00-port0"


def serial_port(port: str = "1-2", name: str = "ttyUSB0", numbers: str = "188:0") -> str:
    """A stick with a tty, as the class and the number lead to it."""
    below = f"{port}:1.0/{name}/tty/{name}"
    links = f"sys/class/tty/{name} -> ../../{directory(port)}/{below}\n" + device_number(port, below, numbers)
    driver = f"sys/{directory(port)}/{port}:1.0/driver -> ../../../../../../bus/usb/drivers/ftdi_sio\n"
    return stick(port, 5, serial="A1") + tty(port, name, numbers) + links + driver


# --- options ---


def resource(match: Any, name: str = NAME, **options: Any) -> CharDevResource:
    return configured(name, match=match, **options)


# --- what is there ---


def test_what_matches_is_a_device_named_by_udevs_lasting_link(tmp_path: Path) -> None:
    found = resource({"subsystem": "tty", "properties": {"ID_VENDOR_ID": "0403"}}, "a/serial", count=2)
    backend = chardev(tmp_path, serial_port(), found)
    facts = ("E:ID_BUS=usb", "E:ID_VENDOR_ID=0403", "E:ID_SERIAL=FTDI_A1")
    record(tmp_path, "c188:0", *facts, "S:serial/by-path/pci", f"S:{BY_ID}")
    assert list(backend.units()) == ["udev:tty", UNIT]
    device = only(backend, UNIT)
    assert device == Device(
        key=UNIT,
        unit=UNIT,
        resource="a/serial",
        hardware=frozenset({"node:c:188:0"}),
        exclusive=frozenset({"node:c:188:0"}),
        identity="0403:6001:A1 1.0",
        aliases=frozenset({"FTDI_A1"}),
        place=frozenset({"usb:0000:00:14.0-usbv2-2"}),
        nodes=(Node(HostPath("/dev/ttyUSB0"), "/dev/ttyUSB0", "rw"),),
        numa_node=1,
        attributes={
            "id": (BY_ID,),
            "path": ("/dev/ttyUSB0",),
            "name": ("ttyUSB0",),
            "devname": ("ttyUSB0",),
            "type": ("character",),
            "major": ("188",),
            "minor": ("0",),
        },
    )
    assert list(backend.ids(found, device)) == [f"{BY_ID}::0", f"{BY_ID}::1"]
    assert not [*backend.probe(device)]
    assert not backend.discover("udev:tty").problems
    (tmp_path / "dev/ttyUSB0").unlink()
    assert problems(backend, UNIT)[0].endswith("is not offered by a/serial: /dev/ttyUSB0 does not exist")
    assert [signal.reason for signal in backend.probe(device)] == ["node-missing"]


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ({}, True),
        ({"driver": "ftdi_sio"}, True),
        ({"driver": "ftdi*"}, True),
        ({"driver": "cp210x"}, False),
        ({"attributes": {"idVendor": "0403", "idProduct": "60??"}}, True),
        ({"attributes": {"idVendor": "0403", "idProduct": "6002"}}, False),
        ({"attributes": {"nothing": "*"}}, False),
        ({"properties": {"ID_SERIAL": "FTDI_*"}}, True),
        ({"properties": {"ID_SERIAL": "FTDI_*", "ID_BUS": "pci"}}, False),
        ({"properties": {"ID_NOTHING": "*"}}, False),
        ({"properties": {"DEVNAME": "ttyUSB[0-9]"}}, True),
        ({"tags": ["seat"]}, True),
        ({"tags": ["se*", "systemd"]}, True),
        ({"tags": ["seat", "uaccess"]}, False),
        ({"subsystem": "input"}, False),
    ],
)
def test_all_of_a_match_must_hold(tmp_path: Path, match: dict[str, Any], fits: bool) -> None:
    backend = chardev(tmp_path, serial_port(), resource({"subsystem": "tty", **match}))
    record(tmp_path, "c188:0", "E:ID_SERIAL=FTDI_A1", "E:ID_BUS=usb", "Q:seat", "Q:systemd", "V:1")
    assert len(backend.discover(UNIT).devices) == fits


def test_any_match_of_a_resource_takes_a_device_once(tmp_path: Path) -> None:
    both = resource([{"subsystem": "tty"}, {"subsystem": "tty", "driver": "ftdi_sio"}, {"subsystem": "input"}])
    backend = chardev(tmp_path, serial_port(), both, resource({"subsystem": "tty"}, "a/other"))
    assert [device.resource for device in backend.discover(UNIT).devices] == ["example.com/x", "a/other"]


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ([], "ttyUSB0"),
        (["char/188:0"], "ttyUSB0"),
        (["serial/by-path/b", "serial/by-path/a"], "serial/by-path/a"),
        (["serial/by-path/a", "serial/by-id/b", "by-id/a\x07"], "serial/by-id/b"),
    ],
)
def test_an_id_is_the_link_that_lasts_longest_else_the_nodes_name(tmp_path: Path, links: list[str], name: str) -> None:
    found = resource({"subsystem": "tty"})
    backend = chardev(tmp_path, serial_port(), found)
    record(tmp_path, "c188:0", *(f"S:{link}" for link in links))
    assert list(backend.ids(found, only(backend, UNIT))) == [name]


def test_a_link_that_two_sticks_claim_is_neithers_id_while_both_are_there(tmp_path: Path) -> None:
    found = resource({"subsystem": "tty"})
    tree = serial_port() + serial_port("1-3", "ttyUSB1", "188:1").replace("/005", "/006").replace("189:4", "189:5")
    backend = chardev(tmp_path, tree, found)
    other = "udev:c:188:1"
    record(tmp_path, "c188:0", f"S:{BY_ID}", "S:serial/by-path/pci-1-2")
    assert only(backend, UNIT).attributes["id"] == (BY_ID,)
    record(tmp_path, "c188:1", f"S:{BY_ID}")
    ids = {unit: only(backend, unit).attributes["id"] for unit in (UNIT, other)}
    assert ids == {UNIT: ("serial/by-path/pci-1-2",), other: ("ttyUSB1",)}
    known = Known({unit: backend.discover(unit).devices for unit in (UNIT, other)})
    gone = Uevent("remove", "tty", "/devices/x", None, {"MAJOR": "188", "MINOR": "1"})
    for hint in (gone, PathChange(HostPath("/run/udev/data/c188:1"))):
        assert backend.affects(hint, known) == [other, UNIT]
    assert backend.affects(PathChange(HostPath("/run/udev/data/c4:64")), known) == ["udev:c:4:64"]


@pytest.mark.parametrize(
    ("machine", "ids"),
    [
        (
            "HP_ELITEBOOK_835_13_INCH_G10",
            {
                f"v4l/by-path/pci-0000:c4:00.4-usb-0:1:1.{function}-video-index{n}"
                for function in (0, 2)
                for n in (0, 1)
            },
        ),
        (
            "RPI4B4G",
            {f"v4l/by-path/platform-bcm2835-isp-video-index{n}" for n in range(4)} | {"video10", "video11", "video12"},
        ),
    ],
)
def test_each_camera_and_each_codec_of_a_real_machine_is_offered(tmp_path: Path, machine: str, ids: set[str]) -> None:
    """Of the notebook's two cameras udev makes one link by ID, of the Raspberry Pi's three codecs one by path."""
    recording = Path(__file__).resolve().parents[4] / f"shared/corpus/trees/udev-{machine}.tar.xz"
    if not recording.is_file():
        pytest.skip("there are no recordings of other people's machines beside this checkout")
    with tarfile.open(recording) as tree:
        text = next(file.read().decode() for it in tree if it.isfile() and (file := tree.extractfile(it)))
    videos = [it for it in text.split("\n\n") if "E: SUBSYSTEM=video4linux" in it]
    lines = []
    for video in videos:
        of = dict(line.split("=", 1) for line in video.replace("E: ", "").splitlines() if "=" in line)
        at, numbers, name = f"sys{of['DEVPATH']}", f"{of['MAJOR']}:{of['MINOR']}", of["DEVNAME"].removeprefix("/dev/")
        lines += [f"{at}/dev = {numbers}", f"{at}/uevent = DEVNAME={name}", f"{at}/subsystem -> /sys/class/video4linux"]
        lines += [f"dev/{name} c {numbers}"]
        if of.get("ID_BUS") == "usb":
            above = Path(at).parents[2]
            lines += [f"{above}/idVendor = {of['ID_VENDOR_ID']}", f"{above}/idProduct = {of['ID_MODEL_ID']}"]
            lines += [f"{above}/serial = {of['ID_USB_SERIAL_SHORT']}"] if "ID_USB_SERIAL_SHORT" in of else []
        lines += [
            f"sys/{link} -> ../..{of['DEVPATH']}" for link in (f"class/video4linux/{name}", f"dev/char/{numbers}")
        ]
        record(
            tmp_path, f"c{numbers}", *(it.replace(": ", ":", 1) for it in video.splitlines() if it[:2] in ("S:", "E:"))
        )
    found = resource({"subsystem": "video4linux"})
    backend = chardev(tmp_path, "\n".join(lines), found)
    every = [device for unit in backend.units() for device in backend.discover(unit).devices]
    assert {device_id for device in every for device_id in backend.ids(found, device)} == ids


# --- with udev's word, and without ---


def test_a_device_is_offered_once_udev_has_written_it_down(tmp_path: Path) -> None:
    backend = chardev(tmp_path, serial_port(), resource({"subsystem": "tty", "driver": "ftdi_sio"}))
    record(tmp_path, "c4:64", "I:1")
    assert not backend.discover(UNIT).devices
    assert problems(backend, "udev:tty") == [
        "/dev/ttyUSB0 is offered once udev has it in /run/udev/data; is udevd running?"
    ]
    record(tmp_path, "c188:0", f"S:{BY_ID}")
    assert only(backend, UNIT).attributes["id"] == (BY_ID,)
    assert not problems(backend, "udev:tty")


def test_without_udev_sysfs_decides_and_what_only_udev_knows_is_a_problem(tmp_path: Path) -> None:
    backend = chardev(
        tmp_path,
        serial_port(),
        resource({"subsystem": "tty", "driver": "ftdi_sio", "properties": {"DEVNAME": "ttyUSB*"}}, "a/sysfs"),
        resource({"subsystem": "tty", "properties": {"ID_SERIAL": "*", "DEVNAME": "*"}, "tags": ["seat"]}, "a/udev"),
    )
    assert only(backend, UNIT).resource == "a/sysfs"
    (sentence,) = problems(backend, "udev:tty")
    assert sentence.startswith(
        "a/udev matches by ID_SERIAL and the tag seat, which only udev knows, and there is no udev database at "
        "/run/udev/data: it takes nothing."
    )


def test_before_there_is_a_device_only_what_is_surely_udevs_is_a_problem(tmp_path: Path) -> None:
    backend = chardev(
        tmp_path, "sys/class/tty/", resource({"subsystem": "tty", "properties": {"DEVTYPE": "x", "ID_BUS": "usb"}})
    )
    (sentence,) = problems(backend, "udev:tty")
    assert "matches by ID_BUS, which only udev knows" in sentence


def test_a_subsystem_that_is_not_there_or_cannot_be_listed_is_a_problem(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "sys/class/tty", resource([{"subsystem": "ttty"}, {"subsystem": "tty"}]))
    assert list(backend.units()) == ["udev:ttty", "udev:tty"]
    assert problems(backend, "udev:ttty") == [
        "there is no ttty in /sys/class or /sys/bus; is the name right, and its driver there?"
    ]
    assert problems(backend, "udev:tty") == ["the devices of tty cannot be listed: not a directory"]


# --- what is listened to ---


def test_events_and_udevs_files_affect_the_device_of_their_number(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource([{"subsystem": "tty"}, {"subsystem": "block"}]))
    numbers = {"MAJOR": "188", "MINOR": "0"}
    for action in ("add", "remove"):
        assert backend.affects(Uevent(action, "tty", "/devices/x", None, numbers), Known()) == [UNIT]
    assert backend.affects(Uevent("add", "block", "/devices/x", None, numbers), Known()) == ["udev:b:188:0"]
    assert backend.affects(Uevent("change", "tty", "/devices/x", None, numbers), Known()) == []
    assert backend.affects(Uevent("add", "input", "/devices/x", None, numbers), Known()) == []
    assert backend.affects(Uevent("add", "tty", "/devices/x"), Known()) == []
    assert backend.affects(PathChange(HostPath("/run/udev/data/c188:0")), Known()) == [UNIT]
    assert backend.affects(PathChange(HostPath("/run/udev/data/.#c188:0x")), Known()) == []
    assert backend.affects(PathChange(HostPath("/run/udev/data/n3")), Known()) == []
    assert backend.affects(PathChange(HostPath("/dev/c188:0")), Known()) == []
    known = Known({UNIT: (), "udev:tty": (), "/dev/kvm": (), "usb:1-2": ()})
    assert backend.affects(PathChange(HostPath("/run/udev/data")), known) == [UNIT, "udev:tty"]


def test_the_subsystems_and_udevs_database_are_watched(tmp_path: Path) -> None:
    watches = chardev(tmp_path, "", resource({"subsystem": "tty"})).watches(Known())
    assert (watches.subsystems, watches.directories) == (frozenset({"tty"}), frozenset({HostPath("/run/udev/data")}))


@pytest.mark.needs("/sys")
def test_the_machines_own_null_device_is_matched(tmp_path: Path) -> None:
    found = resource({"subsystem": "mem", "properties": {"DEVNAME": "null"}})
    backend = CharDev(Host(run=tmp_path), [found])  # without its udev database, if it has one
    (device,) = [device for unit in backend.units() for device in backend.discover(unit).devices]
    assert (device.unit, list(backend.ids(found, device))) == ("udev:c:1:3", ["null"])
