"""The backend `mdev` makes devices for pods and removes them, and only them, with a kernel that acts."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.base import AllocationRefused, Device, Grant, Released
from backends.mdev import Mdev, MdevResource
from tests.backends.crashes import Crash
from tests.backends.kernel_calls import kernel_calls
from tests.backends.mdev.mdev_kernel import MdevKernel
from tests.backends.mdev.mdev_trees import (
    FIRST,
    SECOND,
    T4,
    T4_PATH,
    T4_TYPES,
    VFIO,
    devices,
    made,
    parent,
    resource,
    t4,
)
from tests.backends.trees import plant, planted_host

SMALL, LARGE = resource("a.com/small", create=True), resource("a.com/large", {"type": ("nvidia-234",)}, create=True)


def node(root: Path, *resources: MdevResource, more: str = "") -> tuple[Mdev, MdevKernel]:
    host = planted_host(root, VFIO + t4() + more)
    kernel = MdevKernel(host)
    return Mdev(host, resources or (SMALL,), kernel), kernel


def claim(found: Mdev, wanted: MdevResource, *keys: str) -> list[Device]:
    """As the daemon does: claim, then look again."""
    there = {device.key: device for device in devices(found)}
    found.claim(wanted, [Grant(key, there[key]) for key in keys])
    now = {device.key: device for device in devices(found)}
    assert all((now[key].hardware, now[key].identity) == (there[key].hardware, there[key].identity) for key in keys)
    return [now[key] for key in keys]


def release(found: Mdev, *keys: str) -> None:
    hardware = frozenset(f"mdev:{key}" for key in keys)
    found.release([Released("a.com/small", key, frozenset({f"mdev:{key}"})) for key in keys], hardware)


def offered(found: Mdev, wanted: MdevResource) -> list[str]:
    return [
        device.key
        for device in devices(found)
        if device.resource in (None, wanted.name) and wanted.refuses(device) is None and not device.unusable
    ]


def test_what_could_be_made_is_offered_and_made_for_a_pod_and_removed_after_it(tmp_path: Path) -> None:
    found, kernel = node(tmp_path)
    before = offered(found, SMALL)
    assert len(before) == 16
    assert [*found.probe(devices(found)[0])] == []
    (device,) = claim(found, SMALL, before[3])
    types = f"/sys/devices/{T4_PATH}/mdev_supported_types/nvidia-230"
    assert kernel.written == [(f"{types}/create", before[3])]
    assert found.edits(SMALL, [Grant(device.key, device)]).env == {"MDEV_PCI_RESOURCE_A_COM_SMALL": before[3]}
    assert [str(one.path) for one in device.nodes] == ["/dev/vfio/vfio", "/dev/vfio/71"]
    assert sorted(offered(found, SMALL)) == sorted(before)
    claim(found, SMALL, before[3])  # a pod that is created again
    assert len(kernel.written) == 1
    release(found, before[3])
    release(found, before[3])
    assert kernel.written[1:] == [(f"/sys/devices/{T4_PATH}/{before[3]}/remove", "1")]
    assert sorted(offered(found, SMALL)) == sorted(before)


def test_hundreds_that_could_be_made_are_listed_with_few_calls(tmp_path: Path) -> None:
    tree = parent("vfio_ap/matrix", {"vfio_ap-passthrough": ("VFIO AP", 65536)})
    found = Mdev(planted_host(tmp_path, tree), [resource("a.b/c", {"type": ("VFIO AP",)}, create=True)])
    assert len(devices(found)) == 256
    assert kernel_calls(lambda: found.discover("matrix")) <= 16


def test_nothing_is_made_unless_it_is_asked_for(tmp_path: Path) -> None:
    found, _ = node(tmp_path, resource())
    assert devices(found) == []
    assert not found.needs_claim(found.resources[0])


def test_the_last_of_one_type_leaves_no_room_for_another_until_it_is_removed(tmp_path: Path) -> None:
    found, _ = node(tmp_path, SMALL, LARGE)
    (large,), small = offered(found, LARGE), offered(found, SMALL)[:1]
    listed = {device.key: device for device in devices(found)}
    claim(found, LARGE, large)
    assert offered(found, SMALL) == []
    with pytest.raises(AllocationRefused, match=f"{T4} has no room for one more nvidia-230"):
        found.claim(SMALL, [Grant(key, listed[key]) for key in small])
    release(found, large)
    assert len(offered(found, SMALL)) == 16


def test_where_one_of_several_cannot_be_made_none_is(tmp_path: Path) -> None:
    found, kernel = node(tmp_path, more=made(T4_PATH, FIRST, "nvidia-230", 77))
    wanted = offered(found, SMALL)[1:3]
    file = tmp_path / f"sys/devices/{T4_PATH}/mdev_supported_types/nvidia-230/available_instances"
    count = kernel._count

    def full_after_one() -> None:
        count()
        file.write_text("0\n")

    kernel._count = full_after_one  # type: ignore[method-assign]
    with pytest.raises(AllocationRefused, match="has no room"):
        claim(found, SMALL, *wanted)
    assert kernel.made.keys() == {FIRST}


def test_one_that_no_vfio_driver_takes_is_removed_again(tmp_path: Path) -> None:
    found, kernel = node(tmp_path)
    kernel.grouped = False
    with pytest.raises(AllocationRefused, match="is vfio_mdev loaded"):
        claim(found, SMALL, offered(found, SMALL)[0])
    assert kernel.made == {}


def test_one_that_is_open_is_removed_once_it_is_closed(tmp_path: Path) -> None:
    found, kernel = node(tmp_path)
    key = offered(found, SMALL)[0]
    claim(found, SMALL, key)
    kernel.open = {kernel.node(key)}
    with pytest.raises(ExceptionGroup) as raised:
        release(found, key)
    assert "in use" in str(raised.value.exceptions[0])
    kernel.open.clear()
    release(Mdev(found.host, (), kernel), key)  # also where it is configured no more
    assert kernel.made == {}


def test_what_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    """Although a pod had it: mdevctl made it, or KubeVirt."""
    found, kernel = node(tmp_path, more=made(T4_PATH, FIRST, "nvidia-230", 77))
    assert FIRST in offered(found, SMALL)
    claim(found, SMALL, FIRST)
    release(found, FIRST)
    assert kernel.made.keys() == {FIRST}
    assert kernel.written == []


def test_what_we_made_is_offered_by_the_resource_that_had_it_made(tmp_path: Path) -> None:
    other = resource("a.com/other")
    found, kernel = node(tmp_path, other, SMALL)
    key = offered(found, SMALL)[0]
    claim(found, SMALL, key)
    assert {device.resource for device in devices(found)} == {"a.com/small"}
    assert {device.resource for device in devices(Mdev(found.host, (other,), kernel))} == {None}


@pytest.mark.parametrize("said", ["-1", "many", "", "99999999999999999999999"])
def test_a_number_of_instances_that_is_garbage_is_none(tmp_path: Path, said: str) -> None:
    found, _ = node(tmp_path)
    plant(tmp_path, f"sys/devices/{T4_PATH}/mdev_supported_types/nvidia-230/available_instances = {said}")
    assert offered(found, SMALL) == []


def test_no_more_are_offered_than_a_list_can_bear(tmp_path: Path) -> None:
    found, _ = node(tmp_path)
    plant(tmp_path, f"sys/devices/{T4_PATH}/mdev_supported_types/nvidia-230/available_instances = 65536")
    assert len(offered(found, SMALL)) == 256


class Pods(RuleBasedStateMachine):
    """Pods come and go, others make devices too, and our process is killed at any write."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        host = planted_host(Path(self._directory.name), VFIO + t4())
        self.kernel = MdevKernel(host)
        self.found = Mdev(host, (SMALL, LARGE), self.kernel)
        self.pods: list[tuple[str, ...]] = []
        self.ended: set[str] = set()  # what the ledger has to release yet
        self.foreign: set[str] = set()

    def teardown(self) -> None:
        self._directory.cleanup()

    @rule(wanted=st.sampled_from([SMALL, LARGE]), count=st.integers(1, 3), steps=st.none() | st.integers(0, 7))
    def create_pod(self, wanted: MdevResource, count: int, steps: int | None) -> None:
        free = [key for key in offered(self.found, wanted) if key not in self.held()][:count]
        if not free:
            return
        self.pods.append(tuple(free))  # the ledger knows before the backend acts
        self.kernel.fuse.steps = steps
        with suppress(Crash, AllocationRefused):
            there = {device.key: device for device in devices(self.found)}
            self.found.claim(wanted, [Grant(key, there[key]) for key in free])
            self.running(free)
        self.kernel.fuse.steps = None

    def running(self, keys: list[str]) -> None:
        assert set(keys) <= self.kernel.made.keys()
        self.kernel.open.update(map(self.kernel.node, keys))

    @rule(data=st.data())
    def end_pod(self, data: st.DataObject) -> None:
        if self.pods:
            pod = self.pods.pop(data.draw(st.integers(0, len(self.pods) - 1)))
            self.ended |= set(pod)
            for key in pod:
                if key in self.kernel.made:
                    self.kernel.open.discard(self.kernel.node(key))

    @rule(steps=st.none() | st.integers(0, 7))
    def release_what_ended(self, steps: int | None) -> None:
        over = sorted(self.ended - self.held())
        self.kernel.fuse.steps = steps
        with suppress(Crash):
            release(self.found, *over)
            self.ended.clear()
        self.kernel.fuse.steps = None

    @rule(kind=st.sampled_from(sorted(T4_TYPES)), uuid=st.sampled_from([FIRST, SECOND]))
    def somebody_makes_one(self, kind: str, uuid: str) -> None:
        with suppress(OSError):
            self.kernel.create(kind, uuid)
            self.foreign.add(uuid)

    @rule(uuid=st.sampled_from([FIRST, SECOND]))
    def somebody_removes_theirs(self, uuid: str) -> None:
        if uuid in self.foreign - self.held():
            self.kernel.remove(uuid)
            self.foreign.discard(uuid)

    def held(self) -> set[str]:
        return {key for pod in self.pods for key in pod}

    @invariant()
    def what_others_made_stays(self) -> None:
        assert self.foreign <= self.kernel.made.keys()

    @invariant()
    def what_we_made_is_known_to_the_ledger(self) -> None:
        assert self.kernel.made.keys() <= self.foreign | self.held() | self.ended

    @invariant()
    def what_is_in_use_is_there(self) -> None:
        """MdevKernel.remove refuses what is open; and the lists name everything once."""
        keys = [device.key for device in devices(self.found)]
        assert len(keys) == len(set(keys))
        assert self.kernel.made.keys() <= set(keys)


Pods.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_whenever_we_are_killed_only_what_is_ours_and_unused_is_removed = Pods.TestCase
