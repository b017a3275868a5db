"""What is noted of XIDs that change no health, and whose pod they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from structlog.testing import capture_logs

from agent.discovery import kmsg
from agent.history.notes import Notes, pod_of
from agent.history.timeline import Note
from agent.model import SlotKey
from agent.runtime.pacing import Clock
from backends.base import Host, Record
from backends.gpu import Gpu
from tests.backends.gpu.gpus import resource as gpus
from tests.backends.trees import plant
from tests.fakes import device, inventory, resource
from tests.wait import until

A = "nvidia.com/gpu"
START = 1e9
H100 = Path(__file__).parents[1] / "backends/gpu/h100/kmsg.txt"
GPU = device("GPU-a1", A, hardware=["pci:0000:00:06.0"], ids=["GPU-a1"])
LLAMA, OTHER = "0d1f1f4e-8a6a-4c39-9d2c-7a2e5c1f3d11", "6b0b1c6e-8a6a-4c39-9d2c-7a2e5c1f3d11"
HOST = "2/comm = kthreadd\n"
SYSTEMD = (
    "0::/kubepods.slice/kubepods-burstable.slice/"
    f"kubepods-burstable-pod{LLAMA.replace('-', '_')}.slice/cri-containerd-4a5b.scope"
)


class Desk:
    """The notes of a node that has one GPU."""

    def __init__(self, proc: Path, pods: dict[str, str] | None = None) -> None:
        self.now = 75.4
        self.pods = {} if pods is None else pods
        self.it = Notes(
            inventory(resource(A), devices=[GPU]),
            self._pods,
            lambda _slot: self.pods,
            lambda _key, then: ["night/owl"] if then < START + 76 else [],
            proc,
            clock=Clock(lambda: self.now, lambda: START + self.now),
        )
        self.gpu = Gpu(Host(Path("/nowhere")), (gpus(),))

    def _pods(self, _slot: SlotKey) -> Iterable[str]:
        return self.pods

    def says(self, text: str, time: float) -> None:
        for signal in self.gpu.signals(Record("kmsg", "boot", 1, time, text)):
            self.it.take(signal, time)

    def replay(self, sequences: Iterable[int]) -> None:
        """The H100's own lines, when it wrote them."""
        lines = [line for one in kmsg.split(H100.read_bytes())[0] if (line := kmsg.parse(one))]
        for line in lines:
            if line.sequence in sequences:
                self.now = line.time + 0.0001
                self.says(line.text, line.time)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[list[Any]]:
        with capture_logs() as said:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.it.run)
                yield said
                tasks.cancel_scope.cancel()

    def all(self) -> list[Note]:
        return self.it.of(GPU.hardware)


def test_the_pod_of_a_process_is_known_by_its_cgroup(tmp_path: Path) -> None:
    static = "7f5a" * 8
    plant(
        tmp_path,
        HOST
        + f"1/cgroup = {SYSTEMD}\n"
        + f"3/cgroup = 11:cpuset:/x\\n1:name=systemd:/kubepods/besteffort/pod{LLAMA}/4a5b\n"  # cgroup v1, cgroupfs
        + f"4/cgroup = 0::/../../kubepods/pod{static}/9c\n"  # from a cgroup namespace; a static pod
        + "5/cgroup = 0::/user.slice/user-1000.slice/podman-77.scope\n",
    )
    assert [pod_of(tmp_path, pid) for pid in (1, 3, 4, 5)] == [LLAMA, LLAMA, static, ""]
    assert pod_of(tmp_path, 6) is None  # it has ended
    (tmp_path / "2/comm").write_text("nginx\n")  # the /proc of a container: its numbers are other processes
    assert pod_of(tmp_path, 1) is None


async def test_the_three_lines_of_one_fault_are_one_note_with_its_process_and_pod(tmp_path: Path) -> None:
    plant(tmp_path, HOST + f"1641/cgroup = {SYSTEMD}\n")
    desk = Desk(tmp_path, {"default/llama-0": LLAMA, "default/llama-1": OTHER})  # both share it
    async with desk.running() as said:
        desk.replay({362, 363, 364})
        await until(desk.all)
    (line,) = [it for it in said if it["event"] == "hardware-noted"]
    assert {name: line[name] for name in ("resource", "device", "hardware", "reason", "pid", "process", "pods")} == {
        "resource": A,
        "device": "GPU-a1",
        "hardware": "pci:0000:00:06.0",
        "reason": "xid-13",
        "pid": 1641,
        "process": "python3",
        "pods": ("default/llama-0",),
    }
    (note,) = desk.all()
    assert (note.reason, note.pid, note.pods) == ("xid-13", 1641, ("default/llama-0",))
    assert note.time == pytest.approx(START + 77.011187)


@pytest.mark.parametrize(
    ("cgroup", "pods"),
    [
        ("", ("default/llama-0", "default/llama-1")),  # the process has ended: it may be either
        ("1634/cgroup = 0::/system.slice/sshd.service\n", ()),  # it is of no pod
    ],
)
async def test_of_a_process_that_is_of_no_pod_none_is_named(tmp_path: Path, cgroup: str, pods: tuple[str, ...]) -> None:
    plant(tmp_path, HOST + cgroup)
    desk = Desk(tmp_path, {"default/llama-0": LLAMA, "default/llama-1": OTHER})
    async with desk.running():
        desk.replay({361})
        await until(desk.all)
    assert desk.all()[0].pods == pods


async def test_what_was_logged_long_before_is_of_who_held_the_gpu_then(tmp_path: Path) -> None:
    plant(tmp_path, HOST + f"1634/cgroup = {SYSTEMD}\n")  # another process has the number by now
    desk = Desk(tmp_path, {"default/llama-0": LLAMA})
    desk.now = 5000.0
    async with desk.running() as said:
        desk.says("NVRM: Xid (PCI:0000:00:06): 31, pid=1634, name=python3, Ch 1e", 75.349)
        await until(desk.all)
    (line,) = [it for it in said if it["event"] == "hardware-noted"]
    assert (line["pods"], line["at"]) == (("night/owl",), "2001-09-09T01:47:55Z")


async def test_a_flood_is_ten_notes_of_which_the_last_has_the_count(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.running() as said:
        for n in range(100):
            desk.now = 80.0 + 2 * n
            desk.says(f"NVRM: Xid (PCI:0000:00:06): 43, pid={2000 + n}, name=python3, Ch 1e", desk.now)
            wanted = min(n + 1, 10)
            await until(lambda: len(desk.all()) >= wanted)  # noqa: B023  # called before the next turn
    assert [it.count for it in desk.all()] == [*[1] * 9, 91]
    assert len([it for it in said if it["event"] == "hardware-noted"]) == 10


async def test_notes_outlive_a_restart(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    async with desk.running():
        desk.replay({361})
        await until(desk.all)
        before = list(desk.it.all())
        desk.replay({361})  # another line of it
    after = Desk(tmp_path)
    after.it.restore([*before, *desk.it.all()])  # as a file has it that was appended to
    after.now = desk.now
    assert [(it.reason, it.count) for it in after.all()] == [("xid-31", 2)]
    after.now += 86_400
    assert after.all() == []
