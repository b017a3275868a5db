from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import (
    ALL,
    ANY_SUBSYSTEM,
    AllocationRefused,
    Device,
    Grant,
    Hint,
    Host,
    HostPath,
    Node,
    PathChange,
    Resource,
    ResourceSpec,
    Uevent,
)
from backends.chardev import CharDev, CharDevOptions, CharDevResource, PathOption
from backends.interface.values import Known
from tests.backends.chardev.chardevs import chardev, configured, known, only, problems, refused
from tests.backends.trees import plant, planted_host
from tests.nodes import make_node

CGROUP_2 = "sys/fs/cgroup/cgroup.controllers = cpuset cpu io memory\n"


def resource(path: str, name: str = "example.com/x", count: int = 1, **option: Any) -> CharDevResource:
    return Resource(name, ResourceSpec("chardev", CharDevOptions([PathOption(path, **option)], count)))


def event(path: str, action: str = "add") -> Uevent:
    return Uevent(action, "misc", "/devices/virtual/misc/x", HostPath(path))


def affected(backend: CharDev, hint: Hint, what: Known | None = None) -> set[str]:
    units = backend.affects(hint, what or Known())
    assert units is not ALL
    return set(units)


# --- what is there ---


def test_a_node_is_a_device(tmp_path: Path) -> None:
    tree = CGROUP_2 + "dev/net/tun c 10:200\nsys/dev/char/10:200/device/numa_node = 1"
    backend = chardev(tmp_path, tree, resource("/dev/net/tun", "devices.kubevirt.io/tun"))
    assert only(backend, "/dev/net/tun") == Device(
        key="/dev/net/tun",
        unit="/dev/net/tun",
        resource="devices.kubevirt.io/tun",
        hardware=frozenset({"node:c:10:200"}),
        exclusive=frozenset({"node:c:10:200"}),
        identity="c:10:200",
        nodes=(Node(HostPath("/dev/net/tun"), "/dev/net/tun", "rwm"),),
        numa_node=1,
        attributes={
            "path": ("/dev/net/tun",),
            "name": ("tun",),
            "devname": ("net/tun",),
            "type": ("character",),
            "major": ("10",),
            "minor": ("200",),
        },
    )


def test_a_block_device_is_one_too(tmp_path: Path) -> None:
    device = only(chardev(tmp_path, "dev/loop0 b 7:0", resource("/dev/loop0")), "/dev/loop0")
    assert device.hardware == {"node:b:7:0"}
    assert device.attributes["type"] == ("block",)


@pytest.mark.parametrize(
    ("tree", "option", "node"),
    [
        ("", {}, Node(HostPath("/dev/kvm"), "/dev/kvm", "rw")),
        (CGROUP_2, {}, Node(HostPath("/dev/kvm"), "/dev/kvm", "rwm")),
        (CGROUP_2, {"permissions": "r"}, Node(HostPath("/dev/kvm"), "/dev/kvm", "r")),
        ("", {"mount_path": "/dev/virt"}, Node(HostPath("/dev/kvm"), "/dev/virt", "rw")),
        ("", {"mount_path": "/dev/virt/"}, Node(HostPath("/dev/kvm"), "/dev/virt/kvm", "rw")),
    ],
)
def test_the_container_gets_it_as_the_options_say(
    tmp_path: Path, tree: str, option: dict[str, Any], node: Node
) -> None:
    backend = chardev(tmp_path, tree + "dev/kvm c 10:232", resource("/dev/kvm", **option))
    assert only(backend, "/dev/kvm").nodes == (node,)


def test_paths_are_units_there_or_not_and_globs_are_what_they_match(tmp_path: Path) -> None:
    tree = "dev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\ndev/ttyUSBdir/\ndev/kvm c 10:232"
    backend = chardev(tmp_path, tree, resource("/dev/sev"), resource("/dev/ttyUSB*"), resource("/dev/ttyUSB1"))
    assert sorted(backend.units()) == ["/dev/sev", "/dev/ttyUSB0", "/dev/ttyUSB1", "/dev/ttyUSBdir"]


