from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from backends.base import (
    ALL,
    AllocationRefused,
    Device,
    Grant,
    HostPath,
    Mount,
    Node,
    PathChange,
    Resource,
    ResourceSpec,
    Uevent,
)
from backends.chardev import CharDev, CharDevOptions, CharDevResource, PathOption
from tests.backends.chardev.chardevs import chardev, known
from tests.backends.trees import plant
from tests.nodes import make_node

TTYS = "dev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\ndev/ttyUSB2 c 188:2\n"
VIDEOS = "dev/video0 c 81:0\ndev/video1 c 81:1\n"


def path(text: str, **option: Any) -> PathOption:
    return PathOption(text, **option)


def bundle(*paths: PathOption, count: int = 1, name: str = "example.com/b") -> CharDevResource:
    return Resource(name, ResourceSpec("chardev", CharDevOptions(list(paths), count)))


def found(backend: CharDev, unit: str = "bundle:example.com/b") -> list[Device]:
    assert unit in backend.units()
    return list(backend.discover(unit).devices)


def holdings(backend: CharDev) -> dict[str, str]:
    return {device.key: device.identity for device in found(backend)}


def problems(backend: CharDev, unit: str = "bundle:example.com/b") -> list[str]:
    return [problem.sentence for problem in backend.discover(unit).problems]


# --- what a bundle is ---


def test_a_bundle_is_one_device_with_all_its_nodes_and_mounts(tmp_path: Path) -> None:
    tree = TTYS + "dev/led -> ttyUSB2\netc/scanner.conf\nsys/dev/char/188:0/device/numa_node = 1"
    resource = bundle(
        path("/dev/ttyUSB0", permissions="rw"),
        path("/dev/led", permissions="r", mount_path="/dev/lights/", shared=True),
        path("/etc/scanner.conf", type="mount", mount_path="/etc/", read_only=True),
    )
    backend = chardev(tmp_path, tree, resource)
    (device,) = found(backend)
    assert device == Device(
        key="/dev/ttyUSB0",
        unit="bundle:example.com/b",
        resource="example.com/b",
        hardware=frozenset({"bundle:example.com/b//dev/ttyUSB0", "node:c:188:0"}),
        exclusive=frozenset({"node:c:188:0"}),
        depends=frozenset({"node:c:188:2", "path:/dev/ttyUSB2"}),
        identity="/dev/ttyUSB0 c:188:0 + /dev/led c:188:2 + /etc/scanner.conf",
        nodes=(
            Node(HostPath("/dev/ttyUSB0"), "/dev/ttyUSB0", "rw"),
            Node(HostPath("/dev/led"), "/dev/lights/led", "r", shared=True),
        ),
        mounts=(Mount(HostPath("/etc/scanner.conf"), "/etc/scanner.conf", read_only=True),),
        numa_node=1,
        attributes={
            "path": ("/dev/ttyUSB0", "/dev/led"),
            "name": ("ttyUSB0", "led"),
            "devname": ("ttyUSB0", "led"),
            "type": ("character", "character"),
            "major": ("188", "188"),
            "minor": ("0", "2"),
            "target": ("/dev/ttyUSB2",),
            "mount": ("/etc/scanner.conf",),
        },
    )
    edits = backend.edits(resource, [Grant("ttyUSB0", device)])
    assert (edits.nodes, edits.mounts) == (device.nodes, device.mounts)
    assert list(backend.probe(device)) == []


def test_nodes_are_paired_by_name(tmp_path: Path) -> None:
    backend = chardev(tmp_path, TTYS + VIDEOS, bundle(path("/dev/ttyUSB*"), path("/dev/video*")))
    assert holdings(backend) == {
        "/dev/ttyUSB0": "/dev/ttyUSB0 c:188:0 + /dev/video0 c:81:0",
        "/dev/ttyUSB1": "/dev/ttyUSB1 c:188:1 + /dev/video1 c:81:1",
    }
    assert problems(backend) == [
        "of /dev/ttyUSB* there are 3, of /dev/video* enough for 2: the others are in no bundle"
    ]


def test_a_node_with_a_limit_is_in_so_many_bundles(tmp_path: Path) -> None:
    resource = bundle(path("/dev/fuse", limit=2), path("/dev/ttyUSB*"), count=2)
    backend = chardev(tmp_path, TTYS + "dev/fuse c 10:229", resource)
    assert [d.exclusive for d in found(backend)] == [{"node:c:188:0"}, {"node:c:188:1"}]
    assert [d.identity for d in found(backend)] == [f"/dev/fuse c:10:229 + /dev/ttyUSB{n} c:188:{n}" for n in (0, 1)]
    ids = [list(backend.ids(resource, device)) for device in found(backend)]
    assert ids == [["ttyUSB0::0", "ttyUSB0::1"], ["ttyUSB1::0", "ttyUSB1::1"]]


