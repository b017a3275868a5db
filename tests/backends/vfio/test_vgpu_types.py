"""Virtual functions of an A40 get a vGPU type for a pod and lose it after, with a driver that acts."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from backends.base import AllocationRefused, Device, Grant, Host, HostPath, Released
from backends.linux.kernel import Kernel
from backends.vfio import Vfio
from tests.backends.crashes import Crash, Fuse
from tests.backends.trees import plant, planted_host
from tests.backends.vfio.test_vgpu import VF_ID, VFS, a40
from tests.backends.vfio.vfio_node import BUS, devices, resource

WANTED = resource("nvidia.com/A40-2Q", VF_ID, vgpu_type=558)
OTHER = "557"


class Driver(Kernel):
    """NVIDIA's: a card has room for so many vGPUs; a write of the type makes the function's node, or takes it away."""

    def __init__(self, host: Host, room: int) -> None:
        super().__init__(host)
        self.host = host
        self.room = room
        self.fuse = Fuse()
        self.open: set[str] = set()
        """Functions whose vGPU a virtual machine has open."""

    def types(self) -> dict[str, str]:
        """Function → its type, of those that have one."""
        read = {address: self._file(address, "current_vgpu_type").read_text().strip() for address in VFS}
        return {address: kind for address, kind in read.items() if kind != "0"}

    def write(self, path: HostPath, text: str) -> None:
        self.fuse.step()
        self.give(path.parent.parent.name, text)
        self.fuse.step()

    def give(self, address: str, kind: str) -> None:
        if kind == "0":
            assert address not in self.open, "the driver would refuse, or the virtual machine lose its GPU"
            (self.host.dev / f"vfio/{self._group(address)}").unlink()
        elif address in self.types():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        elif len(self.types()) >= self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            plant(self.host.root, f"dev/vfio/{self._group(address)} c 240:{self._group(address)}")
        self._file(address, "current_vgpu_type").write_text(f"{kind}\n")
        left = "558   : NVIDIA A40-2Q\n" if len(self.types()) < self.room else ""
        for each in VFS:
            self._file(each, "creatable_vgpu_types").write_text(f"ID    : vGPU Name\n{left}")

    def try_open(self, path: HostPath) -> None:
        if path.name in {self._group(address) for address in self.open}:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    def wait(self, is_so: Callable[[], bool], seconds: float) -> bool:
        return is_so()

    def _file(self, address: str, name: str) -> Path:
        return self.host.sys / "bus/pci/devices" / address / "nvidia" / name

    def _group(self, address: str) -> str:
        return str(41 + VFS.index(address))


def node(root: Path, room: int = 4, *types: str) -> tuple[Vfio, Driver]:
    host = planted_host(root, BUS + a40(*(types or ("0",) * 4)))
    driver = Driver(host, room)
    return Vfio(host, [WANTED], driver), driver


def there(found: Vfio) -> dict[str, Device]:
    return {device.key: device for device in devices(found) if not device.unusable}


def claim(found: Vfio, *addresses: str) -> None:
    known = there(found)
    found.claim(WANTED, [Grant(address, known[address]) for address in addresses])


def release(found: Vfio, *addresses: str) -> None:
    idle = frozenset(f"pci:{address}" for address in addresses)
    found.release([Released(WANTED.name, address, frozenset({f"pci:{address}"})) for address in addresses], idle)


def test_a_function_gets_its_type_for_a_pod_and_loses_it_after(tmp_path: Path) -> None:
    found, driver = node(tmp_path)
    before = there(found)
    assert list(before) == VFS
    assert not any(signal for device in before.values() for signal in found.probe(device))
    for _ in range(2):
        claim(found, *VFS[:2])
        claim(found, VFS[0])  # a pod that is created again
        assert driver.types() == dict.fromkeys(VFS[:2], "558")
        given = there(found)[VFS[0]]
        assert [str(one.path) for one in given.nodes] == ["/dev/vfio/vfio", "/dev/vfio/41"]
        assert (given.hardware, given.identity) == (before[VFS[0]].hardware, before[VFS[0]].identity)
        release(Vfio(found.host, (), driver), *VFS)  # also where it is configured no more
        assert driver.types() == {}
        assert not [*found.probe(given)]  # nobody has looked since, and it is as good as before


def test_what_another_gave_a_type_is_never_changed(tmp_path: Path) -> None:
    found, driver = node(tmp_path, 4, "558", OTHER, "0", "0")
    assert list(there(found)) == [VFS[0], VFS[2], VFS[3]]
    (other,) = (device for device in devices(found) if device.key == VFS[1])
    assert other.unusable == "it has the vGPU type 557 and not 558"
    claim(found, VFS[0])
    release(found, *VFS)
    assert driver.types() == {VFS[0]: "558", VFS[1]: OTHER}


def test_where_there_is_no_room_the_pod_is_refused_and_the_function_offered_no_more(tmp_path: Path) -> None:
    found, driver = node(tmp_path, room=1)
    known = there(found)
    with pytest.raises(AllocationRefused, match=r"0000:41:00.5 .* can give it no vGPU type 558 now"):
        claim(found, *VFS[:2])
    release(found, *VFS[:2])  # as the daemon does after a claim that failed
    assert driver.types() == {}
    claim(found, VFS[0])
    assert list(there(found)) == [VFS[0]]
    (signal,) = found.probe(known[VFS[1]])
    assert signal.reason == "no-room-for-vgpu"


def test_one_that_is_open_keeps_its_type_until_it_is_closed(tmp_path: Path) -> None:
    found, driver = node(tmp_path)
    claim(found, VFS[0])
    driver.open = {VFS[0]}
    with pytest.raises(ExceptionGroup) as raised:
        release(found, VFS[0])
    assert "keeps its vGPU type while /dev/vfio/41 is in use" in str(raised.value.exceptions[0])
    driver.open.clear()
    release(found, VFS[0])
    assert driver.types() == {}


class Pods(RuleBasedStateMachine):
    """Pods come and go, others give types too, and our process is killed at any write."""

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.found, self.driver = node(Path(self._directory.name), 3)
        self.pods: list[list[str]] = []
        self.ended: set[str] = set()  # what the ledger has to release yet
        self.foreign: set[str] = set()

    def teardown(self) -> None:
        self._directory.cleanup()

    @rule(count=st.integers(1, 3), steps=st.none() | st.integers(0, 7))
    def create_pod(self, count: int, steps: int | None) -> None:
        pod = [address for address in there(self.found) if address not in self.held() | self.ended][:count]
        self.pods.append(pod)  # the ledger knows before the backend acts
        self.driver.fuse.steps = steps
        try:
            claim(self.found, *pod)
            self.driver.open.update(pod)
        except Crash:
            pass
        except AllocationRefused:
            self.pods.remove(pod)
            self.ended.update(pod)
        self.driver.fuse.steps = None

    @rule(data=st.data())
    def end_pod(self, data: st.DataObject) -> None:
        if self.pods:
            pod = self.pods.pop(data.draw(st.integers(0, len(self.pods) - 1)))
            self.ended.update(pod)
            self.driver.open.difference_update(pod)

    @rule(steps=st.none() | st.integers(0, 7))
    def release_what_ended(self, steps: int | None) -> None:
        self.driver.fuse.steps = steps
        with suppress(Crash):
            release(self.found, *sorted(self.ended))
            self.ended.clear()
        self.driver.fuse.steps = None

    @rule(address=st.sampled_from(VFS))
    def somebody_gives_a_type(self, address: str) -> None:
        if address not in self.held():
            with suppress(OSError):
                self.driver.give(address, OTHER)
                self.foreign.add(address)

    @rule(address=st.sampled_from(VFS))
    def somebody_takes_theirs(self, address: str) -> None:
        if address in self.foreign:
            self.driver.give(address, "0")
            self.foreign.discard(address)

    def held(self) -> set[str]:
        return {address for pod in self.pods for address in pod}

    @invariant()
    def types_are_ours_only_while_the_ledger_knows_of_them(self) -> None:
        types = self.driver.types()
        assert {address for address, kind in types.items() if kind == OTHER} == self.foreign
        assert types.keys() <= self.foreign | self.held() | self.ended

    @invariant()
    def what_is_open_has_its_type(self) -> None:
        assert all(self.driver.types()[address] == "558" for address in self.driver.open)


Pods.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
test_whenever_we_are_killed_only_types_of_ours_that_are_unused_are_taken_away = Pods.TestCase
