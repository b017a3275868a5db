from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Host, HostPath
from backends.linux import udev
from backends.linux.udev import UdevDevice
from tests.backends.linux.sticks import device_number, directory, record, stick, tty
from tests.backends.trees import planted_host

TTY = tty("1-2", "ttyUSB0", "188:0", dev=False) + device_number("1-2", "1-2:1.0/ttyUSB0/tty/ttyUSB0", "188:0")
STICK = stick("1-2", 5, serial="A5 0", dev=False) + TTY


def found(host: Host, number: str = "c:188:0") -> UdevDevice:
    device = udev.read(host, number)
    assert device is not None
    return device


def test_a_device_is_what_the_kernel_and_udev_say(tmp_path: Path) -> None:
    entry = ("I:123", "E:ID_BUS=usb", "E:ID_VENDOR_ID=0403", "E:ID_SERIAL=FTDI=1", "G:old", "G:seat", "Q:seat", "V:1")
    host = planted_host(tmp_path, STICK)
    record(tmp_path, "c188:0", *entry, "S:serial/by-path/p", "S:serial/by-id/usb-FTDI", "L:10", "", "garbage")
    path = HostPath(f"/sys/{directory('1-2')}/1-2:1.0/ttyUSB0/tty/ttyUSB0")
    device = found(host)
    assert (device.path, device.node.path.text, device.recorded) == (path, "/dev/ttyUSB0", True)
    assert device.properties == {
        "DEVNAME": "ttyUSB0",
        "SUBSYSTEM": "tty",
        "DEVPATH": path.text.removeprefix("/sys"),
        "ID_BUS": "usb",
        "ID_VENDOR_ID": "0403",
        "ID_SERIAL": "FTDI=1",
    }
    assert device.tags == {"seat"}
    assert device.links == ("serial/by-id/usb-FTDI", "serial/by-path/p")


def test_an_old_udevs_tags_are_those_it_has(tmp_path: Path) -> None:
    host = planted_host(tmp_path, STICK)
    record(tmp_path, "c188:0", "G:seat")
    assert found(host).tags == {"seat"}


def test_without_an_entry_there_is_only_the_kernels_word(tmp_path: Path) -> None:
    host = planted_host(tmp_path, STICK)
    device = found(host)
    assert (device.recorded, device.tags, device.links) == (False, frozenset(), ())
    assert not udev.has_database(host)
    record(tmp_path, "c4:64", "I:1")
    assert udev.has_database(host)
    assert not found(host).recorded


@pytest.mark.parametrize(
    ("fact", "is_its"),
    [
        ("ID_VENDOR_ID=0403", True),
        ("ID_VENDOR_ID=10c4", False),
        ("ID_MODEL_ID=6001", True),
        ("ID_MODEL_ID=ea60", False),
        ("ID_USB_SERIAL_SHORT=A5_0", True),
        ("ID_USB_SERIAL_SHORT=A5_1", False),
    ],
)
def test_the_entry_of_the_stick_that_had_the_number_before_is_not_taken(
    tmp_path: Path, fact: str, is_its: bool
) -> None:
    host = planted_host(tmp_path, STICK)
    record(tmp_path, "c188:0", "E:ID_BUS=usb", f"E:{fact}")
    assert found(host).recorded is is_its


def test_the_entry_of_a_stick_is_not_that_of_a_port_on_the_board(tmp_path: Path) -> None:
    tree = "sys/devices/s/tty/ttyS0/dev = 4:64\nsys/devices/s/tty/ttyS0/subsystem -> tty\n"
    tree += "sys/devices/s/tty/ttyS0/uevent = DEVNAME=ttyS0\nsys/dev/char/4:64 -> ../../devices/s/tty/ttyS0"
    host = planted_host(tmp_path, tree)
    record(tmp_path, "c4:64", "E:ID_BUS=usb", "E:ID_VENDOR_ID=0403")
    assert not found(host, "c:4:64").recorded
    record(tmp_path, "c4:64", "E:ID_PATH=platform")
    assert found(host, "c:4:64").recorded


@pytest.mark.parametrize("number", ["c:188:1", "b:188:0", "c:", "", "x", "c:../../x"])
def test_a_number_that_nobody_has_is_no_device(tmp_path: Path, number: str) -> None:
    assert udev.read(planted_host(tmp_path, STICK), number) is None


