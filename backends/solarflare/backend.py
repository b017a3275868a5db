"""The backend `solarflare`: its units and devices are network functions; a pod gets the nodes of Onload with them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from msgspec.structs import replace

from backends.base import (
    ALL,
    TEXT,
    All,
    AllocationRefused,
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Hint,
    HostPath,
    Known,
    LinkChange,
    Mount,
    PathChange,
    Record,
    Released,
    Signal,
    Uevent,
    Verdict,
    Watches,
)
from backends.interface.written import assumed
from backends.linux import device_info, netdevs, pci, pci_health
from backends.solarflare import onload
from backends.solarflare.options import SolarflareOptions, SolarflareResource, complaints

_SOLARFLARE: Final = "1924"
_XILINX: Final = "10ee"  # Onload drives its Alveo X3 cards, too
_ETHERNET: Final = "0200"
_DRIVERS: Final = frozenset({"sfc", "sfc_ef100", "sfc_siena", "sfc_falcon", "xilinx_efct"})
_DEFAULTS: Final = SolarflareOptions()


class Solarflare(Backend[SolarflareOptions]):
    """Hands out Solarflare network functions with the nodes of Onload; a unit is the address of one."""

    options_type: ClassVar = SolarflareOptions
    attributes: ClassVar = {**pci.ATTRIBUTES, "ifname": TEXT, "onload_version": TEXT}
    complaints: ClassVar = staticmethod(complaints)

    # --- what is there ---

    def units(self) -> Iterable[str]:
        """Every Ethernet function of the two vendors."""
        return (address for address, _, vendor in pci.announced(self.host) if vendor in (_SOLARFLARE, _XILINX))

    def discover(self, unit: str) -> Discovery:
        """The function as a device. Virtual ones and those of Xilinx are offered only if a selector takes them."""
        function = pci.read(self.host, unit)
        if function is None or function.vendor not in (_SOLARFLARE, _XILINX) or not function.kind.startswith(_ETHERNET):
            return Discovery()
        device = self._device(function)
        if function.vendor == _SOLARFLARE and function.physical is None:
            return Discovery((device,), problems=function.problems)
        taker = next((it for it in self.resources if it.spec.select and it.refuses(device) is None), None)
        if taker is None:
            return Discovery(problems=function.problems, beside=(device,))
        return Discovery((replace(device, resource=taker.configured),), problems=function.problems)

    def _device(self, function: pci.Function) -> Device:
        device = function.as_device()
        names = netdevs.names(self.host, function.path)
        version = onload.version(self.host)
        more = {"ifname": names[:1], "onload_version": (version,) if version else ()}
        attributes = {**device.attributes} | {name: values for name, values in more.items() if values}
        if not names:
            attributes = assumed(attributes, ("ifname",), self.resources)
        foreign = function.driver is not None and function.driver not in _DRIVERS
        return replace(
            device,
            nodes=onload.nodes(self.host),
            unusable=f"it is bound to {function.driver}, not to sfc" if foreign else "",
            attributes=attributes,
        )

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """Functions, their interfaces and links, Onload's modules and nodes."""
        return Watches(
            subsystems=frozenset({"pci", "net", "module"}),
            directories=frozenset({onload.DEV}),
            facts=frozenset({pci_health.FACT}),
            links=True,
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """All cards for an event about Onload; else the card that the event is about."""
        if isinstance(hint, PathChange):
            return ALL if hint.path in (onload.DEV, *onload.NODES) else ()
        if isinstance(hint, LinkChange):
            return netdevs.having(hint.name, known)
        assert isinstance(hint, Uevent)
        if hint.subsystem == "module":
            return ALL if hint.name == "onload" else ()
        return pci.affected(hint, known) & known.keys() if hint.subsystem == "net" else pci.affected(hint, known)

    # --- how it is ---

    def probe(self, device: Device) -> Iterable[Signal]:
        """The health of Onload, of the function, its driver and its link."""
        if device.unusable:
            return
        address = device.key
        hardware = f"pci:{address}"
        yield from onload.signals(self.host, hardware, self._options_for(device))
        yield from pci_health.signals(self.host, address)
        for signal in pci_health.driver_signals(self.host, address, _DRIVERS):
            yield replace(signal, verdict=Verdict.DELAYED, after=onload.SETTLE)
        for name in device.attributes.get("ifname", ()):
            if (state := netdevs.down(self.host, name)) is not None:
                yield Signal(hardware, "link-down", Verdict.DEGRADED, f"the link of {name} is {state}")

    def _options_for(self, device: Device) -> SolarflareOptions:
        taker = next((resource for resource in self.resources if resource.refuses(device) is None), None)
        return taker.spec.options if taker is not None else _DEFAULTS

    def signals(self, record: Record) -> Iterable[Signal]:
        """PCI error recoveries, of any function."""
        return pci_health.recovery_signals(record)

    # --- handing out ---

    def edits(self, resource: SolarflareResource, grants: Sequence[Grant]) -> ContainerEdits:
        """The nodes of Onload, each once, and the libraries that the resource names."""
        found = ContainerEdits.of(grants)
        if all(node.path != onload.MAIN for node in found.nodes):
            raise AllocationRefused(
                f"{onload.MAIN} does not exist, so that {resource.name} is of no use. Create the pod again."
            )
        libraries = tuple(Mount(HostPath(path), path, read_only=True) for path in resource.spec.options.libraries)
        return replace(found, mounts=libraries)

    def needs_claim(self, resource: SolarflareResource) -> bool:
        """Only for resources with `device_info`."""
        return resource.spec.options.device_info

    def claim(self, resource: SolarflareResource, grants: Sequence[Grant]) -> None:
        """Write the files that tell CNI plugins which devices the pod has."""
        for grant in grants:
            device_info.write(self.host, resource.name, grant.id, device_info.pci(grant.device.key))

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        """Remove the files that `claim` wrote."""
        device_info.remove(self.host, ended)
