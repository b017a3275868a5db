"""Checks the health of one adapter: its nodes, whether it is still there, its PCI function, its ports.

A glance reads the ports every few seconds, since the kernel sends no event of them. The rest is read each half minute, or
when a glance has changed; so paths are plain texts here, and no file is read twice.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from backends.base import Device, Host, Signal, Verdict
from backends.errors import reason_of
from backends.infiniband import port_health, port_state
from backends.infiniband.adapters import adapter_hardware
from backends.infiniband.options import InfiniBandOptions
from backends.linux import pci_health, rdma
from backends.linux.rdma import Port


def signals(host: Host, device: Device, options: InfiniBandOptions) -> Iterator[Signal]:
    """What is wrong with the adapter now."""
    hardware, said = adapter_hardware(device), device.attributes
    yield from _node_signals(host, hardware, device)
    if lost := [name for name in said["hca"] if not _is_seen(host, name)]:
        yield from _lost(host, hardware, device, lost)
    if said.get("function") == ("physical",):
        yield from pci_health.signals(host, said["address"][0])
    if options.virtual_ports or _has_ports(device):
        states = [port_state.read(host, port, options.counters) for port in _ports(device) if port.hca not in lost]
        yield from port_health.signals(hardware, states, options)


def glance(host: Host, device: Device, *, virtual_ports: bool) -> tuple[object, ...]:
    """What changes without an event: the state of the ports, where they count."""
    if virtual_ports or _has_ports(device):
        return tuple(port_state.glance(host, port) for port in _ports(device))
    return tuple(_is_seen(host, name) for name in device.attributes["hca"])


def _has_ports(device: Device) -> bool:
    """Do its ports count for its health? Those of a virtual function may be down on purpose."""
    return device.attributes.get("function", ("physical",)) == ("physical",)


def _is_seen(host: Host, hca: str) -> bool:
    return os.path.isdir(f"{host.sys}/class/infiniband/{hca}")  # noqa: PTH112  # a Path costs more than the question


def _ports(device: Device) -> Iterator[Port]:
    said = device.attributes
    for name, link_layer in zip(said.get("port", ()), said.get("link_layer", ()), strict=False):
        hca, _, number = name.rpartition(":")
        yield Port(hca, int(number), link_layer)


def _node_signals(host: Host, hardware: str, device: Device) -> Iterator[Signal]:
    """Signals about nodes that are missing or wrong. rdma_cm, the last and without a number here, is left out."""
    numbers = device.attributes.get("dev", ())
    if not any(node.path.name.startswith("uverbs") for node in device.nodes[: len(numbers)]):
        why = f"{' and '.join(device.attributes['hca'])} has no uverbs device; is the module ib_uverbs loaded?"
        yield Signal(hardware, "uverbs-missing", Verdict.NOW, why)
    for node, number in zip(device.nodes, numbers, strict=False):
        path = node.path
        try:
            found = os.stat(f"{host.dev}{path.text.removeprefix('/dev')}")  # noqa: PTH116  # as above
        except OSError as error:
            reason = reason_of(error)
            yield Signal(hardware, "node-missing", Verdict.NOW, f"{path} cannot be used: {reason}")
            continue
        if not stat.S_ISCHR(found.st_mode):
            yield Signal(hardware, "not-a-device", Verdict.NOW, f"{path} is not a character device")
        elif number not in ("unknown", has := f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"):
            yield Signal(hardware, "wrong-node", Verdict.NOW, f"{path} is {has}, but the kernel's is {number}")


def _lost(host: Host, hardware: str, device: Device, names: list[str]) -> Iterator[Signal]:
    """A signal about adapters that have vanished: the driver has left, or a pod's network namespace has them."""
    address, driver = (device.attributes.get(name, ()) for name in ("address", "driver"))
    unbound = list(pci_health.driver_signals(host, address[0], driver)) if address and driver else []
    yield from unbound
    if unbound:
        return
    what = " and ".join(names)
    if rdma.is_exclusive(host):
        why = f"{what} is in another network namespace than the host's"
        yield Signal(hardware, "in-another-namespace", Verdict.NOW, why, unless_held=True)
    else:
        yield Signal(hardware, "hca-missing", Verdict.NOW, f"{what} is not in {rdma.INFINIBAND} any more")