def test_two_resources_that_name_one_node_have_a_device_each_of_the_same_hardware(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/kvm c 10:232", resource("/dev/kvm", "a/one"), resource("/dev/k*", "a/two"))
    one, two = backend.discover("/dev/kvm").devices
    assert (one.resource, two.resource) == ("a/one", "a/two")
    assert one.hardware == two.hardware


def test_a_link_is_a_device_of_its_own_name_that_depends_on_where_it_leads(tmp_path: Path) -> None:
    tree = "dev/ttyUSB0 c 188:0\ndev/serial/by-id/stick -> ../../ttyUSB0"
    backend = chardev(tmp_path, tree, resource("/dev/serial/by-id/*"))
    device = only(backend, "/dev/serial/by-id/stick")
    assert device.hardware == {"node:c:188:0"}
    assert device.depends == {"path:/dev/ttyUSB0"}
    assert device.attributes["target"] == ("/dev/ttyUSB0",)
    assert device.nodes[0].path == HostPath("/dev/serial/by-id/stick")


def test_a_glob_that_takes_a_node_and_its_alias_offers_it_once(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/ttyUSB0 c 188:0\ndev/ttyUSB_modem -> ttyUSB0", resource("/dev/ttyUSB*"))
    assert [d.key for unit in backend.units() for d in backend.discover(unit).devices] == ["/dev/ttyUSB0"]


def test_a_pattern_chooses_among_what_a_glob_matches_by_the_path_below_dev(tmp_path: Path) -> None:
    tree = "dev/video0 c 81:0\ndev/video12 c 81:1\ndev/video0-raw c 81:2\ndev/v4l/video7 c 81:3"
    wanted = [{"path": path, "pattern": "^(v4l/)?video[0-9]+$"} for path in ("/dev/*", "/dev/*/*")]
    backend = chardev(tmp_path, tree, configured(groups=[{"paths": [path]} for path in wanted]))
    found = {d.key for unit in backend.units() for d in backend.discover(unit).devices}
    assert found == {"/dev/video0", "/dev/video12", "/dev/v4l/video7"}
    assert affected(backend, event("/dev/video0")) == {"/dev/video0"}
    assert affected(backend, event("/dev/video0-raw")) == set()
    assert refused(resource("/dev/*", pattern="(")).path == ("paths", 0, "pattern")
    assert refused(resource("/dev/null", pattern="n")).path == ("paths", 0, "pattern")
    assert "(?!0" in str(refused(resource("/dev/video*", pattern="video(?!0$)")))


def test_no_name_of_a_node_keeps_a_pattern_long(tmp_path: Path) -> None:
    name = "a" * 200 + "!"
    backend = chardev(tmp_path, f"dev/{name} c 81:0", configured(paths=[{"path": "/dev/*", "pattern": "^((a+)+|b)$"}]))
    assert list(backend.units()) == []  # `re` would be looking for it still
    assert affected(backend, event(f"/dev/{name}")) == set()


def test_a_path_that_is_absent_is_missed_and_a_globs_match_is_not(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource("/dev/sev"), resource("/dev/ttyUSB*"))
    assert problems(backend, "/dev/sev") == ["/dev/sev does not exist"]
    assert problems(backend, "/dev/ttyUSB7") == []
    assert problems(backend, "/dev/nobodys") == []


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ("dev/x", "is a plain file"),
        ("dev/x -> y", "which does not exist"),
    ],
)
@pytest.mark.parametrize("path", ["/dev/x", "/dev/[x]"])
def test_what_is_no_node_is_a_problem_with_a_sentence(tmp_path: Path, tree: str, words: str, path: str) -> None:
    (sentence,) = problems(chardev(tmp_path, tree, resource(path)), "/dev/x")
    assert sentence.startswith("/dev/x")
    assert words in sentence


