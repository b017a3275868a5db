"""The backend `gpu`, for all vendors. A unit is a PCI function, or what all GPUs of a vendor have together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from backends.base import (
    AllocationRefused,
    Backend,
    Clears,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Heard,
    Hint,
    Host,
    Known,
    PathChange,
    Record,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.gpu import nodes, nvml, xid
from backends.gpu.amd import PLATFORM, TOGETHER, WHOLE, Amd
from backends.gpu.intel import Intel
from backends.gpu.nvidia import DRIVER, Nvidia, without_pci
from backends.gpu.options import GpuOptions, GpuResource, complaints
from backends.gpu.vendor import AMD, ATTRIBUTES, INTEL, NVIDIA, Vendor, gpu_addresses, is_gpu, vendor_of
from backends.linux import pci, pci_health
from backends.linux.host_uses import opened_by
from backends.linux.pci_health import LATCHED

_VENDORS: Final[dict[str, type[Vendor]]] = {
    NVIDIA: Nvidia,
    AMD: Amd,
    INTEL: Intel,
}

_WEDGED: Final = "WEDGED"
"""The property that makes an event of the subsystem `drm` a record of a device that its driver gave up on (`Watches.facts`;
Documentation/gpu/drm-uapi.rst, "Device Wedging")."""
_WEDGED_UNTIL: Final = LATCHED - {Clears.RECOVERED}
_WEDGED_METHODS: Final = ("rebind", "bus-reset", "vendor-specific")

_PART: Final = "it is a part of a GPU and cannot be reset without the others"


class Gpu(Backend[GpuOptions]):
    """Hands out GPUs."""

    options_type: ClassVar = GpuOptions
    attributes: ClassVar = ATTRIBUTES
    complaints: ClassVar = staticmethod(complaints)
    hears: ClassVar = "NVIDIA's library (NVML)"

    def __init__(self, host: Host, resources: Sequence[GpuResource]) -> None:
        super().__init__(host, resources)
        self._vendors = {vendor: dialect(host, resources) for vendor, dialect in _VENDORS.items()}
        self._groups = {dialect.group: dialect for dialect in self._vendors.values() if dialect.group is not None}

    def units(self) -> Iterable[str]:
        """The addresses of all GPUs, and the group of each vendor that has any."""
        found = dict(gpu_addresses(self.host))
        vendors = {*found.values(), *([NVIDIA] if without_pci(self.host, "") else [])}
        groups = (self._vendors[vendor].group for vendor in vendors)
        return [*found, *(group for group in groups if group is not None)]

    def discover(self, unit: str) -> Discovery:
        """One GPU, with the parts it is divided into; or what all GPUs of a vendor have together."""
        if unit in self._groups:
            return self._with_resets(self._groups[unit].together(), None)
        function = pci.read(self.host, unit)
        if function is None:
            return Discovery()
        if not is_gpu(function.vendor, function.kind):
            return Discovery(problems=function.problems)
        found = self._vendors[function.vendor].found(function)
        return self._with_resets(replace(found, problems=(*function.problems, *found.problems)), function)

    def _with_resets(self, found: Discovery, function: pci.Function | None) -> Discovery:
        """Adds to each device why it cannot be reset, if any resource asks for resets."""
        if not any(resource.spec.pre_start == "reset" for resource in self.resources):
            return found
        whole = _PART
        if function is not None:
            whole = (
                f"{function.address} {why}" if (why := _in_use(function)) else pci.reset_refusal(self.host, function)
            )
        return replace(
            found, devices=tuple(replace(it, no_reset=whole if _is_whole(it) else _PART) for it in found.devices)
        )

    def probe(self, device: Device) -> Iterable[Signal]:
        """The health of its nodes, its driver and its PCI functions."""
        own = sorted(name.removeprefix("pci:") for name in device.hardware if name.startswith("pci:"))
        hardware = f"pci:{own[0]}" if own else min(device.hardware)
        vendor = self._vendor_of(device)
        yield from nodes.signals(self.host, device, hardware, vendor.roots)
        yield from vendor.probe(device)
        for address in own:
            yield from pci_health.signals(self.host, address)
            if not device.unusable:
                yield from pci_health.driver_signals(self.host, address, device.attributes["driver"])

    def signals(self, record: Record) -> Iterable[Signal]:
        """NVIDIA's XIDs, PCI error recoveries, hanging DRM devices."""
        if record.source == "kmsg":
            yield from xid.signals(record, self.resources)
        elif record.source in nvml.SOURCES:
            yield from xid.signals_of(xid.from_nvml(record), self.resources)
        yield from _wedged_signals(record)
        if vendor_of(record.properties):
            yield from pci_health.recovery_signals(record)

    # --- events ---

    def watches(self, known: Known) -> Watches:
        """Events of functions and DRM devices, records of errors, and directories where nodes come late."""
        by_vendor = _by_vendor(known)
        directories = {
            path
            for vendor, dialect in self._vendors.items()
            if vendor in by_vendor
            for path in dialect.directories(by_vendor[vendor])
        }
        return Watches(
            subsystems=frozenset({"pci", "drm"}),
            directories=frozenset(directories),
            facts=frozenset({pci_health.FACT, _WEDGED}),
            kernel_lines=xid.LINES,
            listen=self._with_events(known, "always"),
            listen_without_log=self._with_events(known, "auto"),
        )

    def _with_events(self, known: Known, when: str) -> frozenset[str]:
        """The GPUs with NVIDIA's driver that a resource may take which says so of `nvml_events`, and that none resets.

        Who listens has them open, and under an open GPU nothing is reset.
        """
        resources = [it for it in self.resources if it.spec.options.nvml_events == when]
        resetting = [it for it in self.resources if it.spec.pre_start == "reset"]
        return frozenset(
            f"pci:{unit}"
            for unit, devices in known.items()
            if pci.ADDRESS.fullmatch(unit)
            for device in devices[:1]
            if device.attributes.get("driver") == (DRIVER,)
            and any(it.might_take(device) for it in resources)
            and not any(it.might_take(device) for it in resetting)
        )

    def listen(self, hardware: frozenset[str]) -> Iterator[Heard | None]:
        """What NVIDIA's library tells of these GPUs.

        Raises:
            NvmlError: it cannot be heard.
        """
        nvidia = self._vendors[NVIDIA]
        return nvml.listen(self.host, nvidia.roots, sorted(name.removeprefix("pci:") for name in hardware))

    def affects(self, hint: Hint, known: Known) -> Iterable[str]:
        """The GPUs that an event is about, and those below and above it."""
        if isinstance(hint, PathChange):
            by_vendor = _by_vendor(known)
            return {
                unit
                for vendor, addresses in by_vendor.items()
                for unit in self._vendors[vendor].concerned(hint.path, addresses)
            }
        return self._affected(hint, known) if isinstance(hint, Uevent) else ()

    def _affected(self, event: Uevent, known: Known) -> Iterable[str]:
        if event.subsystem == "drm" and event.devpath.startswith(PLATFORM) and TOGETHER in known:
            return [TOGETHER]
        told = vendor_of(event.properties) if event.subsystem == "pci" else None
        mine = pci.address_in(event.devpath)
        concerned = pci.affected(event, known) | pci.undivided(event, known)
        units = {a for a in concerned if a in known or (a == mine and (told or event.subsystem == "drm"))}
        if not units:
            return ()
        vendors = {*_by_vendor({unit: known[unit] for unit in units if unit in known}), told}
        groups = {self._vendors[vendor].group for vendor in vendors if vendor is not None}
        return units | {group for group in groups if group is not None and event.subsystem == "pci"}

    # --- handing out ---

    def ids(self, resource: GpuResource, device: Device) -> Sequence[str]:
        """As the vendor's plugin names them; or else the device's key, with `::n` where several pods share it."""
        return self._vendor_of(device).ids(resource, device) or super().ids(resource, device)

    def edits(self, resource: GpuResource, grants: Sequence[Grant]) -> ContainerEdits:
        """What each vendor gives a container for its own GPUs.

        Raises:
            AllocationRefused: the resource's options forbid it.
        """
        by_vendor: dict[str, list[Grant]] = defaultdict(list)
        for grant in grants:
            by_vendor[grant.device.attributes["vendor"][0]].append(grant)
        every = [self._vendors[vendor].edits(resource, mine) for vendor, mine in by_vendor.items()]
        return ContainerEdits().merge(*every)

    def adopts(self, resource: GpuResource) -> bool:
        """Only for resources with `dev_char_links`."""
        return resource.spec.options.dev_char_links

    def adopt(self, resource: GpuResource, device: Device) -> bool:  # noqa: ARG002  # an interface's
        """Make the links that udev does not make: the nodes of NVIDIA's GPUs are made by user space."""
        if device.attributes["vendor"] == (NVIDIA,):
            nodes.link_in_dev_char(self.host, device, self._vendor_of(device).roots)
        return False

    def prefers(self, resource: GpuResource) -> bool:  # noqa: ARG002  # an interface's
        """Always: GPUs near each other work faster together."""
        return True

    def prepare(self, resource: GpuResource, grants: Sequence[Grant]) -> Iterable[str]:  # noqa: ARG002
        """Reset the GPUs, one by one.

        Raises:
            AllocationRefused: one cannot be reset, or others would be with it.
        """
        for grant in grants:
            if not _is_whole(grant.device):
                raise AllocationRefused(
                    f"{grant.id} is to be reset before each use, but {_PART}. "
                    'Ask this node\'s administrator to set pre_start = "check" for it.'
                )
        every = sorted({name for grant in grants for name in grant.device.hardware})
        for address in (name.removeprefix("pci:") for name in every):
            function = pci.read(self.host, address)
            if function is not None and (
                why := _in_use(function) or opened_by(self.host, function, even_by_a_question=True)
            ):
                raise AllocationRefused(
                    f"{address} is to be reset before its use, but it {why}. "
                    'Ask this node\'s administrator to end that, or to set pre_start = "check" for it.'
                )
            pci.reset(self.host, address)
        return every

    def _vendor_of(self, device: Device) -> Vendor:
        return self._vendors[device.attributes["vendor"][0]]


