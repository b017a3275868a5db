"""NVML's events, heard from a library in a process of its own: XIDs, ECC errors, lost GPUs, hangs, crashes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from backends.base import Heard, Record, Verdict
from backends.gpu import Gpu, nvml
from backends.interface.values import Known
from tests.backends.gpu import nvml_library
from tests.backends.gpu.gpus import backend, look, resource
from tests.backends.gpu.nvml_library import NvmlLibrary
from tests.backends.machines import CONTROLS, nvidia_gpu
from tests.backends.trees import planted_host
from tests.wait import PATIENCE

pytestmark = pytest.mark.needs("gcc", "nvidia-ml-py")

ONE, OTHER = "0000:3b:00.0", "0000:5e:00.0"


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NvmlLibrary]:
    made = nvml_library.install(monkeypatch, tmp_path / "library", ONE, OTHER)
    with closing(made):
        yield made


def listen(tmp_path: Path, *addresses: str) -> Iterator[Heard | None]:
    return nvml.listen(planted_host(tmp_path / "machine"), (), addresses)


def heard(events: Iterator[Heard | None]) -> Heard:
    return next(event for event in events if event is not None)


def test_an_xid_is_told_with_its_gpu_and_gpu_instance(tmp_path: Path, library: NvmlLibrary) -> None:
    with closing(listen(tmp_path, ONE, OTHER)) as events:  # type: ignore[type-var]
        library.order(f"xid {OTHER} 79")
        assert heard(events) == Heard("nvml", f"XID 79 of {OTHER}", {"address": OTHER, "xid": "79"})
        library.order(f"xid {ONE} 94 3")
        assert heard(events).properties == {"address": ONE, "xid": "94", "gi": "3"}
        library.order(f"ecc {ONE}")
        assert heard(events) == Heard("nvml-ecc", f"XID 48 of {ONE}", {"address": ONE, "xid": "48"})


def test_a_gpu_that_is_not_listened_to_is_not_opened(tmp_path: Path, library: NvmlLibrary) -> None:
    """Else it could not be bound to vfio-pci."""
    with closing(listen(tmp_path, ONE)) as events:  # type: ignore[type-var]
        next(events)
        assert library.calls() == ["init ", f"register {ONE}"]


def test_a_lost_gpu_takes_no_other_out_of_the_set(tmp_path: Path, library: NvmlLibrary) -> None:
    with closing(listen(tmp_path, ONE, OTHER)) as events:  # type: ignore[type-var]
        library.order(f"lost {ONE}")
        library.order(f"xid {OTHER} 48")
        assert heard(events).properties["address"] == OTHER
        assert library.calls()[1:] == [f"register {ONE}", f"register {OTHER}", f"register {OTHER}"]


def test_where_every_gpu_is_lost_it_is_said(tmp_path: Path, library: NvmlLibrary) -> None:
    library.order(f"lost {ONE}")
    with pytest.raises(nvml.NvmlError, match=f"no GPU tells .* of errors: {ONE}: GPU is lost"):
        heard(listen(tmp_path, ONE))


def test_a_library_that_crashes_while_it_waits_is_an_error_and_no_end(tmp_path: Path, library: NvmlLibrary) -> None:
    library.order("crash")
    with pytest.raises(nvml.NvmlError, match=r"crashes \(signal 6\) when it is asked"):
        heard(listen(tmp_path, ONE))


def test_a_library_that_hangs_while_it_waits_is_killed(
    tmp_path: Path, library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = listen(tmp_path, ONE)
    next(events)
    monkeypatch.setattr(nvml, "_SILENCE", 2.0)
    library.order("hang")
    with pytest.raises(nvml.NvmlError, match="does not answer"):
        heard(events)
    assert nvml._undead == []


def test_the_process_ends_with_the_daemon_that_started_it(tmp_path: Path, library: NvmlLibrary) -> None:
    """Also where that was killed; it must not keep the driver in use."""
    command = [sys.executable, "-I", nvml._SCRIPT, os.fspath(library.path), "events", ONE]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(PATIENCE) == -signal.SIGPIPE


@pytest.mark.parametrize(
    ("fault", "said"),
    [("crash", "crashes (signal 6) when it is loaded"), ("hang", "hangs when it is loaded")],
)
def test_a_broken_library_costs_nothing_but_what_it_alone_knows(
    tmp_path: Path, library: NvmlLibrary, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setenv("FAKE_NVML_INIT", fault)
    monkeypatch.setattr(nvml, "_OPENS_WITHIN", 2.0 if fault == "hang" else PATIENCE)
    machine = CONTROLS + nvidia_gpu(ONE, 0) + nvidia_gpu(OTHER, 1)
    found = look(backend(tmp_path / "machine", machine))
    assert len([d for one in found.values() for d in one.devices if not d.unusable]) == 2
    (problem,) = [problem for one in found.values() for problem in one.problems]
    assert said in problem.sentence
    assert library.calls() == ["init "]  # for all looks at once


def test_what_is_asked_leaves_nothing_of_the_library_in_the_daemon(tmp_path: Path, library: NvmlLibrary) -> None:
    known = nvml.survey(planted_host(tmp_path / "machine"), ())
    assert set(known.gpus) == {ONE, OTHER}
    assert os.fspath(library.path) not in Path("/proc/self/maps").read_text()
    assert "pynvml" not in sys.modules or sys.modules["pynvml"] is None


# --- what the backend makes of them ---


@pytest.mark.parametrize(("gi", "hardware"), [(None, f"pci:{ONE}"), ("3", f"mig:{ONE}/gi3")])
def test_an_xid_from_nvml_means_what_the_same_in_the_log_means(tmp_path: Path, gi: str | None, hardware: str) -> None:
    gpu = backend(tmp_path, "")
    properties = {"address": ONE, "xid": "79"} | ({"gi": gi} if gi else {})
    instance = f" GPU-I:0{gi}" if gi else ""
    (from_nvml,) = gpu.signals(Record("nvml", "boot", 1, 2.0, "XID 79", properties))
    (from_log,) = gpu.signals(Record("kmsg", "boot", 1, 2.0, f"NVRM: Xid (PCI:0000:3b:00{instance}): 79, off the bus"))
    assert from_nvml == from_log
    assert (from_nvml.hardware, from_nvml.verdict, from_nvml.fault) == (hardware, Verdict.NOW, f"xid-79 of {ONE}")


@pytest.mark.parametrize(
    ("nvml_events", "always", "without_log"),
    [("auto", False, True), ("always", True, False), ("never", False, False)],
)
def test_the_option_says_when_nvml_is_listened_to(
    tmp_path: Path, nvml_events: str, always: bool, without_log: bool
) -> None:
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu(ONE, 0), resource(nvml_events=nvml_events))
    known = Known()
    watches = gpu.watches({unit: found.devices for unit, found in look(gpu).items()})  # type: ignore[arg-type]
    assert (bool(watches.listen), bool(watches.listen_without_log)) == (always, without_log)
    assert watches.listen | watches.listen_without_log <= {f"pci:{ONE}"}
    assert not gpu.watches(known).listen_without_log
    resets = resource(nvml_events=nvml_events)
    gpu = Gpu(gpu.host, [replace(resets, spec=replace(resets.spec, pre_start="reset"))])
    watches = gpu.watches({unit: found.devices for unit, found in look(gpu).items()})  # type: ignore[arg-type]
    assert not watches.listen | watches.listen_without_log, "whoever listens has them open"
