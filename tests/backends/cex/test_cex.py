"""The backend `cex`: which queues a set has, how they are, what a container gets and what it sees of /sys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.inventory.inventory import Inventory
from backends.base import (
    AllocationRefused,
    Hint,
    HostPath,
    Known,
    PathChange,
    Uevent,
    Verdict,
)
from backends.cex import Apqn, Cex, queues
from backends.cex.container_files import mask
from tests.backends.cex.cex_trees import BUS, MACHINE, backend, card, devices, granted, machine, resource
from tests.backends.trees import entries, planted_host, spoilt


def unusable(found: Cex) -> dict[str, str]:
    return {device.key: device.unusable for device in devices(found)}


# --- what is found ---


def test_a_set_has_the_queues_that_it_names_as_the_peer_lists_them(tmp_path: Path) -> None:
    wanted = resource("cex.s390.ibm.com/set", (1, 6), (2, 15), (3, 0), overcommit=2)
    found, _ = backend(tmp_path, machine(range(16)), wanted)
    first, second = devices(found)
    assert found.ids(wanted, first) == ("apqn-1-6-0", "apqn-1-6-1")
    assert found.ids(wanted, second) == ("apqn-2-15-0", "apqn-2-15-1")
    assert (first.unit, {*first.hardware}, {*first.depends}) == ("card01", {"ap:01.0006"}, {"ap:card01"})
    assert first.attributes["mode"] == ("ep11",)
    assert [*found.probe(first)] == []
    assert len(found.discover("card01").beside) == 15


@pytest.mark.parametrize(
    ("options", "first", "second"),
    [
        ({"mode": "ep11"}, "", "its card is in mode cca, not ep11"),
        ({"min_generation": 8}, "", "its card is a CEX7C, older than generation 8"),
        ({"min_generation": 7, "mode": "cca"}, "its card is in mode ep11, not cca", ""),
        (
            {"min_generation": 10},
            "its card is a CEX8P, older than generation 10",
            "its card is a CEX7C, older than generation 10",
        ),
    ],
)
def test_mode_and_generation_are_enforced_by_number(tmp_path: Path, options: Any, first: str, second: str) -> None:
    found, _ = backend(tmp_path, machine(), resource("a.com/set", (1, 6), (2, 6), **options))
    assert unusable(found) == {"apqn-1-6": first, "apqn-2-6": second}


def test_the_tenth_generation_is_newer_than_the_eighth(tmp_path: Path) -> None:
    found, _ = backend(tmp_path, BUS + card(1, "CEX10P"), resource("a.com/set", (1, 6), min_generation=8))
    assert unusable(found) == {"apqn-1-6": ""}


@pytest.mark.parametrize(("named", "there"), [(None, True), (MACHINE, True), ("IBM-3931-1", False)])
def test_a_queue_may_be_meant_on_one_machine_alone(tmp_path: Path, named: str | None, there: bool) -> None:
    found, _ = backend(tmp_path, machine(), resource("a.com/set", Apqn(1, 6, named)))
    assert bool(devices(found)) == there


@pytest.mark.parametrize("sysinfo", ["", "Manufacturer: IBM\nLPAR Type: 7\nSequence Code: 1\n", "\0"])
def test_a_machine_that_does_not_say_which_it_is_is_no_machine(tmp_path: Path, sysinfo: str) -> None:
    host = planted_host(tmp_path)
    (tmp_path / "proc/sysinfo").write_text(sysinfo)
    assert queues.machine_id(host) is None


def test_a_queue_of_two_sets_is_the_first_ones_and_the_others_go_on(tmp_path: Path) -> None:
    """The peer withdraws all sets then."""
    one, other = resource("a.com/one", (1, 6), (1, 7)), resource("a.com/other", (1, 6), (2, 7))
    found, _ = backend(tmp_path, machine(), one, other)
    inventory = Inventory((one, other), {"cex": found})
    inventory.update("cex", {unit: found.discover(unit).devices for unit in found.units()})
    assert {name: sorted(inventory.slots(name)) for name in inventory.names()} == {
        "a.com/one": ["apqn-1-6-0", "apqn-1-7-0"],
        "a.com/other": ["apqn-2-7-0"],
    }


@pytest.mark.parametrize(
    ("tree", "why"),
    [
        (BUS + card(1, "CEX8P", driver="vfio_ap"), "it is on vfio_ap, not on cex4queue"),
        (BUS + card(1, "CEX8X"), "its card is of a type that is not known: CEX8X"),
        (BUS + card(1, "CEX8P").replace("queue -> ", "x -> ").replace("driver ->", "was ->"), "it is on no driver"),
        (BUS.replace("sys/class/zcrypt", "sys/class/other") + card(1, "CEX8P"), "the kernel can make no zcrypt nodes"),
    ],
)
def test_what_cannot_be_had_says_why(tmp_path: Path, tree: str, why: str) -> None:
    found, _ = backend(tmp_path, tree)
    assert unusable(found)["apqn-1-6"].startswith(why)


def test_a_card_of_an_unknown_type_ends_the_look_at_no_other(tmp_path: Path) -> None:
    found, _ = backend(tmp_path, BUS + card(1, "?") + card(2, "CEX7C"), resource("a.com/set", (1, 6), (2, 6)))
    assert [problem.subject for problem in found.discover("card01").problems] == ["card01"]
    assert unusable(found)["apqn-2-6"] == ""


def test_a_card_that_comes_back_in_another_mode_is_another_device(tmp_path: Path) -> None:
    found, _ = backend(tmp_path, machine())
    (before,) = devices(found)
    (tmp_path / "sys/devices/ap/card01/type").write_text("CEX8C\n")
    (after,) = devices(found)
    assert (before.key, before.hardware) == (after.key, after.hardware)
    assert before.identity != after.identity


# --- how it is ---


@pytest.mark.parametrize(
    ("file", "said", "reason"),
    [
        ("card01/01.0006/online", "0", "offline"),
        ("card01/01.0006/config", "0", "deconfigured"),
        ("card01/01.0006/chkstop", "1", "checkstop"),
        ("card01/online", "0", "offline"),
        ("card01/config", "0", "deconfigured"),
        ("card01/chkstop", "1", "checkstop"),
    ],
)
def test_a_queue_is_as_well_as_it_and_its_card_say(tmp_path: Path, file: str, said: str, reason: str) -> None:
    found, _ = backend(tmp_path, machine())
    (device,) = devices(found)
    (tmp_path / "sys/devices/ap" / file).write_text(f"{said}\n")
    name = Path(file).parent.name
    assert [(s.hardware, s.reason, s.verdict) for s in found.probe(device)] == [(f"ap:{name}", reason, Verdict.NOW)]
    (tmp_path / "sys/devices/ap" / file).unlink()  # as older kernels have it
    assert [*found.probe(device)] == []


def test_garbage_in_sysfs_raises_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("tree")
    found, _ = backend(root, BUS + card(1, "CEX8P", [6]) + card(2, "CEX7C", [6]), resource("a.com/set", (1, 6), (2, 6)))
    files = [path for path in entries(root) if "zcrypt" not in path.parts]

    @settings(max_examples=60)
    @given(st.integers(0, 1 << 16), st.sampled_from([0.05, 0.3, 0.8]))
    def check(seed: int, share: float) -> None:
        with spoilt(root, files, seed, share):
            for device in devices(found):
                assert all(signal.hardware in device.hardware | device.depends for signal in found.probe(device))
                if not device.unusable:
                    try:
                        found.claim(found.resources[0], granted(found, found.resources[0], f"{device.key}-0"))
                    except AllocationRefused as error:
                        assert "cannot be read" in error.sentence  # noqa: PT017  # it may also be granted

    check()


# --- what a container gets ---


def shown(root: Path) -> dict[str, str]:
    """Each file and link of a shadow of /sys, and what is in it."""
    return {
        path.relative_to(root).as_posix(): f"-> {path.readlink()}" if path.is_symlink() else path.read_text()
        for path in entries(root)
    }


BIT_1, BIT_6, NONE, ALL = f"0x4{'0' * 63}", f"0x02{'0' * 62}", f"0x{'0' * 64}", f"0x{'f' * 64}"
STATIC = {
    "bus/ap/ap_interrupts": "1\n",
    "bus/ap/ap_max_domain_id": "84\n",
    "bus/ap/ap_max_adapter_id": "63\n",
    "bus/ap/poll_thread": "0\n",
    "bus/ap/poll_timeout": "1500000\n",
    "bus/ap/ap_adapter_mask": f"{BIT_1}\n",
    "bus/ap/ap_usage_domain_mask": f"{BIT_6}\n",
    "bus/ap/ap_control_domain_mask": f"{NONE}\n",
    "bus/ap/ap_domain": "6\n",
    "bus/ap/apmask": f"{ALL}\n",
    "bus/ap/aqmask": f"{ALL}\n",
    "bus/ap/devices/card01": "-> ../../../devices/ap/card01",
    "bus/ap/devices/01.0006": "-> ../../../devices/ap/card01/01.0006",
    "bus/ap/drivers/cex4card/card01": "-> ../../../../devices/ap/card01",
    "bus/ap/drivers/cex4queue/01.0006": "-> ../../../../devices/ap/card01/01.0006",
    "devices/ap/card01/ap_functions": "0x92800000\n",
    "devices/ap/card01/depth": "8\n",
    "devices/ap/card01/hwtype": "14\n",
    "devices/ap/card01/raw_hwtype": "14\n",
    "devices/ap/card01/type": "CEX8P\n",
    "devices/ap/card01/serialnr": "93AACP01\n",
    "devices/ap/card01/load": "0\n",
    "devices/ap/card01/online": "1\n",
    "devices/ap/card01/pendingq_count": "0\n",
    "devices/ap/card01/request_count": "0\n",
    "devices/ap/card01/requestq_count": "0\n",
    "devices/ap/card01/driver": "-> ../../../bus/ap/drivers/cex4card",
    "devices/ap/card01/subsystem": "-> ../../../bus/ap",
    "devices/ap/card01/01.0006/interrupt": "Interrupts enabled.\n",
    "devices/ap/card01/01.0006/reset": "No reset operation.\n",
    "devices/ap/card01/01.0006/load": "0\n",
    "devices/ap/card01/01.0006/online": "1\n",
    "devices/ap/card01/01.0006/pendingq_count": "0\n",
    "devices/ap/card01/01.0006/request_count": "0\n",
    "devices/ap/card01/01.0006/requestq_count": "0\n",
    "devices/ap/card01/01.0006/driver": "-> ../../../../bus/ap/drivers/cex4queue",
    "devices/ap/card01/01.0006/subsystem": "-> ../../../../bus/ap",
}
LIVE = {
    f"devices/ap/card01/{name}": f"-> 01.0006/{name}"
    for name in ("online", "pendingq_count", "request_count", "requestq_count")
}
BASE = "/run/fairlead/shadowsysfs/sysfs-apqn-1-6-0"


@pytest.mark.parametrize("live", [False, True])
def test_a_container_gets_a_node_for_its_queue_and_a_sysfs_that_shows_it_alone(tmp_path: Path, live: bool) -> None:
    wanted = resource(live_sysfs=live)
    found, kernel = backend(tmp_path, machine(), wanted)
    grants = granted(found, wanted, "apqn-1-6-0")
    umask = os.umask(0o077)
    try:
        found.claim(wanted, grants)
    finally:
        os.umask(umask)
    edits = found.edits(wanted, grants)
    assert [(str(n.path), n.container_path, n.permissions) for n in edits.nodes] == [
        ("/dev/zcrypt-apqn-1-6-0", "/dev/z90crypt", "rw")
    ]
    real = [("/sys/devices/ap/card01/01.0006", "/sys/bus/ap/devices/01.0006", True)]
    assert [(str(m.path), m.container_path, m.read_only) for m in edits.mounts] == [
        (f"{BASE}/bus/ap", "/sys/bus/ap", True),
        (f"{BASE}/devices/ap", "/sys/devices/ap", True),
        *(real if live else []),
    ]
    assert edits.env == {}
    assert shown(tmp_path / BASE[1:]) == (STATIC | LIVE if live else STATIC)
    modes = {
        path.stat().st_mode & 0o777
        for path in (tmp_path / BASE[1:]).rglob("*")
        if path.is_file() and not path.is_symlink()
    }
    assert modes == {0o444}
    assert (tmp_path / BASE[1:] / "bus/ap").stat().st_mode & 0o777 == 0o755
    assert kernel.nodes == {"zcrypt-apqn-1-6-0": (BIT_1, BIT_6, ALL)}
    assert (tmp_path / "dev/zcrypt-apqn-1-6-0").stat().st_mode & 0o777 == 0o666


def test_a_container_that_runs_sees_what_is_new_in_the_shadow_it_has_mounted(tmp_path: Path) -> None:
    """What it has was there before Fairlead was started again, or its container was."""
    found, _ = backend(tmp_path, machine())
    wanted = found.resources[0]
    found.claim(wanted, granted(found, wanted, "apqn-1-6-0"))
    bus = tmp_path / BASE[1:] / "bus/ap"
    mounted = os.open(bus, os.O_PATH)
    try:
        before = (bus / "poll_thread").stat().st_ino
        (bus / ".poll_thread.new").touch()  # where we were killed
        (tmp_path / "sys/bus/ap/ap_interrupts").write_text("0\n")
        found.claim(wanted, granted(found, wanted, "apqn-1-6-0"))
        assert Path(f"/proc/self/fd/{mounted}/ap_interrupts").read_text() == "0\n"
        assert (bus / "poll_thread").stat().st_ino == before
    finally:
        os.close(mounted)
    assert shown(tmp_path / BASE[1:]) == STATIC | LIVE | {"bus/ap/ap_interrupts": "0\n"}


@pytest.mark.parametrize(
    "missing", ["bus/ap/poll_thread", "devices/ap/card01/hwtype", "devices/ap/card01/01.0006/reset"]
)
def test_without_a_file_that_tools_need_nothing_is_made(tmp_path: Path, missing: str) -> None:
    found, kernel = backend(tmp_path, machine())
    (tmp_path / "sys" / missing).unlink()
    with pytest.raises(AllocationRefused, match=f"/sys/{missing} cannot be read"):
        found.claim(found.resources[0], granted(found, found.resources[0], "apqn-1-6-0"))
    assert kernel.nodes == {}
    assert not (tmp_path / BASE[1:]).exists()


def test_a_container_cannot_have_two_queues(tmp_path: Path) -> None:
    wanted = resource("a.com/set", (1, 6), (1, 7))
    found, kernel = backend(tmp_path, machine(), wanted)
    grants = granted(found, wanted, "apqn-1-6-0", "apqn-1-7-0")
    for refused in (found.claim, found.edits):
        with pytest.raises(AllocationRefused, match=r"one a\.com/set at most"):
            refused(wanted, grants)
    assert kernel.nodes == {}


@given(st.integers(0, 255))
def test_a_mask_has_one_bit_counted_from_the_left(bit: int) -> None:
    text = mask(bit)
    assert len(text) == 66
    assert bytes.fromhex(text[2:])[bit // 8] == 0x80 >> bit % 8
    assert int(text, 16).bit_count() == 1


# --- events ---


@pytest.mark.parametrize(
    ("hint", "units"),
    [
        (Uevent("change", "ap", "/devices/ap/card01/01.0006", None, {"ONLINE": "0"}), ["card01"]),
        (Uevent("add", "ap", "/devices/ap/card0a"), ["card0a"]),
        (Uevent("change", "ap", "/devices/ap", None, {"INITSCAN": "done"}), []),
        (Uevent("add", "pci", "/devices/pci0000:00/0000:00:00.0"), []),
        (PathChange(HostPath("/dev/z90crypt")), []),
    ],
)
def test_an_event_is_about_a_card(tmp_path: Path, hint: Hint, units: list[str]) -> None:
    found, _ = backend(tmp_path, machine())
    affected = found.affects(hint, Known())
    assert isinstance(affected, tuple)
    assert list(affected) == units
