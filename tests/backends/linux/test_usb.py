from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Host, HostPath
from backends.linux import sysfs, usb
from backends.linux.sysfs import KernelNode
from backends.linux.usb import UsbDevice
from tests.backends.linux.sticks import CONTROLLER, describe, directory, function, stick, tty
from tests.backends.trees import planted_host


def read(tmp_path: Path, port: str, *trees: str) -> UsbDevice | None:
    return usb.read(planted_host(tmp_path, "\n".join(trees)), port)


def found(tmp_path: Path, port: str, *trees: str) -> UsbDevice:
    device = read(tmp_path, port, *trees)
    assert device is not None
    return device


def test_a_stick_is_read_with_all_that_is_known_of_it(tmp_path: Path) -> None:
    at = f"sys/{directory('1-2.3')}"
    more = f"{at}/manufacturer = FTDI\n{at}/product = FT232R USB UART\n{at}/speed = 12\n{at}/power/connected_duration = 1500"
    device = found(tmp_path, "1-2.3", stick("1-2.3", 5, serial="A50285BI", dev=False), more)
    assert device == UsbDevice(
        port="1-2.3",
        path=HostPath(f"/sys/{CONTROLLER}/usb1/1-2/1-2.3"),
        place="0000:00:14.0-usbv2-2.3",
        places=frozenset({"usb:0000:00:14.0-usbv2-2.3"}),
        bus=1,
        number=5,
        vendor="0403",
        product="6001",
        serial="A50285BI",
        serial_fault=None,
        manufacturer="FTDI",
        name="FT232R USB UART",
        speed="12",
        connected=1500,
        numa_node=1,
        nodes=(KernelNode("usb", HostPath("/dev/bus/usb/001/005"), "c:189:4"),),
    )


def test_its_nodes_are_those_below_it_but_not_those_of_another_device_behind_it(tmp_path: Path) -> None:
    device = found(
        tmp_path,
        "1-2",
        stick("1-2", 5, dev=False),
        tty("1-2", "ttyUSB0", "188:0", dev=False),
        function("1-2", "1-2:1.1/0003:0403:6001.0001/hidraw/hidraw0", "hidraw", "hidraw0", "240:0", dev=False),
        function("1-2", "1-2:1.2/host6/target6:0:0/6:0:0:0/block/sdb", "block", "sdb", "8:16", dev=False),
        function("1-2", "1-2:1.2/host6/target6:0:0/6:0:0:0/block/sdb/sdb1", "block", "sdb1", "8:17", dev=False),
        stick("1-2.1", 6, dev=False),
        tty("1-2.1", "ttyUSB1", "188:1", dev=False),
    )
    assert [(node.subsystem, node.path.text, node.number) for node in device.nodes] == [
        ("usb", "/dev/bus/usb/001/005", "c:189:4"),
        ("tty", "/dev/ttyUSB0", "c:188:0"),
        ("hidraw", "/dev/hidraw0", "c:240:0"),
        ("block", "/dev/sdb", "b:8:16"),
        ("block", "/dev/sdb1", "b:8:17"),
    ]


def test_ports_are_devices_and_root_hubs_and_no_interfaces(tmp_path: Path) -> None:
    links = "\n".join(f"sys/bus/usb/devices/{name} -> x" for name in ("usb1", "1-0:1.0", "1-2", "1-2:1.0", "1-2.13"))
    assert usb.ports(planted_host(tmp_path, links)) == ["1-2", "1-2.13", "usb1"]


def test_a_host_without_usb_has_no_ports(tmp_path: Path) -> None:
    assert usb.ports(planted_host(tmp_path)) == []
    assert read(tmp_path, "1-2") is None


@pytest.mark.parametrize(
    ("devpath", "port"),
    [
        ("/devices/pci0000:00/0000:00:14.0/usb1", "usb1"),
        ("/devices/pci0000:00/0000:00:14.0/usb1/1-2", "1-2"),
        ("/devices/pci0000:00/0000:00:14.0/usb1/1-0:1.0", "usb1"),
        ("/devices/pci0000:00/0000:00:14.0/usb1/1-2/1-2.3/1-2.3:1.0/ttyUSB0/tty/ttyUSB0", "1-2.3"),
        ("/devices/pci0000:00/i2c-1/1-50", None),  # an I2C device has such a name too
        ("/devices/virtual/misc/kvm", None),
        ("", None),
    ],
)
def test_an_event_is_that_of_the_deepest_stick_on_its_path(devpath: str, port: str | None) -> None:
    assert usb.port_of(devpath) == port


