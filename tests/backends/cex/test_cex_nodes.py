"""The backend `cex` makes zcrypt nodes for pods and destroys them, and only them, with a kernel that acts."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.base import AllocationRefused, Host, HostPath, Released
from backends.cex import Cex, CexResource
from backends.cex.container_files import EVERYTHING, mask
from backends.linux.kernel import Kernel
from tests.backends.cex.cex_trees import BUS, backend, card, granted, machine, resource
from tests.backends.crashes import Crash

SHARED = resource("cex.s390.ibm.com/set", (1, 6), (1, 7), overcommit=3)
RIGHT = mask(1), mask(6), EVERYTHING
NODE = "zcrypt-apqn-1-6-0"


def claim(found: Cex, wanted: CexResource, device_id: str) -> None:
    found.claim(wanted, granted(found, wanted, device_id))


def release(found: Cex, *ids: str, idle: frozenset[str] = frozenset()) -> None:
    found.release([Released("cex.s390.ibm.com/set", one, frozenset({"ap:01.0006"})) for one in ids], idle)


def trees(root: Path) -> set[str]:
    return {path.name for path in root.glob("run/fairlead/shadowsysfs/*")}


def test_the_end_of_one_container_leaves_the_nodes_of_others_on_its_queue(tmp_path: Path) -> None:
    found, kernel = backend(tmp_path, machine(), SHARED)
    claim(found, SHARED, "apqn-1-6-0")
    claim(found, SHARED, "apqn-1-6-2")
    kernel.create("zcrypt-apqn-1-6-1")  # of whoever
    release(found, "apqn-1-6-0")
    release(found, "apqn-1-6-0", "made-up", "../../etc")
    assert kernel.nodes.keys() == {"zcrypt-apqn-1-6-1", "zcrypt-apqn-1-6-2"}
    assert trees(tmp_path) == {"sysfs-apqn-1-6-2"}


def test_a_node_that_is_open_is_destroyed_once_it_is_closed(tmp_path: Path) -> None:
    found, kernel = backend(tmp_path, machine())
    claim(found, found.resources[0], "apqn-1-6-0")
    kernel.open = {NODE}
    with pytest.raises(ExceptionGroup) as raised:
        release(found, "apqn-1-6-0")
    assert str(raised.value.exceptions[0]) == f"/dev/{NODE} cannot be destroyed: it is still open"
    assert trees(tmp_path) == {"sysfs-apqn-1-6-0"}
    kernel.open.clear()
    release(Cex(found.host, (), kernel), "apqn-1-6-0")  # also where its set is configured no more
    assert (kernel.nodes, trees(tmp_path)) == ({}, set())


def test_a_node_that_is_there_is_used_only_with_the_right_masks(tmp_path: Path) -> None:
    """The peer trusts it, whatever it may be used for."""
    found, kernel = backend(tmp_path, machine())
    kernel.create(NODE)
    (tmp_path / f"sys/devices/virtual/zcrypt/{NODE}/aqmask").write_text(f"{EVERYTHING}\n")
    claim(found, found.resources[0], "apqn-1-6-0")
    assert kernel.nodes == {NODE: RIGHT}
    kernel.written.clear()
    claim(found, found.resources[0], "apqn-1-6-0")
    assert kernel.written == []


def test_a_node_that_does_not_appear_is_destroyed_again(tmp_path: Path) -> None:
    found, kernel = backend(tmp_path, machine())
    kernel.makes_nodes = False
    with pytest.raises(AllocationRefused, match=f"/dev/{NODE} did not appear in 6.4 s"):
        claim(found, found.resources[0], "apqn-1-6-0")
    assert kernel.nodes == {}


def test_a_kernel_that_refuses_is_told_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found, kernel = backend(tmp_path, machine())

    def full(name: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kernel, "create", full)
    with pytest.raises(AllocationRefused, match=f"/sys/class/zcrypt/create refuses '{NODE}': no space left"):
        claim(found, found.resources[0], "apqn-1-6-0")


def test_whether_a_node_is_in_use_is_asked_of_its_driver(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    kernel = Kernel(Host.below(tmp_path))
    (tmp_path / "dev/free").touch()
    kernel.try_open(HostPath("/dev/free"))
    with pytest.raises(FileNotFoundError):
        kernel.try_open(HostPath("/dev/gone"))


class Pods(RuleBasedStateMachine):
    """Pods come and go, others make nodes too, and our process is killed at any write."""

    IDS = ("apqn-1-6-0", "apqn-1-6-1", "apqn-1-7-0")

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.root = Path(self._directory.name)
        self.found, self.kernel = backend(self.root, BUS + card(1, "CEX8P"), SHARED)
        self.held: set[str] = set()
        self.ended: set[str] = set()  # what the ledger has to release yet
        self.foreign: set[str] = set()

    def teardown(self) -> None:
        self._directory.cleanup()

    @rule(device_id=st.sampled_from(IDS), steps=st.none() | st.integers(0, 9))
    def start_container(self, device_id: str, steps: int | None) -> None:
        """A kubelet asks for an ID that is free, or again for one whose pod could not start."""
        self.held.add(device_id)  # the ledger knows before the backend acts
        self.kernel.fuse.steps = steps
        with suppress(Crash):
            claim(self.found, SHARED, device_id)
            adapter, domain = 1, int(device_id.split("-")[2])
            assert self.kernel.nodes[f"zcrypt-{device_id}"] == (mask(adapter), mask(domain), EVERYTHING)
            assert f"sysfs-{device_id}" in trees(self.root)
            self.kernel.open.add(f"zcrypt-{device_id}")
        self.kernel.fuse.steps = None

    @rule(device_id=st.sampled_from(IDS))
    def end_pod(self, device_id: str) -> None:
        """Its processes may last longer."""
        if device_id in self.held:
            self.held.discard(device_id)
            self.ended.add(device_id)

    @rule(steps=st.none() | st.integers(0, 9))
    def release_what_ended(self, steps: int | None) -> None:
        self.kernel.fuse.steps = steps
        with suppress(Crash, ExceptionGroup):
            release(self.found, *sorted(self.ended - self.held))
            self.ended &= self.held
        self.kernel.fuse.steps = None

    @rule()
    def processes_die(self) -> None:
        self.kernel.open = {f"zcrypt-{one}" for one in self.held} & self.kernel.nodes.keys()

    @rule(name=st.sampled_from(["zcrypt-apqn-9-9-0", "mine"]))
    def somebody_makes_one(self, name: str) -> None:
        if name not in self.foreign:
            self.kernel.create(name)
            self.foreign.add(name)

    @invariant()
    def what_others_made_stays(self) -> None:
        assert self.foreign <= self.kernel.nodes.keys()

    @invariant()
    def what_we_made_is_known_to_the_ledger(self) -> None:
        ours = {f"zcrypt-{one}" for one in self.held | self.ended}
        assert self.kernel.nodes.keys() <= self.foreign | ours

    @invariant()
    def no_node_has_more_than_one_queue(self) -> None:
        for name, masks in self.kernel.nodes.items():
            assert name in self.foreign or all(int(one, 16).bit_count() <= 1 for one in masks[:2])


Pods.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_whenever_we_are_killed_nodes_are_right_or_known_to_be_undone = Pods.TestCase
