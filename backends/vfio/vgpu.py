"""Finds the virtual GPUs that a driver has made of a function; gives virtual functions of NVIDIA's a vGPU type, and takes it back.

Another driver would end them under a running machine. NVIDIA's driver gives a virtual function a vGPU type, in
`nvidia/current_vgpu_type` (the number of a type, 0: none) where the kernel has a vfio of the vendor's own, else by a mediated
device below the function (NVIDIA's vGPU user guide, "Creating an NVIDIA vGPU" and "vendor-specific VFIO framework";
Documentation/driver-api/vfio-mediated-device.rst). Intel's are mediated devices too.

A type is noted before it is given, one file for each function in /run, which a reboot ends as it ends the types. A type without
a note was given by others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from backends.base import Device, Host, HostPath, NotReady, Signal, Verdict
from backends.errors import reason_of
from backends.linux import iommu, pci, sysfs
from backends.linux.kernel import Kernel, Notes, explained

OWN: Final = "nvidia"
"""The directory with the files of NVIDIA's driver, in that of a function."""
TYPE: Final = "current_vgpu_type"
_TYPES: Final = "creatable_vgpu_types"
_DIGITS: Final = 18  # more than a number of a type can have
_MEDIATED: Final = "mdev_supported_types"


def vgpus(host: Host, function: pci.Function) -> str | None:
    """The virtual GPUs of a function, in words that follow its name; None: none. What cannot be read counts as one."""
    try:
        if TYPE in sysfs.entries(host, function.path / OWN):
            number = sysfs.attribute(host, function.path / OWN / TYPE)
            if number != "0":
                return f"has the vGPU type {number or '(unreadable)'} from the NVIDIA driver"
        types = sysfs.entries(host, function.path / _MEDIATED)
        made = [name for kind in types for name in sysfs.entries(host, function.path / _MEDIATED / kind / "devices")]
    except OSError:
        return "may have virtual GPUs from its driver, which cannot be read"
    return f"has the virtual GPU {made[0]} from the driver {function.driver}" if made else None


def refusal(host: Host, function: pci.Function, wanted: int | None) -> str | None:
    """Why a virtual function cannot be had as a vGPU; None if NVIDIA's driver gives it no types.

    `wanted` is the type that it is given for a pod; None: it must have one already.
    """
    if function.vgpu_type:
        is_other = wanted is not None and function.vgpu_type != str(wanted)
        return f"it has the vGPU type {function.vgpu_type} and not {wanted}" if is_other else ""
    if function.physical is None or sysfs.number(host, function.path / OWN / TYPE) != 0:
        return None
    if wanted is None:
        return f"it has no vGPU type: write one of {OWN}/{_TYPES} into {OWN}/{TYPE}, both in {function.path}"
    if wanted not in _creatable(host, function):
        return f"the NVIDIA driver can give it no vGPU type {wanted} now: {OWN}/{_TYPES} in {function.path} lacks it"
    return ""


def _creatable(host: Host, function: pci.Function) -> list[int]:
    """The types that there is room for. The file has a heading, and a line for each: `558 : NVIDIA A40-2Q`."""
    lines = (sysfs.attribute(host, function.path / OWN / _TYPES) or "").splitlines()
    numbers = (line.partition(":")[0].strip() for line in lines)
    return [int(number) for number in numbers if number.isdecimal() and len(number) < _DIGITS]


def signals(host: Host, device: Device, hardware: str, wanted: int | None) -> Iterator[Signal]:
    """A signal if its type has changed, or if it can be given none. The kernel sends no event of that.

    A function that is given a type for each pod has none between two pods.
    """
    before = "".join(device.attributes.get("vgpu_type", ()))
    function = pci.read(host, device.key) if before or wanted is not None else None
    if function is None:
        return
    if function.vgpu_type != before and (function.vgpu_type or wanted is None):
        why = f"{device.key} had the vGPU type {before or 'none'} and has {function.vgpu_type or 'none'} now"
        yield Signal(hardware, "vgpu-type-changed", Verdict.NOW, why)
    elif not function.vgpu_type and (why := refusal(host, function, wanted) or ""):
        yield Signal(hardware, "no-room-for-vgpu", Verdict.NOW, why)


# --- giving and taking types ---


NOTES: Final = HostPath("/run/fairlead/vgpu")


class VgpuTypes:
    """The types of the virtual functions of one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel
        self._notes = Notes(host, NOTES)

    def give(self, address: str, wanted: int) -> bool:
        """Give a virtual function this type, unless it has it; returns whether anything was done.

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
