"""Drivers for functions whose own would not run here: others of the kernel's, under the names of those.

The modules of the vendors refuse made-up hardware, and NVIDIA's is not the kernel's. So a driver that takes any function
is loaded with another name in place of its own, of the module and of the driver: to everybody who looks from outside it
is that one. `pci-stub` does nothing with its functions; `cirrus` makes a DRM device of each, with a node in /dev/dri.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from tests.guest.boot import Layer, unsigned
from tests.guest.guest import Guest
from tests.guest.machine import PARTS
from tests.guest.vfio_user import PciFunction

Actor = Literal["pci-stub", "cirrus"]


def renamed(module: bytes, actor: Actor, name: str) -> bytes:
    """A module, and its driver, with another name that is no longer.

    Every C string that is its name is replaced: that of the module (`pci_stub`), in two places, and the driver's.
    """
    for own in {actor, actor.replace("-", "_")}:
        end = b"\0" * (1 + len(own) - len(name))
        module = module.replace(own.encode() + b"\0", name.encode() + end)
    return unsigned(module)


@asynccontextmanager
async def driver(guest: Guest, name: str, actor: Actor, functions: Sequence[PciFunction]) -> AsyncIterator[None]:
    """A driver of this name that takes these functions, those that are there and those that come."""
    *_, (_, module) = Layer(PARTS / "layer").modules([actor])
    if actor == "cirrus":  # without a console on its screen, which would be drawn byte by byte
        await guest.run("modprobe drm_kms_helper fbdev_emulation=0 && modprobe drm_shmem_helper")
    await guest.write(f"/run/{name}.ko", renamed(module, actor, name))
    await guest.run(f"insmod /run/{name}.ko")
    try:
        for function in functions:
            await guest.run(f"echo {function.vendor:x} {function.device:x} > /sys/bus/pci/drivers/{name}/new_id")
        yield
    finally:
        await guest.run(f"rmmod {name}")