def _by_vendor(known: Mapping[str, Sequence[Device]]) -> dict[str, list[str]]:
    """Vendor → addresses of its known GPUs. A unit without a device may become any vendor's, and counts for each."""
    found: dict[str, list[str]] = {}
    for unit, devices in known.items():
        if pci.ADDRESS.fullmatch(unit):
            for vendor in devices[0].attributes["vendor"] if devices else _VENDORS:
                found.setdefault(vendor, []).append(unit)
    return found


def _in_use(function: pci.Function) -> str | None:
    """Why a reset would happen under the GPU's driver, in words that follow its name; None if it would not.

    amdgpu uses it from the time it is bound, and the kernel tells only drivers with a `reset_prepare` of a reset;
    `amdgpu_pci_err_handler` (amdgpu_drv.c) has none.
    """
    return "is used by its driver amdgpu, which is not told of a reset" if function.driver == "amdgpu" else None


def _is_whole(device: Device) -> bool:
    whole = all(name.startswith("pci:") for name in device.hardware)
    return whole and set(device.attributes.get("compute_partition", ())) <= {WHOLE}


# --- DRM devices that their driver gave up on: the kernel says so once, and keeps it nowhere ---


def _wedged_signals(record: Record) -> Iterator[Signal]:
    """What an event says of the GPU that the device belongs to.

    `WEDGED=rebind,bus-reset` names what the device needs; with `none` its driver has recovered it.
    """
    methods, address = record.properties.get(_WEDGED), pci.address_in(record.text)
    if not methods or methods == "none" or address is None:
        return
    known = [method for method in methods.split(",") if method in _WEDGED_METHODS]
    help_ = f"; the driver asks for {' or '.join(known)}" if known else ""
    yield Signal(f"pci:{address}", "wedged", Verdict.NOW, f"{address} hangs{help_}", clears_on=_WEDGED_UNTIL)