@pytest.mark.parametrize(
    ("port", "place"), [("1-2", "0000:00:14.0-usbv2-2"), ("2-2", "0000:00:14.0-usbv3-2"), ("1-10.4.1", None)]
)
def test_a_place_names_controller_and_root_hub_but_never_the_number_of_the_bus(
    tmp_path: Path, port: str, place: str | None
) -> None:
    device = found(tmp_path, port, stick(port, 9, dev=False))
    assert device.place == (place or "0000:00:14.0-usbv2-10.4.1")


def test_a_root_hub_has_a_place_too_and_without_its_version_nothing_behind_it_has_one(tmp_path: Path) -> None:
    at = f"sys/{CONTROLLER}/usb1"
    ids = "\n".join(f"{at}/{name} = {value}" for name, value in
                    {"busnum": 1, "devnum": 1, "idVendor": "1d6b", "idProduct": "0002"}.items())  # fmt: skip
    host = planted_host(tmp_path, f"{stick('1-2', 5, dev=False)}\nsys/bus/usb/devices/usb1 -> ../../../{at[4:]}\n{ids}")
    hub = usb.read(host, "usb1")
    assert hub is not None
    assert (hub.place, hub.nodes) == ("0000:00:14.0-usbv2", ())
    (tmp_path / at / "version").write_text("garbage\n")
    device = usb.read(host, "1-2")
    assert device is not None
    assert device.place is None


@pytest.mark.parametrize(
    ("file", "text", "field", "value"),
    [
        ("speed", "\0\xff", "speed", "\0ÿ"),
        ("serial", "", "serial", None),
        ("serial", "  ", "serial", None),
        ("serial", " A 1 ", "serial", "A 1"),
        ("dev", "garbage", "nodes", ()),
        ("dev", "1:2:3", "nodes", ()),
        ("dev", "99999999999:0", "nodes", ()),
        ("uevent", "garbage", "nodes", ()),
        ("uevent", "DEVNAME=../../etc/passwd", "nodes", ()),
        ("uevent", "DEVNAME=/etc/passwd", "nodes", ()),
        ("uevent", "DEVNAME=bus/\x07", "nodes", ()),
    ],
)
def test_garbage_is_not_known(tmp_path: Path, file: str, text: str, field: str, value: Any) -> None:
    host = planted_host(tmp_path, stick("1-2", 5, dev=False))
    (tmp_path / "sys" / directory("1-2") / file).write_text(text)
    device = usb.read(host, "1-2")
    assert device is not None
    assert getattr(device, field) == value


@pytest.mark.parametrize("file", ["idVendor", "idProduct", "busnum", "devnum"])
@pytest.mark.parametrize("text", [None, "", "garbage", "\0", "-"])
def test_what_does_not_say_what_it_is_is_no_stick(tmp_path: Path, file: str, text: str | None) -> None:
    host = planted_host(tmp_path, stick("1-2", 5, dev=False))
    path = tmp_path / "sys" / directory("1-2") / file
    path.unlink()
    if text is not None:
        path.write_text(text)
    assert usb.read(host, "1-2") is None


def test_a_serial_is_unknown_not_absent_where_the_device_says_that_it_has_one(tmp_path: Path) -> None:
    host = planted_host(tmp_path, stick("1-2", 5, dev=False))
    describe(tmp_path, "1-2", 0)
    device = usb.read(host, "1-2")
    assert device is not None
    assert (device.serial, device.serial_fault) == (None, None)
    describe(tmp_path, "1-2", 3)
    device = usb.read(host, "1-2")
    assert device is not None
    assert (device.serial, device.serial_fault) == (
        None,
        "the kernel could not read it when the device was plugged in",
    )


@pytest.mark.parametrize(("serial", "words"), [(b"A\x07B", "cannot be printed"), (b"\xff\xfe", "cannot be printed")])
def test_a_serial_that_is_no_text_is_unknown(tmp_path: Path, serial: bytes, words: str) -> None:
    host = planted_host(tmp_path, stick("1-2", 5, dev=False))
    (tmp_path / "sys" / directory("1-2") / "serial").write_bytes(serial)
    device = usb.read(host, "1-2")
    assert device is not None
    assert device.serial is None
    assert words in (device.serial_fault or "")


