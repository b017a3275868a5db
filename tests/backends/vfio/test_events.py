"""The backend `vfio`: which groups an event is about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.base import ALL, Hint, HostPath, Known, LinkChange, PathChange, Uevent
from backends.vfio import Vfio
from tests.backends.pci_trees import function
from tests.backends.vfio.vfio_node import GPU, ROOT, SOUND, backend, gpu, resource, sound

OTHER = "0000:5e:00.0"


def known(found: Vfio) -> Known:
    return Known({unit: found.discover(unit).devices for unit in found.units()})


def affected(found: Vfio, hint: Hint) -> Any:
    units = found.affects(hint, known(found))
    return units if units is ALL else set(units)


def pci_event(address: str, action: str, below: str = ROOT) -> Uevent:
    return Uevent(action, "pci", f"/devices/{below}/{address}")


@pytest.mark.parametrize("action", ["bind", "unbind", "remove", "change", "add"])
def test_any_event_of_any_member_leads_to_its_group(tmp_path: Path, action: str) -> None:
    found = backend(tmp_path, gpu() + sound("snd_hda_intel") + function(OTHER, group=13))
    assert affected(found, pci_event(GPU, action)) == {"12"}
    assert affected(found, pci_event(SOUND, action)) == {"12"}


def test_a_new_function_may_be_in_any_group(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu())
    assert affected(found, pci_event(OTHER, "add")) is ALL
    assert affected(found, pci_event(OTHER, "bind")) is ALL
    assert affected(found, pci_event(OTHER, "change")) == set()


def test_a_card_that_loses_virtual_functions_is_looked_at_again(tmp_path: Path) -> None:
    first, second = "0000:5e:00.4", "0000:5e:00.5"
    tree = function(OTHER, "8086:10c9", group=13, virtual=[first, second]) + "".join(
        function(address, "8086:10ca", group=group, physical=OTHER) for address, group in ((first, 14), (second, 15))
    )
    one = backend(tmp_path / "both", tree, resource("intel.com/nic", {"vendor": ("8086",)}))
    assert affected(one, pci_event(first, "remove")) == {"14", "13"}
    assert affected(one, pci_event(first, "bind")) == {"14"}
    other = backend(tmp_path / "card", tree, resource("intel.com/nic", {"id": ("8086:10c9",)}))
    assert affected(other, pci_event(first, "remove")) is ALL


def test_events_of_nodes_lead_to_the_groups_that_have_them(tmp_path: Path) -> None:
    found = backend(tmp_path, gpu())
    node = HostPath("/dev/vfio/12")
    assert affected(found, Uevent("remove", "vfio", "/devices/virtual/vfio/12", node)) == {"12"}
    assert affected(found, PathChange(node)) == {"12"}
    assert affected(found, PathChange(HostPath("/dev/vfio"))) == {"12"}
    assert affected(found, PathChange(HostPath("/dev/vfio/99"))) == set()
    assert affected(found, Uevent("add", "vfio-dev", f"/devices/{ROOT}/{GPU}/vfio-dev/vfio0")) == {"12"}
    assert affected(found, Uevent("add", "vfio", "/devices/virtual/vfio/99", HostPath("/dev/vfio/99"))) == set()
    assert affected(found, LinkChange("eth0", 2)) == set()


def test_what_is_listened_to(tmp_path: Path) -> None:
    watches = backend(tmp_path, gpu()).watches(Known())
    assert watches.subsystems == {"pci", "vfio", "vfio-dev"}
    assert watches.facts == {"ERROR_EVENT"}
    assert watches.directories == {HostPath("/dev/vfio"), HostPath("/dev/vfio/devices")}