def test_an_optional_path_joins_when_it_is_there(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/ttyUSB0 c 188:0", bundle(path("/dev/led", optional=True), path("/dev/ttyUSB*")))
    assert holdings(backend) == {"/dev/ttyUSB0": "/dev/ttyUSB0 c:188:0"}
    assert problems(backend) == []
    plant(tmp_path, "dev/led c 240:1")
    assert holdings(backend) == {"/dev/ttyUSB0": "/dev/led c:240:1 + /dev/ttyUSB0 c:188:0"}


def test_a_required_path_without_a_match_leaves_no_bundle_and_says_so(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/ttyUSB0 c 188:0", bundle(path("/dev/led"), path("/dev/ttyUSB*")))
    assert holdings(backend) == {}
    assert problems(backend) == [
        "/dev/led does not exist",
        "there is no bundle, because /dev/led matches no device node",
    ]


def test_other_nodes_that_come_and_go_rename_no_bundle(tmp_path: Path) -> None:
    backend = chardev(tmp_path, TTYS + VIDEOS, bundle(path("/dev/ttyUSB*"), path("/dev/video*")))
    before = holdings(backend)
    (tmp_path / "dev/ttyUSB2").unlink()
    assert holdings(backend) == before
    (tmp_path / "dev/ttyUSB0").unlink()  # this moves every pair: the name stays with its node, the identity changes
    after = holdings(backend)
    assert after == {"/dev/ttyUSB1": "/dev/ttyUSB1 c:188:1 + /dev/video0 c:81:0"}
    assert after["/dev/ttyUSB1"] != before["/dev/ttyUSB1"]


def test_a_bundle_of_plain_paths_has_fixed_ids(tmp_path: Path) -> None:
    resource = bundle(path("/dev/snd/pcmC0D0c"), path("/dev/snd/controlC0"), count=2)
    backend = chardev(tmp_path, "dev/snd/pcmC0D0c c 116:2\ndev/snd/controlC0 c 116:1", resource)
    (device,) = found(backend)
    assert list(backend.ids(resource, device)) == ["snd/pcmC0D0c::0", "snd/pcmC0D0c::1"]
    assert list(CharDev.fixed_ids(resource)) == ["snd/pcmC0D0c::0", "snd/pcmC0D0c::1"]
    assert list(CharDev.fixed_ids(bundle(path("/dev/a"), path("/dev/b*")))) == []


def test_where_every_node_has_a_limit_the_bundle_is_named_after_all_of_them(tmp_path: Path) -> None:
    resource = bundle(path("/dev/ttyUSB*", limit=2), path("/dev/video*", limit=3))
    backend = chardev(tmp_path, TTYS + VIDEOS, resource)
    assert list(holdings(backend)) == [
        "/dev/ttyUSB0+/dev/video0",
        "/dev/ttyUSB1+/dev/video1",
        "/dev/ttyUSB2+/dev/video0",
    ]


def test_two_names_of_one_node_are_one_match(tmp_path: Path) -> None:
    tree = "dev/ttyACM0 c 166:0\ndev/by-path/pci-usb-1 -> ../ttyACM0\ndev/by-path/pci-usbv2-1 -> ../ttyACM0\n" + VIDEOS
    backend = chardev(tmp_path, tree, bundle(path("/dev/by-path/*"), path("/dev/video*")))
    (device,) = found(backend)
    assert device.key == "/dev/by-path/pci-usb-1"
    assert device.attributes["alias"] == ("/dev/by-path/pci-usbv2-1",)
    plant(tmp_path, "dev/by-path/zz c 166:0")  # its own name, if that matches
    assert [device.key for device in found(backend)] == ["/dev/by-path/zz"]


def test_two_members_at_one_path_of_the_container_are_no_bundle(tmp_path: Path) -> None:
    resource = bundle(path("/dev/ttyUSB0", mount_path="/dev/x"), path("/dev/ttyUSB1", mount_path="/dev/x"))
    backend = chardev(tmp_path, TTYS, resource)
    assert found(backend) == []
    assert problems(backend) == [
        "the bundle /dev/ttyUSB0 is not offered: /dev/ttyUSB0 and /dev/ttyUSB1 would both be /dev/x in the container"
    ]


def test_two_bundles_that_collide_in_a_container_are_refused_and_what_they_share_is_given_once(tmp_path: Path) -> None:
    tree = TTYS + "dev/kvm c 10:232\netc/x/"
    free = bundle(path("/dev/ttyUSB*"), path("/dev/kvm", shared=True, limit=3), path("/etc/x", type="mount", limit=3))
    backend = chardev(tmp_path, tree, free)
    grants = [Grant(device.key, device) for device in found(backend)[:2]]
    edits = backend.edits(free, grants)
    assert [node.path.text for node in edits.nodes] == ["/dev/ttyUSB0", "/dev/kvm", "/dev/ttyUSB1"]
    assert [mount.path.text for mount in edits.mounts] == ["/etc/x"]
    fixed = bundle(path("/dev/ttyUSB*", mount_path="/dev/tty"), path("/dev/kvm", limit=3))
    backend = CharDev(backend.host, [fixed])
    with pytest.raises(AllocationRefused, match=r"example.com/b puts each device at /dev/tty: a container can"):
        backend.edits(fixed, [Grant(device.key, device) for device in found(backend)[:2]])


# --- mounts ---


def test_mounts_are_files_directories_and_sockets_anywhere(tmp_path: Path) -> None:
    tree = "srv/data/\nlib -> usr/lib\nusr/lib/x.so\nrun/log\ndev/log -> /run/log\nsrv/pool/a/\nsrv/pool/b"
    names = ("/srv/data", "/lib/x.so", "/dev/log", "/sys", "/srv/pool/*")
    for text in names:
        backend = chardev(tmp_path, tree if text == names[0] else "", bundle(path(text, type="mount")))
        keys = [text] if "*" not in text else ["/srv/pool/a", "/srv/pool/b"]
        assert [device.key for device in found(backend)] == keys
    (first, _) = found(backend)
    assert first.hardware == {"bundle:example.com/b//srv/pool/a"}
    assert first.mounts == (Mount(HostPath("/srv/pool/a"), "/srv/pool/a"),)
    assert first.numa_node is None


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ("", "/srv/x does not exist"),
        ("srv/x -> y", "/srv/x is a link to /srv/y, which does not exist"),
        ("srv/x -> y\nsrv/y -> x", "/srv/x is a loop of symbolic links"),
        ("srv -> /nowhere", "/srv/x is a link to /nowhere/x, which does not exist"),
    ],
)
def test_a_mount_that_leads_nowhere_is_a_problem(tmp_path: Path, tree: str, sentence: str) -> None:
    backend = chardev(tmp_path, tree, bundle(path("/srv/x", type="mount")))
    assert found(backend) == []
    assert problems(backend) == [sentence]


