"""The `solarflare` backend: which cards are offered, what a container gets, and how they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from backends.base import (
    ALL,
    AllocationRefused,
    Device,
    Grant,
    Host,
    HostPath,
    Known,
    LinkChange,
    PathChange,
    Released,
    Resource,
    ResourceSpec,
    Selector,
    Uevent,
    Verdict,
)
from backends.linux import device_info
from backends.solarflare import Solarflare, SolarflareOptions, SolarflareResource
from tests.backends.pci_trees import function
from tests.backends.trees import plant, planted_host

ONE, TWO, VF = "0000:3b:00.0", "0000:3b:00.1", "0000:3b:00.2"
BELOW = "pci0000:3a/0000:3a:00.0"
MODULES = """
proc/devices = Character devices:\\n 10 misc\\n233 onload_cplane\\n234 onload_epoll\\n235 onload\\n\\nBlock devices:\\n  8 sd
sys/module/onload/version = 8.1.3.40
dev/onload c 235:0
dev/onload_cplane c 233:0
dev/onload_epoll c 234:0
dev/sfc_char c 236:0
"""


def port(address: str, name: str, *, ids: str = "1924:0b03", dev_port: int = 0, **more: Any) -> str:
    files = {f"net/{name}/operstate": "up", f"net/{name}/dev_port": str(dev_port)} if name else {}
    more = {"driver": "sfc", "files": files, "net": [name] if name else [], **more}
    return function(address, ids, below=BELOW, kind="020000", **more)


def x2522() -> str:
    """A card with two ports, and Onload."""
    return MODULES + port(ONE, "ens1f0np0") + port(TWO, "ens1f1np1")


def resource(*select: Selector, replicas: int = 1, **options: Any) -> SolarflareResource:
    spec = ResourceSpec("solarflare", SolarflareOptions(**options), select=select, replicas=replicas)
    return Resource("solarflare/smartNIC", spec)


def backend(root: Path, tree: str, *resources: SolarflareResource) -> Solarflare:
    return Solarflare(planted_host(root, tree), resources or (resource(),))


def devices(found: Solarflare) -> list[Device]:
    return [device for unit in found.units() for device in found.discover(unit).devices]


def reasons(found: Solarflare) -> list[list[tuple[str, Verdict, float]]]:
    return [[(one.reason, one.verdict, one.after) for one in found.probe(device)] for device in devices(found)]


def grants(every: Sequence[Device]) -> list[Grant]:
    return [Grant(device.key, device) for device in every]


@pytest.mark.parametrize("ids", ["1924:0b03", "1924:0a03"], ids=["X2522", "8000 series"])
def test_each_port_is_a_device_and_each_container_gets_the_nodes_of_onload_once(tmp_path: Path, ids: str) -> None:
    tree = MODULES + port(ONE, "ens1f0", ids=ids) + port(TWO, "ens1f1", ids=ids)
    found = backend(tmp_path, tree)
    one, two = devices(found)
    assert (one.key, two.key) == (ONE, TWO)
    assert (one.numa_node, one.attributes["ifname"], one.attributes["onload_version"]) == (
        0,
        ("ens1f0",),
        ("8.1.3.40",),
    )
    names = ["/dev/onload", "/dev/onload_cplane", "/dev/onload_epoll", "/dev/sfc_char"]
    for granted in ([one], [one, two]):
        edits = found.edits(found.resources[0], grants(granted))
        assert [(n.path.text, n.container_path, n.permissions) for n in edits.nodes] == [(n, n, "mrw") for n in names]
        assert (edits.mounts, edits.env) == ((), {})
        assert not edits.annotations
    assert reasons(found) == [[], []]


def test_onload_that_goes_away_makes_all_cards_unhealthy_after_a_while_and_healthy_when_it_is_back(
    tmp_path: Path,
) -> None:
    found = backend(tmp_path, x2522())
    listed = (tmp_path / "proc/devices").read_text()
    plant(tmp_path, r"proc/devices = Character devices:\n233 onload_cplane\n99 foo_onload_epoll\n235 onload")
    assert reasons(found) == [[("onload-missing", Verdict.DELAYED, 5.0)]] * 2
    (tmp_path / "proc/devices").write_text(listed)
    assert reasons(found) == [[], []]


def test_a_container_is_refused_when_onload_has_no_node(tmp_path: Path) -> None:
    found = backend(tmp_path, x2522().replace("dev/onload c 235:0", ""))
    assert reasons(found) == [[("node-missing", Verdict.DELAYED, 5.0)]] * 2
    with pytest.raises(AllocationRefused, match="/dev/onload does not exist"):
        found.edits(found.resources[0], grants(devices(found)))


@pytest.mark.parametrize(
    ("change", "reason", "verdict"),
    [
        ("dev/onload_epoll c 99:0", "wrong-node", Verdict.DELAYED),
        ("dev/sfc_affinity = text", "not-a-device", Verdict.DELAYED),
        ("sys/module/onload/version = 7.1.0.265", "onload-version", Verdict.DEGRADED),
        (f"sys/devices/{BELOW}/{ONE}/net/ens1f0np0/operstate = down", "link-down", Verdict.DEGRADED),
        (f"sys/devices/{BELOW}/{ONE}/power_state = error", "power-error", Verdict.NOW),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, change: str, reason: str, verdict: Verdict) -> None:
    found = backend(tmp_path, x2522(), resource(onload_version="8.1.3.40", libraries=("/usr/lib64/libonload.so",)))
    plant(tmp_path, "usr/lib64/libonload.so")
    assert reasons(found)[0] == []
    (tmp_path / change.split(maxsplit=1)[0]).unlink(missing_ok=True)
    plant(tmp_path, change)
    ((said, how, _),) = reasons(found)[0]
    assert (said, how) == (reason, verdict)


def test_a_card_between_two_drivers_stays_listed_and_one_that_another_driver_has_is_not_offered(tmp_path: Path) -> None:
    tree = MODULES + port(ONE, "", driver=None) + port(TWO, "", driver="vfio-pci")
    found = backend(tmp_path, tree)
    bare, taken = devices(found)
    assert (bare.unusable, taken.unusable) == ("", "it is bound to vfio-pci, not to sfc")
    assert [(one.reason, one.verdict) for one in found.probe(bare)] == [("driver-unbound", Verdict.DELAYED)]


def test_virtual_functions_and_alveo_cards_are_offered_only_to_a_resource_that_selects_them(tmp_path: Path) -> None:
    tree = x2522() + port(VF, "eth2", ids="1924:1b03", physical=ONE)
    tree += port("0000:5e:00.0", "eth3", ids="10ee:5084", driver="xilinx_efct")
    assert [device.key for device in devices(backend(tmp_path, tree))] == [ONE, TWO]
    chosen = resource({"function": ("virtual",)}, {"vendor": ("10ee",)})
    found = [device for device in devices(Solarflare(Host.below(tmp_path), [chosen])) if device.resource]
    assert [(device.key, device.depends) for device in found] == [
        (VF, frozenset({f"pci:{ONE}"})),
        ("0000:5e:00.0", frozenset()),
    ]


def test_an_interface_that_is_in_a_pod_takes_its_card_out_of_no_resource(tmp_path: Path) -> None:
    by_name = resource({"ifname": ("ens1f0np0",)})
    found = backend(tmp_path, MODULES + port(ONE, ""), by_name)
    (device,) = devices(found)
    assert by_name.refuses(device) is None
    assert not list(found.probe(device))


def test_the_interface_is_that_of_the_first_port(tmp_path: Path) -> None:
    tree = port(ONE, "eth0", dev_port=1, net=["eth0", "eth1"]) + f"sys/devices/{BELOW}/{ONE}/net/eth1/dev_port = 0\n"
    (device,) = devices(backend(tmp_path, tree))
    assert device.attributes["ifname"] == ("eth1",)


def test_cni_plugins_are_told_of_a_card_until_no_pod_holds_it(tmp_path: Path) -> None:
    found = backend(tmp_path, x2522(), resource(device_info=True))
    (of,) = found.resources
    assert found.needs_claim(of)
    assert not found.needs_claim(resource())
    found.claim(of, grants(devices(found)))
    written = tmp_path / f"run/k8s.cni.cncf.io/devinfo/dp/solarflare-smartNIC-{ONE}-device.json"
    assert json.loads(written.read_text()) == {"type": "pci", "version": "1.1.0", "pci": {"pci-address": ONE}}
    for _ in "twice":
        found.release([Released(of.name, ONE, frozenset({f"pci:{ONE}"}))], frozenset())
    assert [path.name for path in written.parent.iterdir()] == [f"solarflare-smartNIC-{TWO}-device.json"]


def test_a_pod_is_refused_when_cni_plugins_cannot_be_told(tmp_path: Path) -> None:
    found = backend(tmp_path, x2522(), resource(device_info=True))
    plant(tmp_path, "run/k8s.cni.cncf.io")
    with pytest.raises(AllocationRefused, match=r"set device_info = false"):
        found.claim(found.resources[0], grants(devices(found)))
    assert device_info.file_of("a.b/c", ONE).text.endswith(f"dp/a.b-c-{ONE}-device.json")


def test_libraries_are_mounted_read_only_where_they_are_asked_for(tmp_path: Path) -> None:
    found = backend(tmp_path, x2522(), resource(libraries=("/usr/lib64/libonload.so",)))
    (mount,) = found.edits(found.resources[0], grants(devices(found))).mounts
    assert (mount.path.text, mount.container_path, mount.read_only) == (*["/usr/lib64/libonload.so"] * 2, True)
    assert "library-missing" in [one.reason for one in found.probe(devices(found)[0])]


def test_events_lead_to_the_cards_that_they_are_about(tmp_path: Path) -> None:
    found = backend(tmp_path, x2522())
    known = Known({unit: found.discover(unit).devices for unit in found.units()})
    of_one = f"/devices/{BELOW}/{ONE}"
    assert found.affects(PathChange(HostPath("/dev/onload_epoll")), known) is ALL
    assert found.affects(PathChange(HostPath("/dev/loop0")), known) == ()
    assert found.affects(Uevent("add", "module", "/module/onload"), known) is ALL
    assert found.affects(Uevent("add", "module", "/module/kvm"), known) == ()
    assert found.affects(LinkChange("ens1f1np1", 3), known) == [TWO]
    assert found.affects(Uevent("move", "net", f"{of_one}/net/ens1f0np0"), known) == {ONE}
    assert found.affects(Uevent("bind", "pci", of_one), known) == {ONE}
    assert found.affects(Uevent("add", "net", "/devices/pci0000:00/0000:00:03.0/net/eth0"), known) == set()
