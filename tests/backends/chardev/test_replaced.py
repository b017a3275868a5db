"""Other hardware gets the name that a pod knows its own by, or the pod's own gets another name: never in two pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.model import Held
from backends.chardev import CharDevResource
from tests.backends import pci_trees
from tests.backends.chardev.chardevs import NAME, Looked, configured
from tests.backends.linux.sticks import CONTROLLER, device_number, directory, function, stick
from tests.backends.trees import plant

OTHER = "example.com/other"
GPU, DISPLAY = "0000:03:00.0", "0000:00:02.0"


def paths(path: str, name: str = NAME, **options: Any) -> CharDevResource:
    return configured(name, paths=[{"path": path}], **options)


def serial_port(port: str, name: str, numbers: str, interface: str = "1.0") -> str:
    """A tty of the adapter at a port."""
    below = f"{port}:{interface}/{name}/tty/{name}"
    return function(port, below, "tty", name, numbers) + device_number(port, below, numbers)


def adapter(port: str, number: int, name: str, numbers: str, interface: str = "1.0", **ids: Any) -> str:
    """A serial adapter with a tty."""
    return stick(port, number, **ids) + serial_port(port, name, numbers, interface)


def card(address: str, ids: str, minor: int) -> str:
    """A GPU with a render node."""
    at = f"sys/devices/pci0000:00/{address}/drm/renderD{minor}"
    return pci_trees.function(address, ids) + "\n".join((
        f"{at}/dev = 226:{minor}", f"{at}/uevent = DEVNAME=dri/renderD{minor}", f"{at}/subsystem -> /sys/class/drm",
        f"sys/dev/char/226:{minor} -> ../../devices/pci0000:00/{address}/drm/renderD{minor}",
        f"dev/dri/renderD{minor} c 226:{minor}", "",
    ))  # fmt: skip


class Node(Looked):
    """A machine whose hardware is exchanged."""

    def states(self, name: str = NAME) -> dict[str, str]:
        return {i: slot.health.reason for i, slot in self.inventory.slots(name).items()}

    def becomes(self, *trees: str) -> None:
        """Everything that is plugged in is something else now, as after a boot."""
        for at in ("sys/bus/usb/devices", "sys/bus/pci/devices", "sys/dev/char", "sys/devices", "dev"):
            path = self.root / at
            path.rename(self.root / f"was-{len(list(self.root.iterdir()))}") if path.exists() else None
        (self.root / "dev").mkdir()
        plant(self.root, "".join(trees))
        self.look()


METER = adapter("1-1", 5, "ttyUSB0", "188:0", serial="METER-A")


@pytest.mark.parametrize(
    ("now", "what"),
    [
        (adapter("1-2", 6, "ttyUSB0", "188:0", vendor="1a86", product="7523"), "1a86:7523: 1.0 at usb:0000:00:14.0-usbv2-2"),
        (adapter("1-1", 6, "ttyUSB0", "188:0", vendor="1a86", product="7523"), "1a86:7523: 1.0 at usb:0000:00:14.0-usbv2-1"),
        (adapter("1-1", 6, "ttyUSB0", "188:0", serial="METER-B"), "0403:6001:METER-B 1.0 at usb:0000:00:14.0-usbv2-1"),
        (adapter("1-2", 6, "ttyUSB0", "188:0", serial="METER-A"), "0403:6001:METER-A 1.0 at usb:0000:00:14.0-usbv2-2"),
        (adapter("1-1", 6, "ttyUSB0", "188:0", "1.1", serial="METER-A"), "0403:6001:METER-A 1.1 at usb:0000:00:14.0-usbv2-1"),
    ],
)  # fmt: skip
def test_a_held_id_is_unhealthy_on_other_hardware_until_the_pod_ends(tmp_path: Path, now: str, what: str) -> None:
    node = Node(tmp_path, METER, paths("/dev/ttyUSB*"))
    held = node.hold("ttyUSB0")
    node.becomes(now)
    health = node.inventory.slots(NAME)["ttyUSB0"].health
    assert health.reason == "node-replaced"
    was = "0403:6001:METER-A 1.0 at usb:0000:00:14.0-usbv2-1"
    assert health.message == f"it is {what} now; the pod that holds it was given {was}"
    node.inventory.unclaim([held])
    assert node.states() == {"ttyUSB0": ""}


def test_the_same_stick_at_the_same_port_is_the_pods_own_again(tmp_path: Path) -> None:
    node = Node(tmp_path, METER, paths("/dev/ttyUSB*"))
    node.hold("ttyUSB0")
    node.becomes()
    assert node.states() == {"ttyUSB0": "gone"}
    node.becomes(adapter("1-1", 9, "ttyUSB0", "188:0", serial="METER-A"))
    assert node.states() == {"ttyUSB0": ""}


def test_after_a_boot_a_stick_is_known_by_its_port_whatever_the_buses_and_nodes_are_called(tmp_path: Path) -> None:
    by_id = "dev/serial/by-id/meter -> ../../"
    node = Node(
        tmp_path, METER + by_id + "ttyUSB0", paths("/dev/serial/by-id/*"), configured(OTHER, usb={"vendor": "0403"})
    )
    node.hold("serial/by-id/meter")
    again = adapter("3-1", 2, "ttyUSB1", "188:1", serial="METER-A").replace(
        f"{CONTROLLER}/usb1/version", f"{CONTROLLER}/usb3/version"
    )
    node.becomes(again + by_id + "ttyUSB1")
    assert node.states() == {"serial/by-id/meter": ""}
    assert node.states(OTHER) == {"0403:6001:METER-A": "held"}


def test_what_a_pod_holds_is_not_offered_under_the_name_that_it_gets_while_the_pod_has_the_old_one_open(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, METER, paths("/dev/ttyUSB*"))
    held = node.hold("ttyUSB0")
    node.becomes(adapter("1-1", 6, "ttyUSB1", "188:1", serial="METER-A"))
    assert node.states() == {"ttyUSB0": "gone", "ttyUSB1": "held"}
    said = node.inventory.slots(NAME)["ttyUSB1"].health.message
    assert said == "a pod holds what is or was at usb:0000:00:14.0-usbv2-1, as example.com/x/ttyUSB0"
    node.becomes(adapter("1-1", 7, "ttyUSB0", "188:0", serial="METER-A"))
    assert node.states() == {"ttyUSB0": ""}
    node.becomes(adapter("1-1", 8, "ttyUSB1", "188:1", serial="METER-A"))
    node.inventory.unclaim([held])
    assert node.states() == {"ttyUSB1": ""}


def test_two_sticks_that_swapped_their_names_are_in_no_other_pod(tmp_path: Path) -> None:
    one, two = ({"serial": "0001"}, {"serial": "0001"})  # clones
    node = Node(
        tmp_path,
        adapter("1-1", 5, "ttyUSB0", "188:0", **one) + adapter("1-2", 6, "ttyUSB1", "188:1", **two),
        paths("/dev/ttyUSB*"),
    )
    held = node.hold("ttyUSB0")
    node.becomes(adapter("1-1", 6, "ttyUSB1", "188:1", **one) + adapter("1-2", 5, "ttyUSB0", "188:0", **two))
    assert node.states() == {"ttyUSB0": "node-replaced", "ttyUSB1": "held"}
    node.inventory.unclaim([held])
    assert node.states() == {"ttyUSB0": "", "ttyUSB1": ""}


def test_the_other_ports_of_an_adapter_are_for_other_pods(tmp_path: Path) -> None:
    ports = (serial_port("1-1", f"ttyUSB{n}", f"188:{n}", f"1.{n}") for n in range(4))
    four = "".join((stick("1-1", 5, serial="QUAD"), *ports))
    node = Node(tmp_path, four, paths("/dev/ttyUSB*"), configured(OTHER, usb={"vendor": "0403"}))
    assert node.states(OTHER) == {"0403:6001:QUAD": ""}
    held = node.hold("ttyUSB0")
    assert set(node.states().values()) == {""}
    assert node.states(OTHER) == {"0403:6001:QUAD": "held"}  # the whole of which a pod has a part
    node.inventory.unclaim([held])
    assert node.states(OTHER) == {"0403:6001:QUAD": ""}
    whole = replace(held, resource=OTHER, id="0403:6001:QUAD", hardware=frozenset({"usb:1-1", "node:c:189:4"}))
    node.inventory.claim([whole])
    assert set(node.states().values()) == {"held"}


def test_what_many_pods_may_have_is_kept_back_from_none(tmp_path: Path) -> None:
    node = Node(tmp_path, METER, paths("/dev/ttyUSB*", count=2), configured(OTHER, usb={"vendor": "0403"}))
    node.hold("ttyUSB0::0")
    assert node.states(OTHER) == {"0403:6001:METER-A": ""}


def test_another_card_under_the_render_node_after_a_boot_is_not_the_pods(tmp_path: Path) -> None:
    before = card(GPU, "1002:744c", 128) + card(DISPLAY, "8086:4680", 129)
    node = Node(tmp_path, before, paths("/dev/dri/renderD*"))
    held = node.hold("dri/renderD128")
    assert set(node.states().values()) == {""}
    node.becomes(card(GPU, "1002:744c", 129) + card(DISPLAY, "8086:4680", 128))
    assert node.states() == {"dri/renderD128": "node-replaced", "dri/renderD129": "held"}
    node.becomes(card(GPU, "10de:2684", 128))  # another model in the slot
    assert node.states() == {"dri/renderD128": "node-replaced"}
    node.inventory.unclaim([held])
    assert node.states() == {"dri/renderD128": ""}


def test_another_gpu_with_nvidias_number_is_not_the_pods(tmp_path: Path) -> None:
    def gpu(address: str, ids: str) -> str:
        said = f"proc/driver/nvidia/gpus/{address}/information = Device Minor: \t 0\n"
        return pci_trees.function(address, ids) + said + "dev/nvidia0 c 195:0"

    node = Node(tmp_path, gpu(GPU, "10de:2330"), paths("/dev/nvidia[0-9]"))
    node.hold("nvidia0")
    assert node.states() == {"nvidia0": ""}
    (tmp_path / "proc/driver").rename(tmp_path / "proc/was")
    node.becomes(gpu("0000:04:00.0", "10de:2330"))
    assert node.states() == {"nvidia0": "node-replaced"}


def test_two_cards_of_one_model_are_told_apart_by_their_slots(tmp_path: Path) -> None:
    pair = card(GPU, "1002:744c", 128), card("0000:04:00.0", "1002:744c", 128)
    node = Node(tmp_path, pair[0], paths("/dev/dri/renderD*", count=5))
    node.hold("dri/renderD128::0")
    node.becomes(pair[1])
    assert node.states() == {"dri/renderD128::0": "node-replaced", **{f"dri/renderD128::{n}": "" for n in range(1, 5)}}


def test_what_an_older_version_recorded_means_what_it_meant(tmp_path: Path) -> None:
    node = Node(tmp_path, METER, paths("/dev/ttyUSB*"))
    node.inventory.claim([Held(NAME, "ttyUSB0", "chardev", frozenset({"node:c:188:0"}), "c:188:0")])
    assert node.states() == {"ttyUSB0": ""}
    node.becomes(adapter("1-2", 6, "ttyUSB0", "188:0", vendor="1a86", product="7523"))
    assert node.states() == {"ttyUSB0": ""}
    node.becomes(adapter("1-2", 6, "ttyUSB0", "188:1"))
    assert node.states() == {"ttyUSB0": "node-replaced"}


# --- a stick that is another one once it has its firmware ---

CORAL = [{"vendor": "1a6e", "product": "089a"}, {"vendor": "18d1", "product": "9302"}]
MODEM = [{"vendor": "12d1", "product": "1f01"}, {"vendor": "12d1", "product": "14dc"}]
HERE, PEER = "0000:00:14.0-usbv2-1", "0000:00:14.0-usbv3-1"


def socket(port: str) -> str:
    """The links between the two ports of a socket, as the kernel makes them for what is plugged in."""
    at = {bus: f"sys/{CONTROLLER}/usb{bus}/{bus}-0:1.0/usb{bus}-port1" for bus in (1, 2)}
    links = [f"{at[a]}/peer -> ../../../usb{b}/{b}-0:1.0/usb{b}-port1" for a, b in ((1, 2), (2, 1))]
    bus = port[0]
    return "\n".join((*links, f"sys/{directory(port)}/port -> ../{bus}-0:1.0/usb{bus}-port1", ""))


@pytest.mark.parametrize(
    ("usb", "before", "after", "healthy"),
    [
        (CORAL, ("1a6e", "089a", None), ("18d1", "9302", None), True),
        (MODEM, ("12d1", "1f01", "S1"), ("12d1", "14dc", "S1"), True),
        (MODEM, ("12d1", "1f01", "S1"), ("12d1", "14dc", "S2"), False),
        ([{"vendor": "0403"}, {"vendor": "1a86"}], ("0403", "6001", None), ("1a86", "7523", None), False),
    ],
)
@pytest.mark.parametrize("port", ["1-1", "2-1"])
def test_a_stick_with_firmware_is_the_one_that_the_pod_was_given(
    tmp_path: Path, usb: Any, before: Any, after: Any, healthy: bool, port: str
) -> None:
    node = Node(tmp_path, stick("1-1", 5, *before) + socket("1-1"), configured(usb=usb))
    (device_id,) = node.states()
    held = node.hold(device_id)
    node.becomes(stick(port, 6, *after) + socket(port))
    states = node.states()
    assert (states.pop(device_id) == "") is healthy
    assert set(states.values()) <= {"held"}
    node.inventory.unclaim([held])
    assert set(node.states().values()) == {""}
    assert len(node.states()) == 1


def test_a_stick_is_given_though_the_kernel_linked_its_port_after_it_was_found(tmp_path: Path) -> None:
    node = Node(tmp_path, stick("1-1", 5), configured(usb={"vendor": "0403"}))
    grant = node.grant(HERE)
    plant(tmp_path, socket("1-1"))
    node.backend.claim(node.backend.resources[0], [grant])


def test_a_stick_with_firmware_is_in_no_other_resource_while_its_pod_runs(tmp_path: Path) -> None:
    one, two = ([selector] for selector in CORAL)
    node = Node(
        tmp_path, stick("1-1", 5, "1a6e", "089a") + socket("1-1"), configured(usb=one), configured(OTHER, usb=two)
    )
    held = node.hold(HERE)
    for port, device_id in (("1-1", HERE), ("2-1", PEER)):
        node.becomes(stick(port, 6, "18d1", "9302") + socket(port))
        assert node.states() == {HERE: "gone"}
        assert node.states(OTHER) in ({}, {device_id: "held"})
    node.inventory.unclaim([held])
    assert node.states(OTHER) == {PEER: ""}


def test_another_stick_at_a_held_port_waits_for_the_pod(tmp_path: Path) -> None:
    node = Node(tmp_path, stick("1-1", 5, serial="A"), configured(usb={"vendor": "0403"}))
    held = node.hold("0403:6001:A")
    node.becomes(stick("1-1", 6, serial="B") + stick("1-2", 7, serial="C"))
    assert node.states() == {"0403:6001:A": "gone", "0403:6001:B": "held", "0403:6001:C": ""}
    node.inventory.unclaim([held])
    assert node.states() == {"0403:6001:B": "", "0403:6001:C": ""}


def test_a_match_of_udevs_is_told_apart_by_its_port_where_two_have_one_serial(tmp_path: Path) -> None:
    named = "sys/class/tty/ttyUSB0 -> ../../{}/{}:1.0/ttyUSB0/tty/ttyUSB0\n"
    node = Node(
        tmp_path, adapter("1-1", 5, "ttyUSB0", "188:0", serial="0001") + named.format(directory("1-1"), "1-1"),
        configured(match={"subsystem": "tty"}),
    )  # fmt: skip
    node.hold("ttyUSB0")
    (tmp_path / "sys/class/tty/ttyUSB0").unlink()
    node.becomes(adapter("1-2", 5, "ttyUSB0", "188:0", serial="0001") + named.format(directory("1-2"), "1-2"))
    assert node.states() == {"ttyUSB0": "node-replaced"}