def test_a_mounts_link_is_followed_in_the_hosts_tree_and_not_in_ours(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "srv/x -> /usr/bin/env", bundle(path("/srv/x", type="mount")))  # ours has one
    assert problems(backend) == ["/srv/x is a link to /usr/bin/env, which does not exist"]


# --- bad input ---


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("dev/x", "is a plain file"),
        ("dev/x/", "is a directory"),
        ("dev/x -> x", "loop of symbolic links"),
        ("dev/x -> /etc/passwd", "leads out of /dev"),
        ("dev/x -> ../etc/passwd\netc/passwd", "leads out of /dev"),
    ],
)
def test_what_is_no_node_is_in_no_bundle(tmp_path: Path, tree: str, words: str) -> None:
    backend = chardev(tmp_path, tree + "\ndev/kvm c 10:232", bundle(path("/dev/kvm"), path("/dev/x", optional=True)))
    assert holdings(backend) == {"/dev/kvm": "/dev/kvm c:10:232"}
    (sentence,) = problems(backend)
    assert words in sentence


def test_many_wrong_entries_of_a_glob_are_counted(tmp_path: Path) -> None:
    tree = "\n".join(f"dev/x{n:02}" for n in range(20)) + "\ndev/x99 c 240:1\ndev/xdir/"
    backend = chardev(tmp_path, tree, bundle(path("/dev/x*"), path("/dev/x9*", optional=True, mount_path="/dev/y")))
    assert holdings(backend) == {"/dev/x99": "/dev/x99 c:240:1 + /dev/x99 c:240:1"}
    sentences = problems(backend)
    assert sentences[:2] == [f"/dev/x0{n} is a plain file, not a device node" for n in range(2)]
    assert sentences[5:] == ["/dev/x* matches 15 more like these"]


def test_a_glob_that_matches_too_much_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.chardev.finder.MOST_MATCHES", 3)
    monkeypatch.setattr("backends.chardev.bundles.MOST_MATCHES", 3)
    tree = "\n".join(f"srv/{n}" for n in range(9))
    backend = chardev(tmp_path, tree, bundle(path("/srv/*", type="mount")))
    assert list(holdings(backend)) == ["/srv/0", "/srv/1", "/srv/2"]
    (sentence,) = problems(backend)
    assert sentence.startswith("/srv/* matches too much: there is room for 3 entries")


