"""Files that are missing, unreadable, truncated or garbage: never an exception, and never another GPU's trouble."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import Device, Grant, Host, Problem, Signal
from backends.gpu import Gpu
from tests.backends.gpu.fake_nvml import FakeGpu, FakeMig, install
from tests.backends.gpu.gpus import backend, look, resource
from tests.backends.machines import CONTROLS, MI300X, intel_gpu, kfd_node, mi300x_cpx, mig, nvidia_gpu, uuid
from tests.backends.trees import entries, restored

NVIDIA, DIVIDED, INTEL = "0000:3b:00.0", "0000:5e:00.0", "0000:4d:00.0"
MIG = "MIG-11111111-0000-5000-8000-000000000001"
MACHINE = (
    CONTROLS
    + nvidia_gpu(NVIDIA, 0)
    + nvidia_gpu(DIVIDED, 1)
    + mig(1, [(1, 0)])
    + mi300x_cpx(2)
    + kfd_node(3, "0000:0d:00.0", 140, {1: 2})
    + intel_gpu(INTEL, 40, "xe")
)
ADDRESS = re.compile(r"0000:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _unreadable(file: Path) -> None:
    """Opens, and cannot be read: root may read whatever its permissions say."""
    file.unlink()
    file.symlink_to("/proc/self/mem")


GARBAGE: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: file.write_bytes(b""),
    "binary": lambda file: file.write_bytes(bytes(range(256)) * 40),
    "a huge number": lambda file: file.write_bytes(b"9" * 4000),
    "truncated": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "a directory": _directory,
    "unreadable": _unreadable,
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("machine")
    backend(root, MACHINE)
    return root


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [FakeGpu(NVIDIA, uuid(0)), FakeGpu(DIVIDED, uuid(1), mig=[FakeMig(MIG, 1, 0)])]
    install(monkeypatch, *known)


def seen(root: Path) -> tuple[dict[str, Device], list[Problem], list[Signal]]:
    """Look at everything and probe it, as a walk does, and hand out all that can be."""
    wanted = resource(pass_device_specs=True)
    gpu = Gpu(Host.below(root), [wanted])
    found = look(gpu).values()
    devices = {device.key: device for one in found for device in one.devices}
    signals = [signal for device in devices.values() for signal in gpu.probe(device)]
    grants = [Grant(one, it) for it in devices.values() if not it.unusable for one in gpu.ids(wanted, it)]
    gpu.edits(wanted, grants)
    return devices, [problem for one in found for problem in one.problems], signals


def files_below(root: Path) -> list[Path]:
    """Every file of the kernel's and the drivers'."""
    return sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())


@contextmanager
def spoiled(file: Path, spoil: Callable[[Path], object]) -> Iterator[None]:
    kept = file.parent.parent / f".{file.name}.kept"
    shutil.copy2(file, kept)
    try:
        spoil(file)
        yield
    finally:
        if file.is_dir():
            file.rmdir()
        kept.rename(file)


def victims(file: Path) -> set[str]:
    """Whose file it is."""
    if addresses := ADDRESS.findall(file.as_posix()):
        return {addresses[-1]}
    if "/proc/driver/nvidia" in file.as_posix():
        return {DIVIDED}
    return {MI300X}  # KFD's tables tell whose the partitions are


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_spoiled_file_is_trouble_for_its_own_gpu_alone(machine: Path, kind: str) -> None:
    before, problems, _ = seen(machine)
    assert problems == []
    assert sum(not device.unusable for device in before.values()) == 5
    for file in files_below(machine):
        with spoiled(file, GARBAGE[kind]):
            after, problems, signals = seen(machine)
        blamed = victims(file)
        for key, device in before.items():
            if not blamed & set(device.attributes["address"]):
                assert after.get(key) == device, f"{file} spoiled {key}"
        assert {problem.subject for problem in problems} <= blamed, file
        assert not [signal for signal in signals if signal.measure is None and signal.verdict.value == "now"], file
    assert seen(machine)[0] == before


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (f"proc/driver/nvidia/gpus/{NVIDIA}/information", "has no GPU UUID"),
        (f"sys/bus/pci/devices/{NVIDIA}/uevent", "which is no class"),
    ],
)
def test_a_garbled_file_is_a_problem_with_its_name(machine: Path, file: str, said: str) -> None:
    def garble(one: Path) -> None:
        one.write_bytes(one.read_bytes().replace(b"GPU-", b"\xfe\xff-").replace(b"PCI_CLASS=", b"PCI_CLASS=\xff"))

    with spoiled((machine / file).resolve(), garble):
        _, (problem, *_), _ = seen(machine)
    assert problem.subject == NVIDIA
    assert said in problem.sentence


@pytest.mark.parametrize("kind", ["missing", "binary", "truncated", "unreadable"])
@pytest.mark.parametrize("file", ["class", "vendor"])
def test_a_gpu_is_known_by_its_uevent_too(machine: Path, file: str, kind: str) -> None:
    before, _, _ = seen(machine)
    with spoiled((machine / f"sys/bus/pci/devices/{NVIDIA}/{file}").resolve(), GARBAGE[kind]):
        assert seen(machine)[0] == before


def test_what_the_driver_says_and_cannot_be_read_is_not_taken_for_missing(machine: Path) -> None:
    file = machine / f"proc/driver/nvidia/gpus/{NVIDIA}/information"
    with spoiled(file, _unreadable):
        _, (problem,), _ = seen(machine)
    assert problem.subject == NVIDIA
    assert problem.sentence.endswith("/information cannot be read: input/output error")


def test_any_files_may_be_missing(tmp_path: Path) -> None:
    root = tmp_path / "machine"
    backend(root, CONTROLS + nvidia_gpu(NVIDIA, 0) + mig(0, [(1, 0)]) + mi300x_cpx() + intel_gpu(INTEL, 40, "xe"))

    @settings(max_examples=40, deadline=None)
    @given(st.sets(st.sampled_from(entries(root))))
    def check(missing: set[Path]) -> None:
        with restored(root) as take:
            for path in missing:
                take(path)
            devices, _, signals = seen(root)
        for device in devices.values():
            assert device.unusable or device.nodes
        assert not [signal for signal in signals if signal.measure is None and signal.verdict.value == "now"]

    check()