def test_a_serial_that_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    at = f"sys/{directory('1-2')}/serial/"  # reading a directory fails
    device = found(tmp_path, "1-2", stick("1-2", 5, dev=False), at)
    assert (device.serial, device.serial_fault) == (None, "is a directory")


@pytest.mark.parametrize(
    "link",
    [
        "1-2",  # itself
        "../devices/1-2",  # itself, the long way
        "/etc",
        "../../../../../../../../etc",
        "../../../devices/../../etc",
        "../../../devices/nowhere",
        "../../../bus",
    ],
)
def test_a_link_that_does_not_lead_to_a_device_is_no_stick(tmp_path: Path, link: str) -> None:
    host = planted_host(tmp_path, f"sys/bus/usb/devices/1-2 -> {link}")
    assert usb.ports(host) == ["1-2"]
    assert usb.read(host, "1-2") is None


def test_what_looks_like_a_stick_but_lies_elsewhere_is_none(tmp_path: Path) -> None:
    elsewhere = stick("1-2", 5, dev=False).replace("sys/devices/", "elsewhere/")
    host = planted_host(tmp_path, elsewhere.replace("../../../devices/", "../../../../elsewhere/"))
    assert (tmp_path / "sys/bus/usb/devices/1-2/idVendor").exists()
    assert usb.read(host, "1-2") is None


def test_links_below_a_stick_are_not_followed(tmp_path: Path) -> None:
    loops = f"sys/{directory('1-2')}/1-2:1.0/port -> ..\nsys/{directory('1-2')}/self -> ."
    device = found(tmp_path, "1-2", stick("1-2", 5, dev=False), tty("1-2", "ttyUSB0", "188:0", dev=False), loops)
    assert [node.path.name for node in device.nodes] == ["005", "ttyUSB0"]


def replug_while_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int) -> Host:
    """The stick is another each time its serial is read."""
    host = planted_host(tmp_path, stick("1-2", 5, serial="first", dev=False))
    at, reads, original = tmp_path / "sys" / directory("1-2"), 0, sysfs.read_bytes

    def replugged(host: Host, path: HostPath) -> bytes:
        nonlocal reads
        found = original(host, path)
        if path.name == "serial" and (reads := reads + 1) <= times:
            (at / "devnum").write_text(f"{5 + reads}\n")
            (at / "serial").write_text(f"number {reads}\n")
        return found

    monkeypatch.setattr(sysfs, "read_bytes", replugged)
    return host


def test_what_was_read_is_of_one_stick_although_it_was_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = usb.read(replug_while_reading(tmp_path, monkeypatch, 2), "1-2")
    assert device is not None
    assert (device.number, device.serial) == (7, "number 2")


def test_a_stick_that_is_replaced_faster_than_it_is_read_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usb.read(replug_while_reading(tmp_path, monkeypatch, 1000), "1-2") is None


def test_a_stick_that_vanishes_while_it_is_read_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = planted_host(tmp_path, stick("1-2", 5, serial="A", dev=False))
    original = sysfs.read_bytes

    def vanishing(host: Host, path: HostPath) -> bytes:
        if path.name == "serial":
            (tmp_path / "sys/bus/usb/devices/1-2").unlink()
            raise OSError(19, "No such device")
        return original(host, path)

    monkeypatch.setattr(sysfs, "read_bytes", vanishing)
    assert usb.read(host, "1-2") is None


GARBAGE = st.dictionaries(
    st.sampled_from(
        ["busnum", "devnum", "idVendor", "idProduct", "serial", "dev", "uevent", "speed", "descriptors", "version"]
    ),
    st.binary(max_size=40) | st.text(string.hexdigits + ":/.=\n", max_size=12).map(str.encode),
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Host:
    return planted_host(tmp_path_factory.mktemp("host"), stick("1-2", 5, serial="A", dev=False))


@settings(max_examples=80, deadline=None)
@given(garbage=GARBAGE)
def test_no_garbage_makes_reading_fail(planted: Host, garbage: dict[str, bytes]) -> None:
    for name, data in garbage.items():  # on top of what the examples before left
        (planted.sys / directory("1-2") / name).write_bytes(data)
    device = usb.read(planted, "1-2")
    assert device is None or (len(device.vendor) == len(device.product) == 4)


def test_the_machines_own_usb_devices_are_read_if_it_has_any() -> None:
    for port in usb.ports(Host()):
        device = usb.read(Host(), port)
        assert device is not None
        assert device.place
        assert any(node.subsystem == "usb" for node in device.nodes)