def test_a_directory_that_cannot_be_listed_is_a_problem(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/serial -> /run/serial", bundle(path("/dev/serial/*"), path("/dev/kvm")))
    assert problems(backend)[0] == "/dev/serial, a link to /run/serial, leads out of /dev"


# --- shared nodes ---


def test_a_shared_node_is_not_owned_but_counts(tmp_path: Path) -> None:
    lone = bundle(path("/dev/kvm", shared=True), name="a/lone")
    both = bundle(path("/dev/kvm", shared=True), path("/dev/net/tun", shared=True), name="a/both")
    backend = chardev(tmp_path, "dev/kvm c 10:232\ndev/net/tun c 10:200", lone, both)
    (device,) = found(backend, "/dev/kvm")
    assert device.hardware == {"shared:a/lone/c:10:232"}
    assert device.depends == {"node:c:10:232"}
    assert list(backend.ids(lone, device)) == ["kvm0"]
    (device,) = found(backend, "bundle:a/both")
    assert device.hardware == {"bundle:a/both//dev/kvm"}
    assert device.depends == {"node:c:10:232", "node:c:10:200"}


def test_an_optional_single_path_is_not_missed(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", bundle(path("/dev/sev", optional=True), name="a/sev"))
    assert problems(backend, "/dev/sev") == []
    plant(tmp_path, "dev/sev")
    assert problems(backend, "/dev/sev") == ["/dev/sev is a plain file, not a device node"]


# --- health ---


def test_a_probe_tells_which_member_is_wrong(tmp_path: Path) -> None:
    resource = bundle(path("/dev/ttyUSB0"), path("/dev/ttyUSB1"), path("/srv/x", type="mount"))
    backend = chardev(tmp_path, TTYS + "srv/x/", resource)
    (device,) = found(backend)
    (tmp_path / "dev/ttyUSB1").unlink()
    hardware = "bundle:example.com/b//dev/ttyUSB0"
    assert [(s.hardware, s.reason, s.message) for s in backend.probe(device)] == [
        (hardware, "node-missing", "/dev/ttyUSB1 does not exist")
    ]
    make_node(tmp_path / "dev/ttyUSB1", "c", 188, 7)
    (tmp_path / "srv/x").rmdir()
    assert [(s.hardware, s.reason, s.message) for s in backend.probe(device)] == [
        (hardware, "node-replaced", "/dev/ttyUSB1 is another device now: c:188:7, it was c:188:1"),
        (hardware, "mount-missing", "/srv/x does not exist"),
    ]


# --- what is listened to ---


def test_any_member_that_comes_or_goes_affects_the_bundle_alone(tmp_path: Path) -> None:
    tree = TTYS + "dev/led -> ttyUSB2\ndev/kvm c 10:232"
    members = bundle(path("/dev/ttyUSB[01]"), path("/dev/led"), path("/srv/x", type="mount", optional=True))
    backend = chardev(tmp_path, tree, members, bundle(path("/dev/kvm"), name="a/kvm"))
    found = known(backend)
    for text in ("/dev/ttyUSB0", "/dev/ttyUSB1", "/dev/led", "/dev/ttyUSB2", "/srv/x"):
        for hint in (Uevent("add", "x", "/devices/x", HostPath(text)), PathChange(HostPath(text))):
            units = backend.affects(hint, found)
            assert units is not ALL
            assert set(units) == {"bundle:example.com/b"}
    for other in ("/dev/ttyUSB3", "/srv/y", "/dev/x"):
        assert backend.affects(PathChange(HostPath(other)), found) == []
    assert backend.affects(Uevent("change", "x", "/devices/x", HostPath("/dev/led")), found) == []
    assert backend.affects(Uevent("add", "net", "/devices/x"), found) == []
    assert backend.affects(PathChange(HostPath("/srv")), found) == ["bundle:example.com/b"]
    assert backend.affects(PathChange(HostPath("/dev")), found) is ALL


def test_the_directories_of_all_members_are_watched(tmp_path: Path) -> None:
    tree = "dev/cpu/0/msr\ndev/cpu/1/msr\nsrv/pool/"
    members = bundle(path("/dev/cpu/*/msr"), path("/srv/pool/x", type="mount"), path("/dev/kvm"))
    backend = chardev(tmp_path, tree, members)
    assert sorted(backend.units()) == ["bundle:/dev/cpu/0", "bundle:/dev/cpu/1", "bundle:example.com/b"]
    assert backend.watches(known(backend)).directories == {
        HostPath(text) for text in ("/dev", "/dev/cpu", "/dev/cpu/0", "/dev/cpu/1", "/srv/pool")
    }
    assert backend.affects(PathChange(HostPath("/dev/cpu/2")), known(backend)) is ALL
