"""What a host needs its functions for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from backends.base import Host
from backends.linux import netdevs, pci
from backends.linux.host_uses import busy_disks, uses
from tests.backends.pci_trees import function
from tests.backends.trees import plant, planted_host

ONE = "0000:01:00.0"
PATH = f"sys/devices/pci0000:00/{ONE}"
ROUTES = "Iface\\tDestination\\tGateway \\tFlags\\tRefCnt\\tUse\\tMetric\\tMask\\t\\tMTU\\tWindow\\tIRTT".replace(
    "\\t", "\t"
)


def said(tmp_path: Path, tree: str, **more: object) -> list[str]:
    host = planted_host(tmp_path, function(ONE, **more) + tree)  # type: ignore[arg-type]
    return list(uses(host, found(host)))


def found(host: Host) -> pci.Function:
    one = pci.read(host, ONE)
    assert one is not None
    return one


def disk(name: str, number: str, below: str = f"{PATH}/nvme/nvme0", holders: str = "") -> str:
    path = f"{below}/{name}"
    depth = "../../.."
    lines = [f"sys/class/block/{name} -> {depth}/{path}", f"{path}/dev = {number}", f"{path}/uevent = DEVNAME={name}"]
    lines = [line.replace(f"{depth}/sys/", "../../") for line in lines]
    return "\n".join([*lines, *([f"{path}/holders/{holders} -> x"] if holders else [])]) + "\n"


def mounts(*lines: str) -> str:
    every = ["22 1 0:21 / / rw,relatime shared:1 - overlay overlay rw", *lines]
    return "proc/1/mountinfo = " + "\\n".join(every) + "\n"


def interface(name: str, below: str = f"{PATH}/net", *, master: str = "", upper: str = "") -> str:
    """An interface with the links to its master and to what else is made of it, as tests/guest/uplinks.py sees them made."""
    path = f"{below}/{name}"
    entries = {"master": master, f"upper_{master}": master, f"upper_{upper}": upper}
    links = "".join(f"{path}/{entry} -> ../{target}\n" for entry, target in entries.items() if target)
    return f"sys/class/net/{name} -> ../../{path.removeprefix('sys/')}\n{path}/ifindex = 2\n{links}"


def routes(*interfaces: str) -> str:
    rows = [f"{name}\t00000000\t0102A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0" for name in interfaces]
    other = "eth9\t0002A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0"
    return "proc/1/net/route = " + "\\n".join([ROUTES, *rows, other]) + "\n"


# --- screens, virtual functions ---


def test_a_function_that_nothing_needs(tmp_path: Path) -> None:
    assert said(tmp_path, "", driver="nvidia") == []


def test_the_firmwares_screen(tmp_path: Path) -> None:
    assert said(tmp_path, "", files={"boot_vga": "1"}) == [
        "drives the screen of the firmware and the console (boot_vga)"
    ]
    assert said(tmp_path / "other", "", files={"boot_vga": "0"}) == []


def test_a_connected_screen(tmp_path: Path) -> None:
    tree = f"{PATH}/drm/card0/card0-DP-1/status = disconnected\n{PATH}/drm/card0/card0-HDMI-A-1/status = connected\n"
    assert said(tmp_path, tree) == ["drives the screen at card0-HDMI-A-1"]


def test_a_picture_for_a_screen_that_cannot_tell_whether_it_is_there(tmp_path: Path) -> None:
    """Analogue ones without DDC, and those behind some switches."""
    tree = f"{PATH}/drm/card0/card0-VGA-1/status = unknown\n{PATH}/drm/card0/card0-VGA-1/enabled = {{}}\n"
    assert said(tmp_path, tree.format("enabled")) == ["drives the screen at card0-VGA-1"]
    assert said(tmp_path / "off", tree.format("disabled")) == []


def test_virtual_functions_would_go_with_it(tmp_path: Path) -> None:
    assert said(tmp_path, "", virtual=["0000:01:00.1"]) == ["has 1 virtual function, which would go"]


# --- disks ---


def test_a_mounted_partition(tmp_path: Path) -> None:
    tree = disk("nvme0n1", "259:0") + disk("nvme0n1p2", "259:2", f"{PATH}/nvme/nvme0/nvme0n1")
    tree += mounts("30 22 259:2 / /boot rw shared:2 - ext4 /dev/nvme0n1p2 rw")
    assert said(tmp_path, tree) == ["has the disk nvme0n1p2, which is mounted at /boot"]


def test_a_disk_that_nothing_uses(tmp_path: Path) -> None:
    assert said(tmp_path, disk("nvme0n1", "259:0") + mounts()) == []


def test_a_volume_made_of_a_volume_made_of_a_disk(tmp_path: Path) -> None:
    virtual = "sys/devices/virtual/block"
    tree = disk("sda", "8:0", f"{PATH}/ata1/block", holders="md0") + disk("md0", "9:0", virtual, holders="dm-1")
    tree += disk("dm-1", "254:1", virtual) + mounts("30 22 254:1 / /var rw - xfs /dev/mapper/vg-var rw")
    assert said(tmp_path, tree) == ["has the disk sda, part of dm-1, which is mounted at /var"]


def test_a_volume_that_is_not_mounted_may_be_a_databases(tmp_path: Path) -> None:
    tree = disk("sda", "8:0", f"{PATH}/ata1/block", holders="dm-7") + disk("dm-7", "254:7", "sys/devices/virtual/block")
    assert said(tmp_path, tree + mounts()) == ["has the disk sda, part of dm-7"]


@pytest.mark.parametrize(("above", "file"), [("loop0", "loop/backing_file"), ("zram0", "backing_dev")])
def test_a_disk_below_a_loop_or_zram_device_which_is_no_holder_of_it(tmp_path: Path, above: str, file: str) -> None:
    virtual = "sys/devices/virtual/block"
    tree = disk("nvme0n1", "259:0") + disk(above, "7:0", virtual) + f"{virtual}/{above}/{file} = /dev/nvme0n1\n"
    assert said(tmp_path, tree + mounts("30 22 7:0 / /srv rw - ext4 /dev/loop0 rw")) == [
        f"has the disk nvme0n1, part of {above}, which is mounted at /srv"
    ]


def test_the_second_disk_of_a_btrfs(tmp_path: Path) -> None:
    tree = disk("nvme1n1", "259:1") + "sys/fs/btrfs/2a94c5f4-0be6-4a0c-a1f7-dbd1a3ab8ce7/devices/nvme1n1 -> x\n"
    assert said(tmp_path, tree + mounts("30 22 0:45 / /home rw - btrfs /dev/nvme0n1 rw")) == [
        "has the disk nvme1n1, part of a mounted btrfs"
    ]


def test_btrfs_is_mounted_under_a_number_of_its_own(tmp_path: Path) -> None:
    tree = disk("nvme0n1", "259:0") + mounts("30 22 0:45 /@home /home rw - btrfs /dev/nvme0n1 rw")
    assert said(tmp_path, tree) == ["has the disk nvme0n1, which is mounted at /home"]


def test_swap(tmp_path: Path) -> None:
    swaps = (
        "proc/swaps = Filename\tType\tSize\tUsed\tPriority\\n/dev/nvme0n1 partition 8 0 -2\\n/swapfile file 8 0 -3\n"
    )
    assert said(tmp_path, disk("nvme0n1", "259:0") + mounts() + swaps) == ["has the disk nvme0n1, which is swapped to"]


def test_an_nvme_disk_that_several_controllers_lead_to(tmp_path: Path) -> None:
    subsystem = "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
    tree = disk("nvme0c1n1", "259:9") + disk("nvme0n1", "259:0", subsystem)
    tree += disk("nvme0n1p1", "259:1", f"{subsystem}/nvme0n1") + mounts("3 2 259:1 / /srv rw - ext4 /dev/nvme0n1p1 rw")
    assert said(tmp_path, tree) == ["has the disk nvme0n1p1, which is mounted at /srv"]


def test_another_functions_disk_is_not_its_own(tmp_path: Path) -> None:
    tree = disk("sdb", "8:16", "sys/devices/pci0000:00/0000:01:00.01/block")
    assert said(tmp_path, tree + mounts("3 2 8:16 / / rw - ext4 /dev/sdb rw")) == []


def test_where_mounts_cannot_be_read_every_disk_is_needed(tmp_path: Path) -> None:
    (sentence,) = said(tmp_path, disk("nvme0n1", "259:0"))
    assert sentence == "has the disk nvme0n1, and what is mounted cannot be read in /proc/1/mountinfo"


def test_garbage_among_the_mounts(tmp_path: Path) -> None:
    tree = disk("nvme0n1", "259:0") + mounts("x", "a b c d e -", "- - - - -", "30 22 259:0 / /data rw - ext4")
    assert said(tmp_path, tree) == ["has the disk nvme0n1, which is mounted at /data"]


@pytest.mark.needs("device nodes", "/dev/loop0")
def test_a_disk_that_something_has_to_itself_is_found_by_trying(tmp_path: Path) -> None:
    host = planted_host(tmp_path, function(ONE) + disk("loop0", "7:0") + "dev/loop0 b 7:0\n")
    plant(tmp_path, f"{PATH}/nvme/nvme0/loop0/subsystem -> ../../../../../../../class/block")
    assert list(busy_disks(host, found(host))) == []
    taken = os.open(tmp_path / "dev/loop0", os.O_RDONLY | os.O_EXCL)
    try:
        assert list(busy_disks(host, found(host))) == ["has the disk loop0, which something uses"]
    finally:
        os.close(taken)


# --- networks ---


def test_the_default_route(tmp_path: Path) -> None:
    sentence = "carries the default route, through eth0"
    assert said(tmp_path, interface("eth0") + routes("eth0"), net=["eth0"]) == [sentence]
    assert said(tmp_path / "other", interface("eth1") + routes("eth0"), net=["eth1"]) == []


VIRTUAL = "sys/devices/virtual/net"


def test_the_default_route_through_a_bond_with_a_vlan_in_a_bridge(tmp_path: Path) -> None:
    tree = interface("eth0", master="bond0") + interface("bond0", VIRTUAL, upper="bond0.7")
    tree += interface("bond0.7", VIRTUAL, master="br0") + interface("br0", VIRTUAL)
    assert said(tmp_path, tree + routes("br0")) == ["carries the default route, through eth0 and br0"]
    assert said(tmp_path / "other", tree + routes()) == ["has the network interface eth0, which is part of bond0"]


def test_a_port_of_open_vswitch_whose_bridge_has_the_default_route(tmp_path: Path) -> None:
    """The kernel links the port to ovs-system alone (net/openvswitch/vport-netdev.c), and br-ex to nothing."""
    tree = interface("eth0", master="ovs-system") + interface("br-ex", VIRTUAL) + interface("ovs-system", VIRTUAL)
    assert said(tmp_path, tree + routes("br-ex")) == ["has the network interface eth0, which is part of ovs-system"]


def test_a_vlan_that_is_a_port_of_a_bridge_without_any_address(tmp_path: Path) -> None:
    tree = interface("eth0", upper="eth0.5") + interface("eth0.5", VIRTUAL, master="br0") + interface("br0", VIRTUAL)
    assert said(tmp_path, tree + routes()) == ["has the network interface eth0, which is part of br0, through eth0.5"]


def test_the_routes_are_read_once_for_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, times = netdevs.routes, [0]

    def counted(host: Host) -> netdevs.Routes | None:
        times[0] += 1
        return read(host)

    monkeypatch.setattr(netdevs, "routes", counted)
    assert said(tmp_path, interface("eth0") + routes("eth9"), net=["eth0"]) == []
    assert times == [1]


def test_an_address_is_no_reason_for_a_function_that_the_configuration_names(tmp_path: Path) -> None:
    tree = interface("eth9") + routes("eth0")  # eth9 has a connected route
    host = planted_host(tmp_path, function(ONE) + tree)
    assert list(uses(host, found(host))) == ["has an address or a route of the host at the network interface eth9"]
    assert list(uses(host, found(host), named=True)) == []


def test_an_interface_of_which_another_is_made(tmp_path: Path) -> None:
    tree = interface("eth0", upper="macvlan0") + interface("macvlan0", VIRTUAL) + routes()
    assert said(tmp_path, tree) == ["has the network interface eth0, of which macvlan0 is made"]


def test_a_card_over_which_pppoe_reaches_the_network(tmp_path: Path) -> None:
    """The route leads through ppp0, which the kernel links to no card; lines as pppoe_seq_show writes them."""
    tree = interface("eth0") + interface("ppp0", VIRTUAL) + "sys/class/net/eth0/operstate = up\n"
    sessions = "proc/1/net/pppoe = Id       Address              Device\\n00000B12 00:30:88:1b:4c:2e     eth0\n"
    assert said(tmp_path, tree + routes("ppp0") + sessions) == ["carries the default route, through eth0 and PPPoE"]


def test_subfunctions_would_go_with_it(tmp_path: Path) -> None:
    assert said(tmp_path, f"{PATH}/mlx5_core.sf.2/sfnum = 88\n{PATH}/mlx5_core.eth.0/x = 1\n") == [
        "has 1 subfunction, which would go"
    ]


def test_the_default_route_of_ipv6_but_not_one_that_rejects(tmp_path: Path) -> None:
    zero = "0" * 32
    row = f"{zero} 00 {zero} 00 fe800000000000000000000000000001 00000400 00000001 00000000 {{}} {{}}"
    tree = interface("eth0") + interface("lo", "sys/devices/virtual/net") + routes()
    six = "proc/1/net/ipv6_route = " + row.format("00450003", "eth0") + "\\n" + row.format("00200200", "eth0") + "\n"
    assert said(tmp_path, tree + six) == ["carries the default route, through eth0"]
    six = "proc/1/net/ipv6_route = " + row.format("00200201", "eth0") + "\\nx y\n"
    assert said(tmp_path / "other", tree + six) == []


def test_an_interface_deep_below_its_function(tmp_path: Path) -> None:
    tree = interface("ens3", f"{PATH}/virtio0/net") + routes("ens3")
    assert said(tmp_path, tree, driver="virtio-pci", kind="020000") == ["carries the default route, through ens3"]


def test_where_routes_cannot_be_read_every_interface_is_needed(tmp_path: Path) -> None:
    (sentence,) = said(tmp_path, interface("eth0"))
    assert sentence == "has the network interface eth0, and the routes cannot be read in /proc/1/net/route"


def test_a_network_card_whose_interface_is_elsewhere(tmp_path: Path) -> None:
    (sentence,) = said(tmp_path, routes(), driver="ice", kind="020000")
    assert "a pod may have it" in sentence
    assert said(tmp_path / "bare", routes(), kind="020000") == []
    for driver in ("uio_pci_generic", "vp-vdpa", "pci-stub"):
        assert said(tmp_path / driver, routes(), driver=driver, kind="020000") == []


def test_an_adapter_that_manages_nvswitches(tmp_path: Path) -> None:
    mark = {"vpd": "x SMDL=SW_MNG"}
    why = "manages the NVSwitches between the GPUs, for Fabric Manager"
    assert said(tmp_path, "", ids="15b3:1021", kind="020700", files=mark) == [why]
    tree = function(ONE, "15b3:1021", subsystem="15b3:0087", kind="020700", files={"vpd": "x"})
    host = planted_host(tmp_path / "empty", tree)
    host.local(found(host).path / "vpd").write_bytes(b"")  # as the kernel shows it where it makes no sense of it
    assert list(uses(host, found(host))) == [why]