def test_a_directory_that_cannot_be_listed_is_a_problem(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/serial -> /run/serial", resource("/dev/serial/by-id/*"))
    assert list(backend.units()) == ["/dev/serial/by-id"]
    assert problems(backend, "/dev/serial/by-id") == [
        "/dev/serial/by-id, a link to /run/serial/by-id, leads out of /dev"
    ]


def test_a_glob_that_matches_too_much_is_cut_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("finder", "nodes"):
        monkeypatch.setattr(f"backends.chardev.{module}.MOST_MATCHES", 4)
    tree = "\n".join(f"dev/x{n}" for n in range(9))
    backend = chardev(tmp_path, tree, resource("/dev/kvm"), resource("/dev/x*"))
    assert list(backend.units()) == ["/dev/kvm", "/dev/x0", "/dev/x1", "/dev/x2", "/dev/x*"]
    (sentence,) = problems(backend, "/dev/x*")
    assert sentence.startswith("/dev/x* matches too much: there is room for 4 entries")
    found = known(backend)
    for hint in (event("/dev/x7"), PathChange(HostPath("/dev/x7"))):
        assert affected(backend, hint, found) == set()  # it is left out, and looked for only with all the others
    assert affected(backend, event("/dev/x2"), found) == {"/dev/x2"}
    for n in range(3, 9):
        (tmp_path / f"dev/x{n}").unlink()
    assert problems(backend, "/dev/x*") == []
    found = known(backend)
    assert len(found) == 4
    assert backend.affects(event("/dev/x3"), found) is ALL  # one too many: a full look will say so


def test_a_match_whose_name_cannot_be_printed_is_left_out_and_said_so_until_it_has_another(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/x1", resource("/dev/x*"))
    assert problems(backend, "/dev/x*") == []
    names = [tmp_path / "dev" / os.fsdecode(name) for name in (b"x\xff", b"x\n2")]
    for name in names:
        name.touch()
    assert list(backend.units()) == ["/dev/x1", "/dev/x*"]
    (sentence,) = problems(backend, "/dev/x*")
    assert sentence.startswith(
        "/dev/x* matches /dev/x\\n2 (and 1 more), which is left out: a name that cannot be printed"
    )
    assert affected(backend, PathChange(HostPath("/dev/x\n2")), known(backend)) == {"/dev/x*"}
    for name in names:
        name.unlink()
    assert problems(backend, "/dev/x*") == []
    assert list(backend.units()) == ["/dev/x1"]


# --- IDs and edits ---


@pytest.mark.parametrize(
    ("path", "count", "ids"),
    [
        ("/dev/net/tun", 1, ["tun0"]),
        ("/dev/net/tun", 3, ["tun0", "tun1", "tun2"]),
        ("/dev/net/*", 1, ["net/tun"]),
        ("/dev/net/*", 2, ["net/tun::0", "net/tun::1"]),
    ],
)
def test_ids_are_kubevirts_for_a_path_and_the_path_below_dev_for_a_glob(
    tmp_path: Path, path: str, count: int, ids: list[str]
) -> None:
    found = resource(path, count=count)
    backend = chardev(tmp_path, "dev/net/tun c 10:200", found)
    assert list(backend.ids(found, only(backend, "/dev/net/tun"))) == ids
    assert list(CharDev.fixed_ids(found)) == ([] if "*" in path else ids)


NODE_NAMES = st.lists(st.text("ab_:-0", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@given(st.sets(NODE_NAMES, min_size=1, max_size=8), st.integers(1, 12))
def test_no_two_slots_of_a_resource_have_one_id(names: set[str], count: int) -> None:
    found = resource("/dev/*", count=count)
    backend = CharDev(Host(), [found])
    devices = [Device(key=f"/dev/{n}", unit=f"/dev/{n}", hardware=frozenset({n})) for n in names]
    ids = [device_id for device in devices for device_id in backend.ids(found, device)]
    assert len(set(ids)) == len(ids) == len(names) * count


def test_the_tokens_of_one_node_give_it_once_and_nodes_come_in_the_order_of_the_grants(tmp_path: Path) -> None:
    found = resource("/dev/tty*", count=2, permissions="rw")
    backend = chardev(tmp_path, "dev/ttyS1 c 4:65\ndev/ttyS0 c 4:64", found)
    zero, one = only(backend, "/dev/ttyS0"), only(backend, "/dev/ttyS1")
    grants = [Grant("ttyS0::0", zero), Grant("ttyS0::1", zero), Grant("ttyS1::0", one)]
    edits = backend.edits(found, grants)
    assert edits.nodes == (*zero.nodes, *one.nodes)
    assert edits.merge() == edits


def test_two_nodes_at_one_path_of_the_container_are_refused(tmp_path: Path) -> None:
    found = resource("/dev/tty*", "a/modem", mount_path="/dev/modem")
    backend = chardev(tmp_path, "dev/ttyS1 c 4:65\ndev/ttyS0 c 4:64", found)
    grants = [Grant(name, only(backend, f"/dev/{name}")) for name in ("ttyS0", "ttyS1")]
    assert backend.edits(found, grants[:1]).nodes[0].container_path == "/dev/modem"
    with pytest.raises(AllocationRefused, match="a/modem puts each device at /dev/modem"):
        backend.edits(found, grants)


# --- what is listened to ---


def test_the_directories_of_all_paths_are_watched_there_or_not(tmp_path: Path) -> None:
    backend = chardev(
        tmp_path, "", resource("/dev/net/tun"), resource("/dev/serial/by-id/*"), resource("/dev/cpu/*/msr")
    )
    watches = backend.watches(Known())
    assert watches.subsystems == {ANY_SUBSYSTEM}
    assert watches.directories == {HostPath("/dev/net"), HostPath("/dev/serial/by-id"), HostPath("/dev/cpu")}


