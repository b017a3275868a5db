"""Plans what to bind to vfio-pci so that a resource can have a group, binds it, and gives it back to its own driver.

It writes driver_override, unbind and drivers_probe (Documentation/ABI/testing/sysfs-bus-pci), which affect no other function,
as `new_id` would. A function that is to be given back is noted before it is bound: one file for each in /run, which a reboot
ends as it ends the bindings. A function without a note was not bound by us, or is to stay bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from msgspec import Struct

from backends.base import Host, HostPath, Node, NotReady
from backends.errors import reason_of
from backends.linux import iommu, pci, udev
from backends.linux.host_uses import busy_disks, opened_by, uses
from backends.linux.iommu import Group, Member
from backends.linux.kernel import Kernel, Notes, explained
from backends.linux.nodes import NoNodeError, device_node, is_device_node
from backends.vfio.options import MODULE, VfioOptions, VfioResource
from backends.vfio.vgpu import refusal, vgpus

# --- what to bind, and what is in the way ---


class Plan(Struct, frozen=True):
    """What it takes to hand a group out."""

    bind: tuple[pci.Function, ...] = ()
    """The functions to bind to a vfio driver; companions first, so that the group is viable when its node appears."""
    refusal: str = ""
    """Why a selected function cannot be had, one sentence about the first of them, which names the device."""
    obstacle: str = ""
    """Why the group would not be viable even then, one sentence."""


def plan(host: Host, group: Group, selected: Sequence[pci.Function], resource: VfioResource) -> Plan:
    """What the resource's options permit.

    `selected` are the functions that the resource wants; the device is named by the first of them.
    """
    options = resource.spec.options
    wanted = {function.address for function in selected}
    others = [member for member in group.members if member.name not in wanted and not member.is_bridge]
    companions = [f for member in others if (f := _companion(member, selected, options)) is not None]
    obstacles = _obstacles(host, group, others, companions, resource)
    refusals = [
        _named(why, function, selected[0]) for function in selected if (why := _refusal(host, function, resource))
    ]
    permitted = [*companions, *selected] if options.bind != "never" else []
    return Plan(
        bind=tuple(function for function in permitted if not iommu.is_vfio(function)),
        refusal=next(iter(refusals), ""),
        obstacle=next(obstacles, ""),
    )


def _named(why: str, function: pci.Function, first: pci.Function) -> str:
    return why if function is first else f"{function.address}, which goes with it, cannot be had: {why}"


def _companion(member: Member, selected: Sequence[pci.Function], options: VfioOptions) -> pci.Function | None:
    """The function of the member, if it may be bound along.

    One without a driver is bound too: its own driver may be loaded at any time, after which the group is not viable any more.
    """
    function = member.function
    if function is None or options.bind == "never" or (member.driver is not None and member.is_viable):
        return None
    cards = {card(one.address) for one in selected}
    return function if options.companions == "group" or card(function.address) in cards else None


def card(address: str) -> str:
    """The part of an address that all functions of one card share."""
    return address.rpartition(".")[0]


def _obstacles(
    host: Host, group: Group, others: Sequence[Member], companions: Sequence[pci.Function], resource: VfioResource
) -> Iterator[str]:
    options = resource.spec.options
    for member in others:
        function = member.function if member.function in companions else None
        need = need_of(host, function, resource) if function is not None else None
        where = f"{group.name} cannot be handed out while {member.name}, which is in it,"
        if member.is_viable:
            if need is not None:
                yield f"{where} {need}"
        elif need is not None:
            yield f"{where} is bound to {member.driver} and {need}"
        elif function is None:
            could_be_bound = member.function is not None and options.bind != "never" and options.companions == "card"
            hint = '; companions = "group" would permit to bind it too' if could_be_bound else ""
            yield f"{where} is bound to {member.driver}{hint}"


def _refusal(host: Host, function: pci.Function, resource: VfioResource) -> str:
    """Why a selected function cannot be had; empty if it can."""
    options = resource.spec.options
    if (of_vgpu := refusal(host, function, options.vgpu_type)) is not None:
        return of_vgpu
    if options.vgpu_type is not None:
        return f"it can have no vGPU type, and {options.vgpu_type} is asked for"
    if iommu.is_vfio(function):
        return ""
    if (why := vgpus(host, function)) is not None:
        return f"it {why}, which would go with another driver: offer it as what the driver made of it"
    if options.bind == "never":
        if function.driver is None:
            return ""  # it may be between two drivers; its health tells
        return f'its driver is {function.driver}; bind it to vfio-pci, or set bind = "start" or "allocate"'
    if (why := need_of(host, function, resource)) is not None:
        return f"it {why}, and so is left to the host (see force)"
    return ""


def need_of(host: Host, function: pci.Function, resource: VfioResource) -> str | None:
    """What the host needs a function for; None if nothing, or if `force` names it. It ends no virtual GPUs.

    One that a selector names by its address may have addresses of the host.
    """
    if (why := vgpus(host, function)) is not None:
        return why
    named = any(function.address in table.get("address", ()) for table in resource.spec.select)
    return None if function.address in resource.spec.options.force else next(uses(host, function, named=named), None)


# --- binding ---


NOTES: Final = HostPath("/run/fairlead/vfio")

_DRIVER: Final = HostPath(f"/sys/bus/pci/drivers/{MODULE}")
_PROBE: Final = HostPath("/sys/bus/pci/drivers_probe")
_NO_OVERRIDE: Final = "\n"  # ends an override
_NODES_APPEAR: Final = 2.0  # seconds; devtmpfs has them at once, another /dev when its udev is done
_CLOCK_TICK: Final = 0.02  # seconds by which a file's time may lag behind the clock
_NODES_SETTLE: Final = 1.0  # seconds that udev has to set owner and mode: container runtimes copy the mode


class Binder:
    """Binds functions on one host."""

    def __init__(self, host: Host, kernel: Kernel) -> None:
        self._host = host
        self._kernel = kernel
        self._notes = Notes(host, NOTES)

    def bind(self, functions: Sequence[pci.Function], resource: VfioResource, *, give_back: bool) -> None:
        """Bind each to vfio-pci, whatever driver has it.

        `give_back`: whether they get their own drivers back when no pod holds them.

        Raises:
            NotReady: the host needs one of them, or the kernel refuses. What was already bound stays so.
        """
        for function in functions:
            self._check(function.address, resource)
        if functions:
            self._load()
        for function in functions:
            self._bind(function.address, give_back=give_back)

    def settle(self, nodes: Sequence[Node], since: float) -> None:
        """Wait, within limits, until the nodes are there and udev is done with them.

        `since` is the wall-clock time at which the binding began: older entries of udev are about other devices.

        Raises:
            NotReady: one of them does not come.
        """
        for node in nodes:
            if not self._kernel.wait(partial(is_device_node, self._host, node.path), _NODES_APPEAR):
                raise NotReady(f"{node.path} did not appear, although the function was bound")
        if udev.has_database(self._host):
            own = [node.path for node in nodes if node.path.name[-1:].isdecimal()]  # the nodes that a binding makes
            self._kernel.wait(lambda: all(self._is_settled(path, since) for path in own), _NODES_SETTLE)

    def restore(self, address: str) -> bool:
        """Give a function back to its own driver, if we noted to do so; returns whether there was a note.

        Raises:
            NotReady: the kernel refuses; the note stays, for another time.
        """
        with explained(f"{NOTES / address} cannot be read"):
            note = self._notes.read(address)
        if note is None:
            return False
        before = note.decode(errors="replace").strip()
        function = pci.read(self._host, address)
        if (
            function is not None and pci.driver_override(self._host, address) == MODULE
        ):  # otherwise another program has changed it
            with explained(f"{address} cannot be given back to its own driver"):
                self._give_back(function, before)
        self._notes.drop(address)
        return True

    # --- one function ---

    def _check(self, address: str, resource: VfioResource) -> None:
        """Check again whether the host needs it, a disk may have been mounted; and whether its driver would let go of it."""
        function = pci.read(self._host, address)
        if function is None:
            raise NotReady(f"{address} is gone")
        if iommu.is_vfio(function):
            return
        need = need_of(self._host, function, resource)
        if need is None and address not in resource.spec.options.force:
            need = next(busy_disks(self._host, function), None)
        need = need or opened_by(self._host, function)
        if need is not None:
            raise NotReady(f"{address} {need}")

    def _load(self) -> None:
        if self._host.local(_DRIVER).is_dir():
            return
        with explained(f"the kernel module {MODULE} is not loaded, and cannot be: load it on the host"):
            self._kernel.load(MODULE)
        if not self._host.local(_DRIVER).is_dir():  # "install vfio-pci /bin/true", as hardening guides have it
            raise NotReady(
                f"modprobe has loaded no {MODULE} and says that all is well: look for {MODULE} in the host's "
                "/etc/modprobe.d, or load it on the host"
            )

    def _bind(self, address: str, *, give_back: bool) -> None:
        function = pci.read(self._host, address)
        if function is None:
            raise NotReady(f"{address} is gone")
        if iommu.is_vfio(function):
            return
        override = pci.driver_override(self._host, address)
        before = "" if override == MODULE else override or ""
        if give_back:
            self._note(address, before)
        try:
            with explained(f"{address} cannot be bound to {MODULE}"):
                self._kernel.write(pci.FUNCTIONS / address / "driver_override", MODULE)
                self._reprobe(function)
            bound = pci.read(self._host, address)
            if bound is None or not iommu.is_vfio(bound):
                raise NotReady(f"the kernel did not bind {address} to {MODULE}; its log (dmesg) says why")
        except NotReady:
            self._abandon(address, before)
            raise

    def _abandon(self, address: str, before: str) -> None:
        """Undo a failed binding: its own driver may take it again. If that fails, the note stays for the release."""
        function = pci.read(self._host, address)
        with suppress(OSError):  # the failure before this is what is told
            if function is not None and not iommu.is_vfio(function):
                self._give_back(function, before)
            self._notes.drop(address)

    def _give_back(self, function: pci.Function, before: str) -> None:
        self._kernel.write(pci.FUNCTIONS / function.address / "driver_override", before or _NO_OVERRIDE)
        if function.driver is None or iommu.is_vfio(function):
            self._reprobe(function)

    def _reprobe(self, function: pci.Function) -> None:
        """Unbind the function from its driver, and let the kernel look for one again."""
        if function.driver is not None:
            self._kernel.write(pci.FUNCTIONS / function.address / "driver" / "unbind", function.address)
        self._kernel.write(_PROBE, function.address)

    def _note(self, address: str, before: str) -> None:
        try:
            self._notes.write(address, f"{before}\n".encode())
        except OSError as error:
            raise NotReady(
                f"{address} cannot be noted in {NOTES} as one to give back: {reason_of(error)}; let Fairlead write there, "
                'or set release = "keep"'
            ) from error

    # --- its nodes ---

    def _is_settled(self, path: HostPath, since: float) -> bool:
        """Whether udev has written the node's device into its database."""
        try:
            entry = udev.DATABASE / device_node(self._host, path).number.replace(":", "", 1)
            return self._host.local(entry).stat().st_mtime >= since - _CLOCK_TICK
        except (NoNodeError, OSError):
            return False
