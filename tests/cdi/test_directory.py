"""Our specifications on disk: whole or not at all, ours alone, also when the process dies at any step of a write."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agent.cdi import spec
from agent.cdi.directory import Devices, Directory
from backends.base import ContainerEdits, Host, HostPath, Mount, Node
from tests.backends.crashes import Crash, Fuse
from tests.backends.trees import planted_host
from tests.cdi.runtime import checked, container, specs

GPU, NIC = "nvidia.com/gpu", "intel.com/sriov_net"
OTHERS = {"nvidia.yaml": b"kind: nvidia.com/gpu\n", "fairlead_other.com_x.json": b"{}", "fairlead.json": b"no JSON"}


def node(path: str) -> spec.Edits:
    return spec.edits(ContainerEdits((Node(HostPath(path), path, "rw"),)))


@contextmanager
def dying(fuse: Fuse) -> Iterator[None]:
    """Each call that changes the disk is one step before the kernel has it, and one after."""

    def stepping(call: Any) -> Any:
        def step(*args: Any, **kwargs: Any) -> Any:
            fuse.step()
            found = call(*args, **kwargs)
            fuse.step()
            return found

        return step

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((os, "open"), (os, "fsync"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir")):
            patch.setattr(owner, name, stepping(getattr(owner, name)))
        with suppress(Crash):
            yield


class Disk(RuleBasedStateMachine):
    """Specifications are written and removed, the process dies at some step or not, and another run goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.home = tempfile.TemporaryDirectory()
        self.root = Path(self.home.name)
        self.host = planted_host(self.root)
        (self.root / "run/cdi").mkdir()
        for name, data in OTHERS.items():
            (self.root / "run/cdi" / name).write_bytes(data)
        self.fuse = Fuse()
        self.may_say: dict[str, list[Devices]] = {GPU: [{}], NIC: [{}]}

    @property
    def directory(self) -> Directory:
        return Directory(self.host, self.root / "state")

    @rule(
        resource=st.sampled_from([GPU, NIC]),
        ids=st.sets(st.sampled_from(["a", "0000:3b:00.0", "x/y"])),
        major=st.integers(0, 2),
        steps=st.sampled_from([None, *range(30)]),
    )
    def write(self, resource: str, ids: set[str], major: int, steps: int | None) -> None:
        wanted = {spec.device(one): node(f"/dev/{major}") for one in ids}
        self._do(resource, wanted, steps, lambda it: it.update(resource, lambda _: wanted))

    @rule(resource=st.sampled_from([GPU, NIC]), steps=st.sampled_from([None, *range(20)]))
    def remove(self, resource: str, steps: int | None) -> None:
        self._do(resource, {}, steps, lambda it: it.remove(resource))

    def _do(self, resource: str, wanted: Devices, steps: int | None, call: Any) -> None:
        self.fuse.steps, done = steps, False
        with dying(self.fuse):
            call(self.directory)
            done = True
        self.fuse.steps = None
        before = self.may_say[resource]
        self.may_say[resource] = [wanted] if done else [*before, wanted]
        self.may_say[resource] = [self._said(resource)]

    def _said(self, resource: str) -> Devices:
        """What is on disk now, which is one of what it may be."""
        path = self.host.local(spec.file(resource))
        data = path.read_bytes() if path.exists() else b""
        said = [it for it in self.may_say[resource] if data == (spec.encode(spec.kind(resource), it) if it else b"")]
        assert said, f"half of a specification: {data!r}"
        return said[0]

    @invariant()
    def a_runtime_reads_whole_files_only_and_each_of_ours_is_known_to_be_ours(self) -> None:
        there = {path.name: path.read_bytes() for path in (self.root / "run/cdi").glob("*.json")}
        ours = {spec.file(one).name: one for one in (GPU, NIC)}
        for name in there.keys() - OTHERS.keys():
            checked(there[name])
            assert ours[name] in self.directory.recorded()

    @invariant()
    def what_is_others_stays(self) -> None:
        assert {name: (self.root / "run/cdi" / name).read_bytes() for name in OTHERS} == OTHERS

    def teardown(self) -> None:
        for resource in self.directory.recorded():
            self.directory.remove(resource)
        assert {path.name for path in (self.root / "run/cdi").iterdir()} == OTHERS.keys()
        assert self.directory.recorded() == frozenset()
        self.home.cleanup()


Disk.TestCase.settings = settings(max_examples=60, stateful_step_count=8, deadline=None)
test_whenever_we_are_killed_specifications_are_whole_and_known_to_be_ours = Disk.TestCase


def test_a_file_of_somebody_else_under_our_name_is_left_alone_and_named(tmp_path: Path) -> None:
    path = planted_host(tmp_path, "run/cdi/fairlead_nvidia.com_gpu.json = {}").local(spec.file(GPU))
    directory = Directory(Host.below(tmp_path), tmp_path)
    with pytest.raises(FileExistsError, match="It is not Fairlead's; move it away"):
        directory.update(GPU, lambda _: {"a": node("/dev/a")})
    assert path.read_text() == "{}\n"
    assert directory.recorded() == frozenset()


def test_a_node_behind_a_link_is_named_itself_since_runtimes_follow_none(tmp_path: Path) -> None:
    host = planted_host(tmp_path, "dev/serial/by-id/usb-x -> ../../ttyUSB3\ndev/ttyUSB3 c 188:3\n")
    assert Directory(host, tmp_path).update(NIC, lambda _: {"x": node("/dev/serial/by-id/usb-x")})
    found = container(specs(tmp_path), ["fairlead.intel.com/sriov__net=x"])
    assert found[0] == {"/dev/serial/by-id/usb-x": ("/dev/ttyUSB3", "rw")}


def test_what_says_the_same_is_not_written_again(tmp_path: Path) -> None:
    directory = Directory(planted_host(tmp_path), tmp_path)
    mounts = {"x": spec.edits(ContainerEdits(mounts=(Mount(HostPath("/a"), "/b"),)))}
    directory.update(NIC, lambda _: mounts)
    before = (tmp_path / "run/cdi/fairlead_intel.com_sriov__net.json").stat().st_ino
    directory.update(NIC, lambda said: {**said, **mounts})
    assert (tmp_path / "run/cdi/fairlead_intel.com_sriov__net.json").stat().st_ino == before


def test_the_record_is_there_again_after_the_state_directory_was_wiped(tmp_path: Path) -> None:
    directory = Directory(planted_host(tmp_path, "dev/nvidia0 c 195:0"), tmp_path / "state")
    directory.update(GPU, lambda _: {"0": node("/dev/nvidia0")})
    shutil.rmtree(tmp_path / "state")
    assert directory.update(GPU, lambda before: before)
    assert directory.recorded() == {GPU}


def test_two_agents_that_write_at_a_time_lose_nothing_of_each_other(tmp_path: Path) -> None:
    host = planted_host(tmp_path)

    def add(letter: str) -> None:
        directory = Directory(host, tmp_path)
        for n in range(20):
            directory.update(GPU, lambda said, name=f"{letter}{n}": {**said, name: node("/dev/a")})  # type: ignore[misc]

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(add, "ab"))
    (data,) = specs(tmp_path)
    assert {it["name"] for it in checked(data)["devices"]} == {f"{letter}{n}" for letter in "ab" for n in range(20)}
