"""NVIDIA's management library: found, asked, broken, hanging; the NVLinks and the drained GPUs it knows of."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from backends.base import HostPath, Link
from backends.gpu import nvml
from tests.backends.gpu.fake_nvml import ADDRESS, DIVIDED, KNOWN, MIG1, MIG2, FakeGpu, Install
from tests.backends.gpu.gpus import backend, devices, given, look, offered, resource
from tests.backends.machines import CONTROLS, H100, hgx_h100, information, nvidia_gpu, uuid
from tests.backends.trees import plant, planted_host
from tests.wait import PATIENCE, settled

pytestmark = pytest.mark.usefixtures("no_nvml")


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("Unknown Error", "Unknown Error"),
        ("Driver/library version mismatch", "an upgrade without a reboot, and no new container can use a GPU: reboot"),
    ],
)
def test_where_the_library_fails_the_whole_gpus_are_offered_and_it_is_told_once(
    tmp_path: Path, install_nvml: Install, fault: str, told: str
) -> None:
    install_nvml(fault=fault)
    found = look(backend(tmp_path, hgx_h100()))
    assert len([d for one in found.values() for d in one.devices if not d.unusable]) == 8
    (problem,) = [problem for one in found.values() for problem in one.problems]
    assert problem.subject == "NVML"
    assert told in problem.sentence


def test_the_library_is_asked_again_only_when_the_driver_shows_something_else(
    tmp_path: Path, install_nvml: Install
) -> None:
    library = install_nvml(KNOWN)
    gpu = backend(tmp_path, DIVIDED)
    for _ in range(3):
        look(gpu)
    assert library.opened == 1
    plant(tmp_path, "proc/driver/nvidia/capabilities/gpu0/mig/gi3/ci0/access = DeviceFileMinor: 7")
    look(gpu)
    assert library.opened == 2


def test_a_survey_is_kept_however_often_it_is_asked_for_drained_gpus_meanwhile(
    tmp_path: Path, install_nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A survey may take seconds on each GPU; each ninth probe threw it away."""
    monkeypatch.setattr(nvml, "_KEPT_FOR", 1e-9)
    library = install_nvml(KNOWN)
    gpu = backend(tmp_path, DIVIDED)
    for _ in range(20):
        for device in devices(gpu).values():
            list(gpu.probe(device))
    assert library.asked_for_drains >= 20
    assert library.opened == 1