def test_a_number_that_has_just_become_another_devices_is_no_device(tmp_path: Path) -> None:
    host = planted_host(tmp_path, STICK)
    (tmp_path / "sys" / directory("1-2") / "1-2:1.0/ttyUSB0/tty/ttyUSB0/dev").write_text("188:1\n")
    assert udev.read(host, "c:188:0") is None


def test_a_subsystem_is_a_class_or_a_bus(tmp_path: Path) -> None:
    links = "sys/class/tty/ttyUSB0 -> ../../devices/t\nsys/class/tty/none -> x\nsys/devices/t/dev = 188:0"
    block = "sys/class/block/sda/dev = 8:0"
    host = planted_host(tmp_path, f"{links}\n{block}\n{STICK}\nsys/class/net/")
    assert udev.numbers(host, "tty") == ["c:188:0"]
    assert udev.numbers(host, "usb") == ["c:189:4"]
    assert udev.numbers(host, "block") == ["b:8:0"]
    assert udev.numbers(host, "net") == []
    assert udev.numbers(host, "ttty") is None


def test_a_chip_of_gpio_is_found_beside_the_class_of_the_same_name_which_has_no_nodes(tmp_path: Path) -> None:
    """As in the recording of a Raspberry Pi 4 (RPI4B4G.txt of canonical/checkbox)."""
    at = "platform/soc/fe200000.gpio"
    host = planted_host(
        tmp_path,
        f"""
        sys/class/gpio/export
        sys/class/gpio/gpiochip0 -> ../../devices/{at}/gpio/gpiochip0
        sys/devices/{at}/gpio/gpiochip0/base = 0
        sys/bus/gpio/devices/gpiochip0 -> ../../../devices/{at}/gpiochip0
        sys/devices/{at}/gpiochip0/dev = 254:0
        """,
    )
    assert udev.numbers(host, "gpio") == ["c:254:0"]


def test_attributes_and_drivers_are_those_of_the_nearest_device_above(tmp_path: Path) -> None:
    at = f"sys/{directory('1-2')}"
    more = (
        f"{at}/driver -> ../../bus/usb/drivers/usb\n{at}/1-2:1.0/driver -> ../ftdi_sio\n{at}/1-2:1.0/interface = UART"
    )
    host = planted_host(tmp_path, f"{STICK}\n{more}")
    path = found(host).path
    assert udev.attribute(host, path, "idVendor") == "0403"
    assert udev.attribute(host, path, "interface") == "UART"
    assert udev.attribute(host, path, "1-2:1.0/interface") == "UART"
    assert udev.attribute(host, path, "nothing") is None
    assert udev.driver(host, path) == "ftdi_sio"
    assert udev.driver(host, HostPath("/sys/devices/virtual/x")) is None


@pytest.mark.parametrize(
    ("name", "number"),
    [("c188:0", "c:188:0"), ("b8:16", "b:8:16"), ("n2", None), ("+usb:1-2", None), (".#c188:0ab", None), ("", None)],
)
def test_the_databases_files_are_named_by_number(name: str, number: str | None) -> None:
    assert udev.entry_number(name) == number


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Host:
    root = tmp_path_factory.mktemp("host")
    host = planted_host(root, STICK)
    record(root, "c188:0")
    return host


LINES = st.lists(st.sampled_from("EGQSVI:=\n\0 aé"), max_size=40).map(lambda letters: "".join(letters).encode())


@settings(max_examples=80, deadline=None)
@given(garbage=st.binary(max_size=80) | LINES)
def test_no_garbage_makes_reading_fail(planted: Host, garbage: bytes) -> None:
    (planted.run / "udev/data/c188:0").write_bytes(garbage)
    assert found(planted).node.number == "c:188:0"


@pytest.mark.needs("/sys")
def test_the_machines_own_null_device_is_read() -> None:
    device = found(Host(), "c:1:3")
    assert (device.node.path.text, device.properties["SUBSYSTEM"]) == ("/dev/null", "mem")
    assert "c:1:3" in (udev.numbers(Host(), "mem") or ())
