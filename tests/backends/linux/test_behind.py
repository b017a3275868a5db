"""What stands behind a node, as sysfs of real machines shows it (paths as in `udevadm info --export-db`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from backends.base import HostPath
from backends.linux.nodes import Behind, DeviceNode, behind
from tests.backends.trees import planted_host

NVME = "pci0000:00/0000:00:1b.0/0000:03:00.0"
HEAD = "virtual/nvme-subsystem/nvme-subsys0/nvme0n1"
SATA = "pci0000:00/0000:00:17.0"
HID = "pci0000:00/0000:00:14.0/usb1/1-2/1-2:1.1/0003:046D:C534.0002"
CAMERA = "pci0000:00/0000:00:14.0/usb1/1-3/1-3:1.0/video4linux/video0"
I2C = "pci0000:00/0000:00:1f.4/i2c-0"
PI = "platform/soc/fe804000.i2c"
IDS = "8086:a282 8086:7270"
PCI = "uevent = PCI_ID=8086:A282\\nPCI_SUBSYS_ID=8086:7270"
USB = "sys/devices/pci0000:00/0000:00:14.0/usb1/version = 2.00"


@pytest.mark.parametrize(
    ("at", "files", "identity", "place"),
    [
        (f"{NVME}/nvme/nvme0", [(NVME, PCI), (f"{NVME}/nvme/nvme0", "serial = S64DNE0R")], f"{IDS} serial=S64DNE0R", "pci:0000:03:00.0"),
        (
            f"{NVME}/nvme/nvme0/nvme0n1/nvme0n1p2",
            [(NVME, PCI), (f"{NVME}/nvme/nvme0", "serial = S64DNE0R"), (f"{NVME}/nvme/nvme0/nvme0n1", "wwid = eui.0025"), (f"{NVME}/nvme/nvme0/nvme0n1", "nsid = 1"), (f"{NVME}/nvme/nvme0/nvme0n1/nvme0n1p2", "partition = 2")],
            f"{IDS} wwid=eui.0025 2 1", "pci:0000:03:00.0",
        ),
        (
            f"{SATA}/ata1/host0/target0:0:0/0:0:0:0/scsi_generic/sg0",
            [(SATA, PCI), (f"{SATA}/ata1/host0/target0:0:0/0:0:0:0", "wwid = t10.ATA SAMSUNG")],
            f"{IDS} wwid=t10.ATA SAMSUNG", "wwid=t10.ATA SAMSUNG",
        ),
        (f"{SATA}/ata1/host0/target0:0:0/0:0:0:0/scsi_generic/sg0", [(SATA, PCI)], IDS, None),
        (f"{HID}/hidraw/hidraw1", [("pci0000:00/0000:00:14.0/usb1/1-2", "idVendor = 046d")], "046d:: 1.1", "usb:0000:00:14.0-usbv2-2"),
        (CAMERA, [(CAMERA, "index = 0"), (CAMERA, "name = C920")], ":: C920 0 1.0", "usb:0000:00:14.0-usbv2-3"),
        (f"{I2C}/i2c-dev/i2c-0", [(I2C.rpartition("/")[0], PCI), (I2C, "name = SMBus I801")], f"{IDS} SMBus I801", "pci:0000:00:1f.4"),
        (f"{PI}/i2c-1/i2c-dev/i2c-1", [(PI, "subsystem -> ../../../../bus/platform")], "fe804000.i2c", "platform:fe804000.i2c"),
        (f"{HEAD}/nvme0n1p2", [(f"{HEAD}/nvme0n1p2", "partition = 2"), (HEAD, "nsid = 1"), (HEAD, "wwid = eui.0025")], "wwid=eui.0025 2 1", "wwid=eui.0025"),
        (HEAD, [(HEAD, "nsid = 1")], "", None),
        ("virtual/misc/kvm", [], "", None),
    ],
)  # fmt: skip
def test_a_node_is_known_by_what_the_kernel_made_it_for(
    tmp_path: Path, at: str, files: list[tuple[str, str]], identity: str, place: str | None
) -> None:
    lines = [USB, f"sys/dev/char/10:1 -> ../../devices/{at}", f"sys/devices/{at}/dev = 10:1"]
    host = planted_host(tmp_path, "\n".join((*lines, *(f"sys/devices/{path}/{entry}" for path, entry in files))))
    found = behind(host, DeviceNode(HostPath("/dev/x"), block=False, major=10, minor=1))
    assert found == Behind(identity, frozenset({place} if place else ()))
