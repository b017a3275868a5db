"""The nodes that the recipes are shown on, as fixture trees (see tests/backends/trees.py): heading → tree.

Paths and numbers are those that the kernel's and the vendors' drivers give, as their documentation and sources have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tests.backends.linux.sticks import device_number, directory, stick, tty
from tests.backends.machines import drm_nodes
from tests.backends.pci_trees import function
from tests.backends.rdma_trees import ETHERNET, RDMA_CM, hca


def _serial() -> str:
    below = "1-2:1.0/ttyUSB0/tty/ttyUSB0"
    links = f"sys/class/tty/ttyUSB0 -> ../../{directory('1-2')}/{below}\n" + device_number("1-2", below, "188:0")
    return (
        "dev/ttyS0 c 4:64\ndev/ttyS1 c 4:65\n"
        + stick("1-2", 5, serial="A50285BI")
        + tty("1-2", "ttyUSB0", "188:0")
        + links
    )


def _camera(number: int, capability: str, port: str, by_id: str) -> str:
    """A node of a USB camera: each camera has one for its picture and one for its metadata."""
    name, minor = f"video{number}", f"81:{number}"
    below = f"{port}:1.0/video4linux/{name}"
    return (
        f"sys/class/video4linux/{name} -> ../../{directory(port)}/{below}\n"
        f"sys/{directory(port)}/{below}/dev = {minor}\n"
        f"sys/{directory(port)}/{below}/uevent = MAJOR=81\\nMINOR={number}\\nDEVNAME={name}\n"
        f"sys/{directory(port)}/{below}/subsystem -> /sys/class/video4linux\n"
        f"{device_number(port, below, minor)}"
        f"dev/{name} c {minor}\n"
        f"dev/v4l/by-id/{by_id} -> ../../{name}\n"
        f"run/udev/data/c{minor} = S:v4l/by-id/{by_id}\\nE:ID_V4L_CAPABILITIES={capability}\\nV:1\n"
    )


def _qat() -> str:
    physical, virtual = "0000:6b:00.0", ["0000:6b:00.1", "0000:6b:00.2"]
    tree = function(physical, "8086:4940", below="pci0000:6b", kind="0b4000", driver="4xxx", group=50, virtual=virtual)
    for number, address in enumerate(virtual):
        tree += function(
            address,
            "8086:4941",
            below="pci0000:6b",
            kind="0b4000",
            driver="vfio-pci",
            group=60 + number,
            physical=physical,
        )
        tree += f"dev/vfio/{60 + number} c 511:{number}\n"
    return tree + "dev/vfio/vfio c 10:196\n"


def _dpdk() -> str:
    cards = ["0000:17:00.0", "0000:17:00.1"]
    return "dev/vfio/vfio c 10:196\n" + "".join(
        function(address, "8086:1592", below="pci0000:16", kind="020000", driver="vfio-pci", group=80 + number)
        + f"dev/vfio/{80 + number} c 511:{number}\n"
        for number, address in enumerate(cards)
    )


def _alveo() -> str:
    place = "pci0000:3a/0000:3b:00.1"
    tree = function("0000:3b:00.1", "10ee:5001", below="pci0000:3a", kind="120000", driver="xocl")
    path = f"sys/devices/{place}"
    return (
        tree
        + drm_nodes(path, 1, 128)
        + f"sys/class/drm/renderD128 -> ../../devices/{place}/drm/renderD128\n"
        + f"{path}/drm/renderD128/subsystem -> /sys/class/drm\n"
        + f"sys/dev/char/226:128 -> ../../devices/{place}/drm/renderD128\n"
        + f"sys/class/drm/card1 -> ../../devices/{place}/drm/card1\n"
        + f"{path}/drm/card1/subsystem -> /sys/class/drm\n"
        + "dev/dri/by-path/pci-0000:3b:00.1-render -> ../renderD128\n"
        + "run/udev/data/c226:128 = S:dri/by-path/pci-0000:3b:00.1-render\\nV:1\nrun/udev/data/c226:1 = V:1\n"
        + f"sys/dev/char/226:1 -> ../../devices/{place}/drm/card1\n"
    )


NODES: Final[Mapping[str, str]] = {
    "A TPM": "dev/tpm0 c 10:224\ndev/tpmrm0 c 253:65536\n",
    "Cameras and video capture": (
        stick("1-3", 7, "046d", "0825", "8E3B2A10")
        + _camera(0, ":capture:", "1-3", "usb-046d_0825_8E3B2A10-video-index0")
        + _camera(1, ":", "1-3", "usb-046d_0825_8E3B2A10-video-index1")
    ),
    "Sound": "dev/snd/controlC0 c 116:0\ndev/snd/pcmC0D0p c 116:16\ndev/snd/pcmC0D0c c 116:24\ndev/snd/timer c 116:33\n",
    "Loop devices": "dev/loop-control c 10:237\ndev/loop0 b 7:0\ndev/loop1 b 7:1\n",
    "FUSE": "dev/fuse c 10:229\n",
    "TUN and TAP": "dev/net/tun c 10:200\n",
    "Serial ports": _serial(),
    "USB sticks": stick("1-2", 5, serial="A50285BI")
    + tty("1-2", "ttyUSB0", "188:0")
    + stick("1-4", 6, "1050", "0407", "0012345678"),
    "FPGAs by DFL": "dev/dfl-fme.0 c 240:0\ndev/dfl-port.0 c 241:0\ndev/dfl-fme.1 c 240:1\ndev/dfl-port.1 c 241:1\n",
    "FPGAs by XRT": _alveo(),
    "QAT": _qat(),
    "DSA and IAA": "dev/dsa/wq0.0 c 236:0\ndev/dsa/wq0.1 c 236:1\ndev/iax/wq1.0 c 237:0\n",
    "SGX": "dev/sgx_enclave c 10:125\ndev/sgx_provision c 10:126\n",
    "KVM": "dev/kvm c 10:232\ndev/vhost-net c 10:238\n",
    "A network card for DPDK, with huge pages": _dpdk(),
    "Soft RDMA": RDMA_CM + hca("rxe0", "virtual", (ETHERNET,), number=0, files={"parent": "eth0"}),
}
