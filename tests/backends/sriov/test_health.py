"""The `sriov` backend: how functions are, and which events make Fairlead look at which of them."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from backends.base import ALL, Device, HostPath, Known, LinkChange, PathChange, Uevent, Verdict
from backends.sriov import Sriov
from tests.backends.pci_trees import function
from tests.backends.sriov.sriov_trees import E810, small, vfio_function
from tests.backends.sriov.test_backend import VHOST, backend, devices, resource
from tests.backends.trees import plant

TWO = small(E810, 2)


def said(found: Sriov, device: Device) -> list[tuple[str, str, Verdict, float]]:
    return [(one.hardware, one.reason, one.verdict, one.after) for one in found.probe(device)]


def test_virtual_functions_are_unhealthy_once_the_card_s_link_is_down_for_a_while(tmp_path: Path) -> None:
    found = backend(tmp_path, TWO.tree(), resource(down_after=3.0))
    one, two = devices(found)
    assert (said(found, one), said(found, two)) == ([], [])
    state = tmp_path / f"sys/class/net/{TWO.netdev}/operstate"
    state.write_text("down\n")
    of_the_card = f"link:{TWO.address}"
    expected = [(of_the_card, "link-down", Verdict.DELAYED, 3.0)]
    assert (said(found, one), said(found, two)) == (expected, expected)
    assert of_the_card in one.depends
    assert of_the_card not in one.hardware  # of no other backend's devices
    (tmp_path / f"sys/class/net/{TWO.netdev}/flags").write_text("0x1002\n")
    assert said(found, one) == [(of_the_card, "link-disabled", Verdict.DEGRADED, 0.0)]
    state.write_text("up\n")
    assert said(found, one) == []


def test_a_broken_card_is_told_of_its_virtual_functions(tmp_path: Path) -> None:
    found = backend(tmp_path, TWO.tree())
    plant(tmp_path, f"sys/devices/{TWO.below}/{TWO.address}/power_state = error")
    (device, _) = devices(found)
    assert said(found, device) == [(f"pci:{TWO.address}", "power-error", Verdict.NOW, 0.0)]


def test_a_function_whose_group_cannot_be_opened_or_whose_node_is_missing_is_unhealthy(tmp_path: Path) -> None:
    tree = small(E810, 2).tree(bare=[0, 1]) + vfio_function(E810, 0, 70) + "dev/vfio/vfio c 10:196\n"
    tree += E810.virtual_function(1, group=70)
    found = backend(tmp_path, tree, resource({"driver": ("vfio-pci",)}))
    device = devices(found)[0]
    own = f"pci:{E810.vf(0)}"
    assert said(found, device) == [(own, "group-not-viable", Verdict.NOW, 0.0)]
    (tmp_path / "dev/vfio/70").unlink()
    assert said(found, device)[0] == (own, "node-missing", Verdict.NOW, 0.0)


def test_without_vhost_net_a_device_is_degraded(tmp_path: Path) -> None:
    found = backend(tmp_path, small(E810, 1).tree(), resource(vhost_net=True))
    assert [one[1:3] for one in said(found, devices(found)[0])] == [("vhost-missing", Verdict.DEGRADED)]
    plant(tmp_path, VHOST)
    assert said(found, devices(found)[0]) == []


def test_events_lead_to_the_functions_that_they_are_about(tmp_path: Path) -> None:
    tree = TWO.tree(bare=[1]) + vfio_function(E810, 1, 71)
    found = backend(tmp_path, tree)
    known = Known({unit: found.discover(unit).devices for unit in found.units()})
    at = f"/devices/{TWO.below}"
    zero, one, card = TWO.vf(0), TWO.vf(1), TWO.address
    of_the_card = {card, zero, one}
    assert found.affects(LinkChange(TWO.netdev, 2), known) == [zero, one]
    assert found.affects(LinkChange("veth7", 9), known) == []
    assert found.affects(Uevent("move", "net", f"{at}/{zero}/net/eth0"), known) == {zero}
    assert found.affects(Uevent("move", "net", f"{at}/{card}/net/eth0"), known) == of_the_card
    assert found.affects(Uevent("change", "pci", f"{at}/{card}"), known) == of_the_card
    assert found.affects(Uevent("remove", "pci", f"{at}/{zero}"), known) == of_the_card
    assert found.affects(Uevent("add", "pci", f"{at}/{TWO.vf(2)}"), known) == {TWO.vf(2)}
    assert found.affects(Uevent("add", "net", "/devices/pci0000:00/0000:00:03.0/net/eth9"), known) == set()
    assert found.affects(PathChange(HostPath("/dev/vfio/71")), known) == [one]
    assert found.affects(PathChange(HostPath("/dev/vhost-net")), known) is ALL
    assert found.affects(PathChange(HostPath("/dev/loop0")), known) == []


def test_a_card_whose_interface_is_elsewhere_is_unhealthy_unless_one_of_our_pods_has_it(tmp_path: Path) -> None:
    card = small(E810, 0)
    found = backend(tmp_path, card.tree())
    (device,) = devices(found)
    assert said(found, device) == []
    (tmp_path / f"sys/devices/{card.below}/{card.address}/net").rename(tmp_path / "elsewhere")
    (signal,) = found.probe(devices(found)[0])
    assert (signal.reason, signal.unless_held) == ("in-another-namespace", True)
    for driver, files in (("igb_uio", {"uio/uio0/name": "x"}), ("vp-vdpa", {})):
        user = backend(tmp_path / driver, function(card.address, kind="020000", driver=driver, files=files))
        assert "in-another-namespace" not in {one[1] for one in said(user, devices(user)[0])}


def test_a_link_that_nobody_knows_of_is_no_signal(tmp_path: Path) -> None:
    found = backend(tmp_path, replace(TWO, link="unknown").tree())
    assert said(found, devices(found)[0]) == []