def test_directories_that_wildcards_take_are_watched_too(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/a/1/x/n\ndev/a/2/\ndev/b/1/x/n", resource("/dev/a/*/x/*"))
    assert backend.watches(known(backend)).directories == {
        HostPath(f"/dev/a{below}") for below in ("", "/1", "/1/x", "/2")
    }


def test_an_event_affects_the_path_it_names_if_a_resource_takes_it(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource("/dev/kvm"), resource("/dev/ttyUSB*"))
    for path in ("/dev/kvm", "/dev/ttyUSB3"):
        for hint in (event(path), event(path, "remove"), PathChange(HostPath(path))):
            assert affected(backend, hint) == {path}
    for path in ("/dev/ttyS0", "/dev/tty/x", "/dev/net/kvm"):
        for hint in (event(path), PathChange(HostPath(path))):
            assert affected(backend, hint) == set()


def test_events_without_a_node_and_changes_of_a_node_affect_nothing(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource("/dev/kvm"))
    assert affected(backend, Uevent("add", "net", "/devices/virtual/net/tap0")) == set()
    assert affected(backend, event("/dev/kvm", "change")) == set()


def test_an_event_of_a_node_affects_the_links_to_it(tmp_path: Path) -> None:
    tree = "dev/ttyUSB0 c 188:0\ndev/ttyUSB1 c 188:1\ndev/by-id/a -> ../b\ndev/b -> ttyUSB0"
    backend = chardev(tmp_path, tree, resource("/dev/by-id/*"))
    found = known(backend)
    assert affected(backend, event("/dev/ttyUSB0", "remove"), found) == {"/dev/by-id/a"}
    assert affected(backend, PathChange(HostPath("/dev/b")), found) == {"/dev/by-id/a"}
    assert affected(backend, event("/dev/ttyUSB1"), found) == set()


def test_a_directory_that_comes_or_goes_affects_what_is_below(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "", resource("/dev/net/tun"), resource("/dev/serial/by-id/*"))
    assert affected(backend, PathChange(HostPath("/dev/net"))) == {"/dev/net/tun"}
    for path in ("/dev", "/dev/serial", "/dev/serial/by-id"):
        assert backend.affects(PathChange(HostPath(path)), Known()) is ALL


FILES = st.sets(
    st.lists(st.sampled_from(["a", "ab", "b", ".a", "a1"]), min_size=1, max_size=3).map("/".join), max_size=6
)
PATHS = st.lists(st.sampled_from(["a", "ab", "a*", "*", "?", "[ab]*", ".*"]), min_size=1, max_size=3).map("/".join)


@settings(max_examples=60, deadline=None)
@given(FILES, st.lists(PATHS, min_size=1, max_size=3))
def test_a_hint_about_a_listed_unit_always_affects_it(files: set[str], paths: list[str]) -> None:
    with tempfile.TemporaryDirectory() as root:
        host = planted_host(Path(root))
        for file in sorted(files):
            if not any(other.startswith(f"{file}/") or file.startswith(f"{other}/") for other in files):
                plant(Path(root), f"dev/{file}")
        backend = CharDev(host, [resource(f"/dev/{path}", f"a/{n}") for n, path in enumerate(paths)])
        units = list(backend.units())
    for unit in units:
        told = backend.affects(PathChange(HostPath(unit)), Known())
        assert told is ALL or unit in told
        if unit.removeprefix("/dev/") in files:
            assert unit in affected(backend, event(unit))


# --- health ---


def reasons(backend: CharDev, device: Device) -> list[tuple[str, str, str]]:
    return [(s.hardware, s.reason, s.message) for s in backend.probe(device)]


def test_a_probe_tells_a_node_that_is_missing_or_another(tmp_path: Path) -> None:
    backend = chardev(tmp_path, "dev/x c 240:1", resource("/dev/x"))
    device, node = only(backend, "/dev/x"), tmp_path / "dev/x"
    assert reasons(backend, device) == []
    node.unlink()
    assert reasons(backend, device) == [("node:c:240:1", "node-missing", "/dev/x does not exist")]
    make_node(node, "c", 240, 2)
    message = "/dev/x is another device now: c:240:2, it was c:240:1"
    assert reasons(backend, device) == [("node:c:240:1", "node-replaced", message)]
    node.unlink()
    make_node(node, "b", 240, 1)
    assert [reason for _, reason, _ in reasons(backend, device)] == ["node-replaced"]
    node.unlink()
    node.touch()
    message = "/dev/x is a plain file, not a device node"
    assert reasons(backend, device) == [("node:c:240:1", "node-replaced", message)]
    node.unlink()
    make_node(node, "c", 240, 1)
    assert reasons(backend, device) == []


# --- the real /dev ---


def test_the_machines_own_null_device_is_found() -> None:
    backend = CharDev(Host(), [resource("/dev/null"), resource("/dev/nul[l]", "a/glob", permissions="r")])
    assert list(backend.units()) == ["/dev/null"]
    literal, globbed = backend.discover("/dev/null").devices
    assert literal.identity == globbed.identity == "c:1:3"
    assert literal.numa_node is None
    expected = "rwm" if Path("/sys/fs/cgroup/cgroup.controllers").exists() else "rw"
    assert [literal.nodes[0].permissions, globbed.nodes[0].permissions] == [expected, "r"]
    assert not [*backend.probe(literal)]


@pytest.mark.needs("/dev/loop0")
def test_the_machines_own_loop_device_is_found() -> None:
    device = only(CharDev(Host(), [resource("/dev/loop*")]), "/dev/loop0")
    assert device.identity == "b:7:0"
