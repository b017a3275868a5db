"""A chardev backend on a made-up node, and the inventory behind it, as the daemon has them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent.config import typed
from agent.inventory.inventory import Inventory
from agent.model import Held
from backends.base import Device, Grant, OptionsError, Resource, ResourceSpec
from backends.chardev import CharDev, CharDevOptions, CharDevResource
from backends.interface.values import Known
from tests.backends.linux.sticks import directory, stick
from tests.backends.trees import plant, planted_host

NAME = "example.com/x"
FTDI = {"vendor": "0403", "product": "6001"}


def configured(name: str = NAME, replicas: int = 1, **table: Any) -> CharDevResource:
    """A resource with the options of this table."""
    found, mistakes = typed.convert(table, CharDevOptions)
    assert not mistakes
    return Resource(name, ResourceSpec("chardev", found, replicas=replicas))


def chardev(tmp_path: Path, tree: str, *resources: CharDevResource) -> CharDev:
    return CharDev(planted_host(tmp_path, tree), resources)


def only(backend: CharDev, unit: str) -> Device:
    (device,) = backend.discover(unit).devices
    return device


def problems(backend: CharDev, unit: str) -> list[str]:
    found = backend.discover(unit)
    assert not found.devices
    return [problem.sentence for problem in found.problems]


def known(backend: CharDev) -> Known:
    return Known({unit: backend.discover(unit).devices for unit in backend.units()})


def refused(found: CharDevResource) -> OptionsError:
    with pytest.raises(OptionsError) as error:
        CharDev.check(found)
    return error.value


class Looked:
    """The inventory of resources after one look at everything."""

    def __init__(self, root: Path, tree: str, *resources: CharDevResource) -> None:
        self.root = root
        self.backend = chardev(root, tree, *resources)
        self.inventory = Inventory(resources, {"chardev": self.backend})
        self.units: set[str] = set()
        self.look()

    def look(self) -> None:
        units = set(self.backend.units())
        self.inventory.update("chardev", {unit: self.backend.discover(unit).devices for unit in self.units | units})
        self.units = units

    def listed(self, name: str = NAME) -> dict[str, str]:
        """Each ID with the key of its device, or why it has none."""
        slots = self.inventory.slots(name).items()
        return {device_id: slot.device.key if slot.device else slot.health.reason for device_id, slot in slots}

    def grant(self, device_id: str, name: str = NAME) -> Grant:
        slot = self.inventory.slots(name)[device_id]
        assert slot.device is not None
        return Grant(device_id, slot.device)

    def refused(self) -> dict[str, str]:
        return {lost.device.key: lost.why for lost in self.inventory.unclaimed()}

    def state(self, device_id: str) -> str:
        """Why the kubelet is told Unhealthy; empty if it is told Healthy."""
        return self.inventory.slots(NAME)[device_id].health.reason

    def hold(self, device_id: str) -> Held:
        """A pod is given this."""
        held = Held.of(NAME, device_id, "chardev", self.grant(device_id).device)
        self.inventory.claim([held])
        return held

    def unplug(self, port: str) -> None:
        (self.root / "sys/bus/usb/devices" / port).unlink()
        shutil.rmtree(self.root / "sys" / directory(port))

    def plug(self, port: str, number: int, **options: Any) -> None:
        plant(self.root, stick(port, number, **options))
