"""The backend `solarflare`: Solarflare's network functions, each a unit and a device; a pod gets the nodes of Onload with them.

Files: proc(5) for /proc/devices; the names are those that Onload's own modules register (onload, onload_cplane and
onload_epoll by the module onload, sfc_char and sfc_affinity by modules of the same names).
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Final

import msgspec
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
    Host,
    HostPath,
    Known,
    LinkChange,
    Mount,
    Node,
    OptionsError,
    PathChange,
    Record,
    Released,
    Resource,
    Signal,
    Uevent,
    Verdict,
    Watches,
    assumed,
)
from backends.errors import not_short, reason_of
from backends.linux import device_info, netdevs, pci, pci_health, sysfs

_SOLARFLARE: Final = "1924"
_XILINX: Final = "10ee"  # Onload drives its Alveo X3 cards, too
_ETHERNET: Final = "0200"
_DRIVERS: Final = frozenset({"sfc", "sfc_ef100", "sfc_siena", "sfc_falcon", "xilinx_efct"})

DEV: Final = HostPath("/dev")
MAIN: Final = DEV / "onload"
"""Without it a container has no Onload."""

_REQUIRED: Final = ("onload", "onload_cplane", "onload_epoll")
NODES: Final = tuple(DEV / name for name in (*_REQUIRED, "sfc_char", "sfc_affinity"))
"""In the order of Solarflare's own plugin."""

SETTLE: Final = 5.0
"""Seconds for which `onload_tool reload` may take modules and nodes away."""

_DEVICES: Final = HostPath("/proc/devices")
_VERSION: Final = HostPath("/sys/module/onload/version")
_LINE: Final = re.compile(r"\s*([0-9]{1,4}) (\S+)")
_PERMISSIONS: Final = "mrw"  # those of Solarflare's own plugin


# --- the keys of a resource ---


class SolarflareOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of a `solarflare` resource."""

    onload_version: str | None = None
    """The version that the module onload is to have; with another one the cards are degraded."""
    libraries: tuple[str, ...] = ()
    """Files and directories of the host that a container gets at the same place, read-only: Onload's libraries."""
    device_info: bool = False
    """Whether a DeviceInfo file is written for Multus and CNI plugins."""


SolarflareResource = Resource[SolarflareOptions]
_DEFAULTS: Final = SolarflareOptions()


def complaints(resource: SolarflareResource) -> Iterator[OptionsError]:
    """What is wrong with a resource, key by key."""
    options = resource.spec.options
    for index, path in enumerate(options.libraries):
        if not path.startswith("/"):
            yield OptionsError(("libraries", index), f"{path!r} is not an absolute path")
    if options.device_info and resource.spec.replicas != 1:
        yield OptionsError(("device_info",), "is not for replicas: a CNI plugin moves a card into one pod")
    if "ifname" in resource.named_by:
        yield OptionsError(("name",), "asks for ifname, which a card has no more while its interface is in a pod")


# --- the backend ---


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
        version = onload_version(self.host)
        more = {"ifname": names[:1], "onload_version": (version,) if version else ()}
        attributes = {**device.attributes} | {name: values for name, values in more.items() if values}
        if not names:
            attributes = assumed(attributes, ("ifname",), self.resources)
        foreign = function.driver is not None and function.driver not in _DRIVERS
        return replace(
            device,
            nodes=onload_nodes(self.host),
            unusable=f"it is bound to {function.driver}, not to sfc" if foreign else "",
            attributes=attributes,
        )

    def watches(self, known: Known) -> Watches:  # noqa: ARG002  # an interface's
        """Functions, their interfaces and links, Onload's modules and nodes."""
        return Watches(
            subsystems=frozenset({"pci", "net", "module"}),
            directories=frozenset({DEV}),
            facts=frozenset({pci_health.FACT}),
            links=True,
        )

    def affects(self, hint: Hint, known: Known) -> Iterable[str] | All:
        """All cards for an event about Onload; else the card that the event is about."""
        if isinstance(hint, PathChange):
            return ALL if hint.path in (DEV, *NODES) else ()
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
        yield from onload_signals(self.host, hardware, self._options_for(device))
        yield from pci_health.signals(self.host, address)
        for signal in pci_health.driver_signals(self.host, address, _DRIVERS):
            yield replace(signal, verdict=Verdict.DELAYED, after=SETTLE)
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
        if all(node.path != MAIN for node in found.nodes):
            raise AllocationRefused(
                f"{MAIN} does not exist, so that {resource.name} is of no use. Create the pod again."
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


# --- Onload ---


def onload_nodes(host: Host) -> tuple[Node, ...]:
    """The nodes that are there; all cards share them."""
    there = (path for path in NODES if host.local(path).exists())
    return tuple(Node(path, path.text, _PERMISSIONS, shared=True) for path in there)


def onload_version(host: Host) -> str | None:
    """The version of the loaded module onload; None if it is not loaded."""
    return sysfs.attribute(host, _VERSION) or None


def onload_signals(host: Host, hardware: str, options: SolarflareOptions) -> Iterator[Signal]:
    """What is wrong with Onload, told of one card."""
    majors = _majors(host)
    if majors is not None and (missing := [name for name in _REQUIRED if name not in majors]):
        why = f"{_DEVICES} has no {' and no '.join(missing)}: load Onload's modules (onload_tool reload)"
        yield Signal(hardware, "onload-missing", Verdict.DELAYED, why, after=SETTLE)
    for path in NODES:
        if (fault := _fault(host, path, majors)) is not None:
            reason, why = fault
            yield Signal(hardware, reason, Verdict.DELAYED, why, after=SETTLE)
    found = onload_version(host)
    if options.onload_version is not None and found is not None and found != options.onload_version:
        why = f"the module onload is of version {found}, not {options.onload_version}"
        yield Signal(hardware, "onload-version", Verdict.DEGRADED, why)
    for library in options.libraries:
        if not host.local(HostPath(library)).exists():
            yield Signal(
                hardware, "library-missing", Verdict.NOW, f"{library}, which containers are to get, is missing"
            )


def _fault(host: Host, path: HostPath, majors: dict[str, int] | None) -> tuple[str, str] | None:
    """What is wrong with a node; those of sfc_char and sfc_affinity may be missing."""
    try:
        found = host.local(path).stat()
    except FileNotFoundError:
        return ("node-missing", f"{path} does not exist") if path.name in _REQUIRED else None
    except OSError as error:
        return "node-missing", f"{path} cannot be used: {reason_of(not_short(error))}"
    if not stat.S_ISCHR(found.st_mode):
        return "not-a-device", f"{path} is not a character device"
    kernels, its = (majors or {}).get(path.name), os.major(found.st_rdev)
    if kernels is not None and its != kernels:
        return "wrong-node", f"{path} has the major number {its}, and the kernel's is {kernels}"
    return None


def _majors(host: Host) -> dict[str, int] | None:
    """Name → major number of every kind of character device; None if the list cannot be read."""
    if (text := sysfs.text(host, _DEVICES)) is None:
        return None
    characters = text.partition("Block devices:")[0]
    return {found[2]: int(found[1]) for line in characters.splitlines() if (found := _LINE.fullmatch(line))}