def test_a_library_that_hangs_holds_up_one_look_and_no_other(
    tmp_path: Path, install_nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install_nvml(KNOWN)
    inside, over = threading.Event(), threading.Event()

    def hang() -> None:
        inside.set()
        over.wait()

    monkeypatch.setattr(library, "nvmlInit", hang)
    monkeypatch.setattr(nvml, "_PATIENCE", 0.01)
    gpu = backend(tmp_path, DIVIDED + nvidia_gpu("0000:5e:00.0", 1))
    thread = threading.Thread(target=gpu.discover, args=["nvlink"])
    thread.start()
    try:
        inside.wait()
        (whole,) = gpu.discover("0000:5e:00.0").devices
        assert whole.unusable == ""
        with pytest.raises(nvml.UnansweredError):
            gpu.discover(ADDRESS)  # so that its MIG devices stay as they were seen last
        assert [signal.reason for signal in gpu.probe(whole) if signal.measure is None] == []
    finally:
        over.set()
        thread.join()
    assert offered(gpu) == sorted([uuid(1), MIG1, MIG2])


def test_a_gpu_that_was_drained_stays_so_while_the_library_is_asked_something_that_takes_long(
    tmp_path: Path, install_nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = FakeGpu("0000:5e:00.0", uuid(1), drained=True)
    library = install_nvml(KNOWN, gone)
    inside, over = threading.Event(), threading.Event()
    gpu = backend(tmp_path, DIVIDED + nvidia_gpu("0000:5e:00.0", 1))
    (whole,) = gpu.discover("0000:5e:00.0").devices

    def hang() -> None:
        inside.set()
        over.wait()

    def said() -> list[str]:
        return [signal.reason for signal in gpu.probe(whole) if signal.measure is None]

    assert said() == ["nvidia-drained"]
    monkeypatch.setattr(library, "nvmlInit", hang)
    monkeypatch.setattr(nvml, "_PATIENCE", 0.01)
    monkeypatch.setattr(nvml, "_KEPT_FOR", 1e-9)
    plant(tmp_path, "proc/driver/nvidia/capabilities/gpu0/mig/gi3/ci0/access = DeviceFileMinor: 7")
    thread = threading.Thread(target=gpu.discover, args=["nvlink"])
    thread.start()
    try:
        inside.wait()
        assert said() == ["nvidia-drained"]
    finally:
        over.set()
        thread.join()


def test_two_looks_at_once_both_hear_what_the_library_says(
    tmp_path: Path, install_nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a configuration is tried beside the one in force: else the MIG devices would go for a while."""
    library = install_nvml(KNOWN)
    inside, over, seen = threading.Event(), threading.Event(), list[list[str]]()

    def slow() -> None:
        inside.set()
        over.wait()

    monkeypatch.setattr(library, "nvmlInit", slow)
    monkeypatch.setattr(nvml, "_PATIENCE", PATIENCE)
    gpu = backend(tmp_path, DIVIDED)
    threads = [threading.Thread(target=lambda: seen.append(offered(gpu))) for _ in range(2)]
    threads[0].start()
    inside.wait()
    threads[1].start()
    asyncio.run(settled())
    over.set()
    for thread in threads:
        thread.join()
    assert seen == [[MIG1, MIG2]] * 2


def test_the_library_knows_the_uuid_of_a_gpu_that_was_never_used(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(FakeGpu(ADDRESS, uuid(0)))
    gpu = backend(tmp_path, nvidia_gpu(ADDRESS, 0))
    unknown = information(0, "H100", gpu_uuid="GPU-????????-????-????-????-????????????")
    plant(tmp_path, f"proc/driver/nvidia/gpus/{ADDRESS}/information = {unknown}")
    assert offered(gpu) == [uuid(0)]


@pytest.mark.parametrize("asks", [{"serve": "dra"}, {"select": {"architecture": ("Hopper",)}}])
def test_a_gpu_says_what_pods_choose_it_by(tmp_path: Path, install_nvml: Install, asks: Any) -> None:
    install_nvml(FakeGpu(ADDRESS, uuid(0)))
    version = "\nsys/module/nvidia/version = 580.159.04\n"
    gpu = backend(tmp_path, CONTROLS + nvidia_gpu(ADDRESS, 0) + version, wanted := resource(**asks))
    (found,) = devices(gpu).values()
    assert wanted.refuses(found) is None
    told = {
        "architecture": "Hopper",
        "brand": "Nvidia",
        "compute_capability": "9.0",
        "cuda_version": "13.1",
        "driver_version": "580.159.04",
        "memory": "81920",
    }
    assert {name: found.attributes[name] for name in told} == {name: (value,) for name, value in told.items()}
    assert "addressing_mode" not in found.attributes


def test_a_part_of_a_gpu_has_a_memory_of_its_own(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(KNOWN)
    found = devices(backend(tmp_path, DIVIDED, resource(serve="dra")))
    assert {key: found[key].attributes["memory"] for key in (uuid(0), MIG1)} == {uuid(0): ("81920",), MIG1: ("9856",)}
    assert found[MIG1].attributes["architecture"] == ("Hopper",)


def test_the_library_is_not_asked_what_no_resource_needs(tmp_path: Path, install_nvml: Install) -> None:
    library = install_nvml(FakeGpu(ADDRESS, uuid(0)))
    by_another = resource(select={"address": ("0000:ff:00.0",)}, serve="dra", mig_devices=False)
    (found,) = devices(
        backend(tmp_path, CONTROLS + nvidia_gpu(ADDRESS, 0), resource(mig_devices=False), by_another)
    ).values()
    assert not {"memory", "architecture", "driver_version"} & found.attributes.keys()
    assert library.opened == 0


def test_one_dead_gpu_does_not_hide_the_others_from_the_library(tmp_path: Path, install_nvml: Install) -> None:
    install_nvml(FakeGpu("0000:01:00.0", uuid(9), dead=True), KNOWN)
    assert offered(backend(tmp_path, DIVIDED)) == [MIG1, MIG2]


def test_a_gpu_that_nvidia_smi_drain_took_out_is_unhealthy_and_has_no_index(
    tmp_path: Path, install_nvml: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvml, "_KEPT_FOR", 1e9)
    gone = FakeGpu(f"0000:{H100[1]}.0", uuid(1), drained=True)
    library = install_nvml(FakeGpu(f"0000:{H100[0]}.0", uuid(0)), gone)
    by_index = resource(device_id_strategy="index")
    gpu = backend(tmp_path, hgx_h100(), by_index)
    found = devices(gpu)
    said = {n: [s.reason for s in gpu.probe(found[uuid(n)]) if s.measure is None] for n in range(3)}
    assert said == {0: [], 1: ["nvidia-drained"], 2: []}
    assert given(gpu, by_index, uuid(0), uuid(2)).env == {"NVIDIA_VISIBLE_DEVICES": "0,1"}
    assert library.asked_for_drains == 8  # of each GPU once, whoever looks
    assert library.opened == 1  # for the survey: to ask for drains must not start GPUs


# --- the library itself ---


def test_the_library_is_looked_for_below_the_hosts_the_operators_gkes_and_the_configured_root(tmp_path: Path) -> None:
    looked_for = nvml._candidates(planted_host(tmp_path), (HostPath("/opt/driver"),))
    for root in ("", "run/nvidia/driver", "home/kubernetes/bin/nvidia", "opt/driver"):
        assert os.fspath(tmp_path / root / "lib64/libnvidia-ml.so.1") in looked_for


@pytest.mark.needs("nvidia-ml-py")
def test_a_file_that_is_no_library_costs_nothing_but_what_a_library_alone_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "libnvidia-ml.so.1"
    fake.write_bytes(b"\0" * 4096)
    monkeypatch.setattr(nvml, "_is_installed", lambda: True)
    monkeypatch.setattr(nvml, "_library", lambda *_: os.fspath(fake))
    found = look(backend(tmp_path / "machine", hgx_h100()))
    assert len([d for one in found.values() for d in one.devices if not d.unusable]) == 8
    (problem,) = [problem for one in found.values() for problem in one.problems]
    assert "invalid ELF header" in problem.sentence


def test_a_machine_with_one_gpu_is_not_asked_for_nvlinks(tmp_path: Path, install_nvml: Install) -> None:
    library = install_nvml(KNOWN)
    backend(tmp_path, nvidia_gpu(ADDRESS, 0)).discover("nvlink")
    assert library.opened == 0


# --- NVLink ---


def test_nvlinks_of_the_hybrid_cube_mesh(tmp_path: Path, install_nvml: Install) -> None:
    mesh = {"0000:06:00.0": {"0000:07:00.0": 1, "0000:0a:00.0": 2}, "0000:07:00.0": {"0000:06:00.0": 1}}
    mesh |= {"0000:0a:00.0": {"0000:06:00.0": 2}}
    gpus = [
        FakeGpu(a, uuid(n), peers={f"0000{peer.upper()}": k for peer, k in mesh[a].items()}) for n, a in enumerate(mesh)
    ]
    install_nvml(*gpus)
    machine = "".join(nvidia_gpu(address, n) for n, address in enumerate(mesh))
    assert look(backend(tmp_path, machine))["nvlink"].links == (
        Link("pci:0000:06:00.0", "pci:0000:07:00.0", 1),
        Link("pci:0000:06:00.0", "pci:0000:0a:00.0", 2),
    )


def test_nvlinks_through_switches_join_every_pair(tmp_path: Path, install_nvml: Install) -> None:
    addresses = [f"0000:{n:02x}:00.0" for n in range(1, 9)]
    switches = {"00000000:C1:00.0": 9, "00000000:C2:00.0": 9}
    install_nvml(*(FakeGpu(address, uuid(n), peers=switches) for n, address in enumerate(addresses)))
    machine = "".join(nvidia_gpu(address, n) for n, address in enumerate(addresses))
    links = look(backend(tmp_path, machine))["nvlink"].links
    assert len(links) == 8 * 7 // 2
    assert {link.weight for link in links} == {18}
