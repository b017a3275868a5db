"""Gives virtual functions of NVIDIA GPUs a vGPU type for pods, and takes it away afterwards.

The file `nvidia/current_vgpu_type` (NVIDIA's vGPU user guide, vendor-specific VFIO framework) has the number of a type, or 0
for none. A type is noted before it is given, one file for each function in /run, which a reboot ends as it ends the types.
A type without a note was given by others.
"""

from __future__ import annotations

from typing import Final

from backends.base import Host, HostPath, NotReady
from backends.errors import reason_of
from backends.linux import iommu, pci, sysfs
from backends.linux.kernel import Kernel, Notes, explained
from backends.vfio.vgpu import OWN, TYPE

NOTES: Final = HostPath("/run/fairlead/vgpu")


class VgpuTypes:
    """The types of the virtual functions of one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel
        self._notes = Notes(host, NOTES)

    def give(self, address: str, wanted: int) -> bool:
        """Give a virtual function this type, unless it has it; was anything done?

        Raises:
            NotReady: it has another type, or the driver refuses. Then there is no note.
        """
        if (has := self._type(address)) == wanted:
            return False
        if has != 0:
            raise NotReady(f"{address} has the vGPU type {'(unreadable)' if has is None else has}, not {wanted}")
        try:
            self._notes.write(address, f"{wanted}\n".encode())
        except OSError as error:
            why = f"{reason_of(error)}; let Fairlead write there"
            raise NotReady(f"the vGPU type of {address} cannot be noted in {NOTES}: {why}") from error
        try:
            self._kernel.write(_file(address), str(wanted))
        except OSError as error:
            self._notes.drop(address)
            why = f"{reason_of(error)}; is there room for one more on its card?"
            raise NotReady(f"the NVIDIA driver gives {address} no vGPU type {wanted}: {why}") from error
        return True

    def take_back(self, address: str) -> None:
        """Take away the type that we gave a function; one that others have given it since stays.

        Raises:
            NotReady: a virtual machine has it open, or the driver refuses; the note stays, for another time.
        """
        with explained(f"{NOTES / address} cannot be read"):
            note = self._notes.read(address)
        if note is None:
            return
        given = note.decode(errors="replace").strip()
        if str(self._type(address)) == given:
            refused = f"{address} keeps its vGPU type"
            iommu.refuse_open(self._host, self._kernel, pci.FUNCTIONS / address, refused)
            with explained(f"{address} keeps the vGPU type {given}"):
                self._kernel.write(_file(address), "0")
        self._notes.drop(address)

    def _type(self, address: str) -> int | None:
        return sysfs.number(self._host, _file(address))


def _file(address: str) -> HostPath:
    return pci.FUNCTIONS / address / OWN / TYPE
