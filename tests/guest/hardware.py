"""The hardware of the test guest, and what its kernel makes of it when asked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from tests.guest.boot import Layer, unsigned
from tests.guest.guest import PORTS, Guest
from tests.guest.machine import PARTS

PCI: Final = "/sys/bus/pci/devices"
DEVICES: Final = (
    # A network card with virtual functions.
    "-netdev hubport,id=wire0,hubid=0",
    f"-device igb,bus=port{PORTS},id=igb,netdev=wire0,romfile=",
    # One for soft RDMA.
    "-netdev hubport,id=wire1,hubid=0",
    "-device virtio-net-pci,id=soft,netdev=wire1,romfile=",
    # Two functions behind a conventional bridge, which makes one IOMMU group of them.
    f"-device pcie-pci-bridge,id=bridge,bus=port{PORTS + 1}",
    "-device edu,id=twin,bus=bridge,addr=1",
    "-netdev hubport,id=wire2,hubid=0",
    "-device e1000,id=other-twin,bus=bridge,addr=2,netdev=wire2,romfile=",
)
IGB: Final = "0x10c9"
IGB_VF: Final = "0x10ca"
EDU: Final = "0x11e8"
E1000: Final = "0x100e"

_QUOTING: Final = b'pci-stub: invalid ID string "%s"\n'


async def addresses(guest: Guest, device: str) -> list[str]:
    """The addresses of all functions with this device ID."""
    said = await guest.run(f"cd {PCI} && grep -l {device} */device || true")
    return [line.partition("/")[0] for line in said.split()]


async def link(guest: Guest, path: str) -> str:
    """The last part of what a symbolic link points to; empty if there is none."""
    return (await guest.run(f"readlink {path} || true")).rpartition("/")[2]


async def driver(guest: Guest, address: str) -> str:
    """The name of the driver that has the function; empty if none has."""
    return await link(guest, f"{PCI}/{address}/driver")


async def bind(guest: Guest, address: str, name: str) -> None:
    """Give a function to this driver, whatever it is for, and to no other."""
    await guest.run(
        f"modprobe {name}; cd {PCI}/{address} && echo {name} > driver_override"
        f" && {{ [ ! -e driver ] || echo {address} > driver/unbind; }} && echo {address} > /sys/bus/pci/drivers_probe"
    )


async def unbind(guest: Guest, address: str) -> None:
    """Take a function from the driver that has it; any may have it next."""
    await guest.run(
        f"cd {PCI}/{address} && echo > driver_override && {{ [ ! -e driver ] || echo {address} > driver/unbind; }}"
    )


@asynccontextmanager
async def bound(guest: Guest, address: str, name: str) -> AsyncIterator[None]:
    """A function that this driver has."""
    await bind(guest, address, name)
    try:
        yield
    finally:
        await unbind(guest, address)


@asynccontextmanager
async def virtual_functions(guest: Guest, number: int) -> AsyncIterator[list[str]]:
    """So many virtual functions of the network card; their addresses."""
    await guest.run("modprobe igb")
    (card,) = await addresses(guest, IGB)
    await guest.until(f"[ -e {PCI}/{card}/sriov_numvfs ] && [ -e {PCI}/{card}/driver ]")
    await guest.run(f"echo {number} > {PCI}/{card}/sriov_numvfs")
    try:
        yield await addresses(guest, IGB_VF)
    finally:
        await guest.run(f"echo 0 > {PCI}/{card}/sriov_numvfs")


@asynccontextmanager
async def soft_rdma(guest: Guest, name: str = "rxe0") -> AsyncIterator[str]:
    """An HCA made of a network card by rdma_rxe, its port up; the name of the card's netdev."""
    await guest.run("modprobe -a virtio_net rdma_rxe ib_uverbs ib_umad rdma_ucm")
    netdev = await guest.run("cd /sys/bus/virtio/drivers/virtio_net && ls virtio*/net")
    await guest.run(f"ip link set {netdev} up && rdma link add {name} type rxe netdev {netdev}")
    try:
        yield netdev
    finally:
        await guest.run(f"rdma link del {name}; ip link set {netdev} down")


# --- what the kernel says ---


async def kernel_says(guest: Guest, text: str) -> None:
    """Have the kernel itself log this line, which has no comma.

    Nobody else can log as the kernel does. It is the module pci_stub that quotes what it is asked for and does not know;
    here it quotes it without the words around it, since a driver's line is one that begins as that driver prints it.
    """
    *_, (_, module) = Layer(PARTS / "layer").modules(["pci-stub"])
    assert _QUOTING in module, "this kernel's pci-stub words it otherwise"
    bare = module.replace(_QUOTING, b"%s\n".ljust(len(_QUOTING), b"\0"))
    await guest.write("/run/says.ko", unsigned(bare))
    await guest.run(f"insmod /run/says.ko ids='\"{text}\"' && rmmod pci_stub && dmesg | grep -qF '] {text}'")


async def flood_kernel_log(guest: Guest) -> None:
    """Fill the kernel's log, of 128 KiB, more than once, as user space may."""
    await guest.run(
        "echo on > /proc/sys/kernel/printk_devkmsg &&"  # as fast as it likes
        " yes $(printf '<14>%0507d' 0) | dd of=/dev/kmsg bs=512 count=600 iflag=fullblock;"
        " echo ratelimit > /proc/sys/kernel/printk_devkmsg"
    )
