"""Each check of the doctor finds what it is for, says how to mend it, and keeps quiet where all is well."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from agent.cli.doctor import CHECKS, examine
from agent.config import AgentConfig, Config
from agent.console.doctor import Check, Finding, Level, Patient, host, kubelet
from agent.kubelet.witnesses import FILE_NAME
from backends.base import Host, Resource, ResourceSpec
from backends.chardev.options import CharDevOptions, PathOption
from backends.gpu import GpuOptions
from backends.infiniband.options import InfiniBandOptions
from backends.sriov.options import SriovOptions
from backends.vfio.options import VfioOptions
from tests.backends.trees import plant, planted_host


@pytest.fixture
def patient(tmp_path: Path) -> Patient:
    """A node where all is well, and this process's own /proc as text."""
    node = planted_host(tmp_path / "host", "dev/kmsg\nsys/devices/system/\nproc/1/ns/net = same\n")
    (node.proc / "1/ns/pid").symlink_to("pid:[4026531836]")
    own = tmp_path / "own"
    plant(own, "self/status = CapEff: 000001ffffffffff\nself/uid_map = 0 0 4294967295\nself/attr/current = spc_t\n")
    (own / "self/ns").mkdir()
    os.link(node.proc / "1/ns/net", own / "self/ns/net")
    (own / "self/mountinfo").write_text(
        f"20 1 0:5 / {tmp_path} rw - ext4 /dev/sda rw\n21 20 0:6 / {node.dev} rw shared:2 - devtmpfs udev rw\n"
    )
    plugins = tmp_path / "plugins"
    plugins.mkdir()
    settings = AgentConfig(plugin_dir=plugins, kubelet_root=tmp_path / "kubelet", state_dir=tmp_path / "state")
    return Patient(Config(settings, node), own)


def with_resource(patient: Patient, backend: str, options: Any = None, **spec: Any) -> Patient:
    resource: Resource[Any] = Resource("a.b/c", ResourceSpec(backend, options, **spec))
    return replace(patient, config=replace(patient.config, resources=(resource,)))


def with_settings(patient: Patient, **settings: Any) -> Patient:
    return replace(patient, config=replace(patient.config, agent=replace(patient.config.agent, **settings)))


def one(check: Check, patient: Patient) -> Finding:
    (finding,) = check(patient)
    assert (finding.level is Level.FINE) == (finding.mend == "")
    return finding


@contextmanager
def answering(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        yield


def test_where_all_is_well_nothing_is_to_be_mended(patient: Patient) -> None:
    settings = patient.config.agent
    (settings.plugin_dir / "fairlead").mkdir()
    with (
        answering(settings.plugin_dir / "kubelet.sock"),
        answering(settings.kubelet_root / "pod-resources/kubelet.sock"),
        (settings.plugin_dir / "fairlead/lock").open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        findings = list(examine(patient))
    assert {finding.check for finding in findings} == set(CHECKS)
    assert [finding for finding in findings if finding.level is not Level.FINE] == []


def test_a_check_that_fails_itself_ends_no_other(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_patient: Patient) -> Iterator[Finding]:
        raise ZeroDivisionError

    monkeypatch.setattr("agent.cli.doctor.CHECKS", {"broken": broken, "sysfs": host.sysfs})
    assert [(finding.check, finding.level) for finding in examine(patient)] == [
        ("broken", Level.WARNING),
        ("sysfs", Level.FINE),
    ]


# --- the kubelet ---


def test_a_plugin_directory_that_is_missing(patient: Patient) -> None:
    patient.config.agent.plugin_dir.rmdir()
    finding = one(kubelet.plugin_directory, patient)
    assert finding.level is Level.FAILURE
    assert "agent.plugin_dir" in finding.mend


def test_a_plugin_directory_that_is_a_file(patient: Patient, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert (
        "is no directory" in one(kubelet.plugin_directory, with_settings(patient, plugin_dir=tmp_path / "file")).found
    )


def test_a_plugin_directory_on_a_read_only_file_system(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert "without readOnly" in one(kubelet.plugin_directory, patient).mend


def test_a_kubelet_that_is_not_there(patient: Patient) -> None:
    assert "does not exist" in one(kubelet.kubelet_socket, patient).found


def test_a_plugin_directory_that_is_the_containers_own_is_not_blamed_on_the_kubelet(patient: Patient) -> None:
    mounts = patient.proc / "self/mountinfo"
    mounts.write_text(f"30 1 0:9 / {patient.config.agent.plugin_dir} rw - overlay overlay rw\n")
    mend = one(kubelet.kubelet_socket, patient).mend
    assert mend.endswith("is of type overlay, as what a container has by itself: mount the host's there (hostPath).")


def test_a_kubelet_that_died_and_left_its_socket(patient: Patient) -> None:
    with answering(path := patient.config.agent.plugin_dir / "kubelet.sock"):
        pass
    assert path.exists()
    assert "Nobody answers" in one(kubelet.kubelet_socket, patient).found


def test_podresources_that_are_missing_stop_nothing(patient: Patient) -> None:
    assert one(kubelet.podresources, patient).level is Level.WARNING


def test_a_checkpoint_that_cannot_be_read(patient: Patient) -> None:
    (patient.config.agent.plugin_dir / FILE_NAME).mkdir()
    assert "is a directory" in one(kubelet.checkpoint, patient).found


@pytest.mark.parametrize(
    ("free", "files", "why"),
    [(0, 9, "disk is full"), (4096, 9, "disk is full"), (1 << 30, 0, "for another file")],
)
def test_a_disk_on_which_the_kubelet_cannot_write_its_checkpoint(
    patient: Patient, monkeypatch: pytest.MonkeyPatch, free: int, files: int, why: str
) -> None:
    """Kubelet contract: A11.3."""
    (patient.config.agent.plugin_dir / FILE_NAME).write_bytes(bytes(5000))
    found = os.statvfs(patient.config.agent.plugin_dir)
    values = list(found)
    values[1], values[3], values[5], values[6] = 4096, free // 4096, 1000, files
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(values))
    _, full = kubelet.checkpoint(patient)
    assert full.level is Level.FAILURE
    assert why in full.found
    assert "refuses each pod" in full.found


def test_no_agent_has_ever_run(patient: Patient) -> None:
    assert "has run" in one(kubelet.agent, patient).found


def test_an_agent_that_is_gone_and_one_that_runs(patient: Patient) -> None:
    (patient.config.agent.plugin_dir / "fairlead").mkdir()
    with (patient.config.agent.plugin_dir / "fairlead/lock").open("w") as lock:
        lock.write("4711")
        lock.flush()
        assert one(kubelet.agent, patient).level is Level.FAILURE
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert one(kubelet.agent, patient).found == "Fairlead runs as process 4711."


# --- the process ---


def test_missing_rights_are_told_where_something_that_is_configured_needs_them(patient: Patient) -> None:
    (patient.proc / "self/status").write_text("CapEff:\t0000000000000000\n")  # as in the hardened overlay
    patient = replace(patient, uid=0)
    assert one(host.capabilities, patient).level is Level.FINE
    assert "CAP_DAC_OVERRIDE" in one(host.capabilities, replace(patient, uid=65534)).found
    found = one(host.capabilities, with_resource(patient, "vfio", VfioOptions(bind="allocate"))).found
    assert "CAP_SYS_PTRACE: what the host has mounted" in found
    assert f"the right to write to {patient.config.host.sys}: drivers cannot be bound" in found
    found = one(host.capabilities, with_resource(patient, "vfio", VfioOptions(), pre_start="reset")).found
    assert ("CAP_SYS_PTRACE" in found, "hardware cannot be reset" in found) == (False, True)


def test_selinux_keeps_a_container_from_the_kubelet(patient: Patient) -> None:
    plant(patient.config.host.sys, "fs/selinux/enforce = 1\n")
    assert one(host.selinux, patient).level is Level.FINE
    (patient.proc / "self/attr/current").write_text("system_u:system_r:container_t:s0:c1,c2\0")
    assert "container_device_plugin_t" in one(host.selinux, patient).mend


def test_events_that_are_off(patient: Patient) -> None:
    assert "within 300 s only" in one(host.events, with_settings(patient, uevents="off")).found


def test_a_user_namespace_gets_no_events(patient: Patient) -> None:
    (patient.proc / "self/uid_map").write_text("         0     100000      65536\n")
    assert "hostUsers" in one(host.events, patient).mend


def test_udevs_events_without_a_udevd(patient: Patient) -> None:
    udev = with_settings(patient, uevents="udev")
    assert one(host.events, udev).level is Level.FAILURE
    plant(patient.config.host.run, "udev/control\n")
    assert one(host.events, udev).found == "They come from udevd."


def test_udevs_events_stay_in_the_hosts_network(patient: Patient) -> None:
    udev = with_settings(patient, uevents="udev")
    plant(patient.config.host.run, "udev/control\n")
    (patient.proc / "self/ns/net").unlink()
    (patient.proc / "self/ns/net").touch()
    found = one(host.events, udev)
    assert (found.level, "network namespace" in found.found, "hostNetwork" in found.mend) == (Level.FAILURE, True, True)
    assert one(host.events, patient).found == "They come from the kernel."


def test_another_network_matters_to_those_who_need_its_events(patient: Patient) -> None:
    (patient.proc / "self/ns/net").unlink()
    (patient.proc / "self/ns/net").touch()
    assert one(host.network, patient).level is Level.FINE
    assert one(host.network, with_resource(patient, "infiniband")).mend == "Set hostNetwork: true."


def test_a_containers_own_proc_does_not_tell_of_the_hosts_network(patient: Patient) -> None:
    (patient.config.host.proc / "1/ns/pid").unlink()
    (patient.config.host.proc / "1/ns/pid").symlink_to("pid:[4026532201]")
    assert one(host.network, patient).found == "Nothing needs the host's."
    assert "host.proc" in one(host.network, with_resource(patient, "infiniband")).mend


# --- the host ---


def test_a_sys_that_is_none(patient: Patient) -> None:
    empty = replace(patient, config=replace(patient.config, host=Host(sys=Path("/nonesuch"))))
    assert one(host.sysfs, empty).level is Level.FAILURE


def test_a_dev_that_is_the_containers_own(patient: Patient) -> None:
    mounts = patient.proc / "self/mountinfo"
    mounts.write_text(mounts.read_text().replace("devtmpfs", "tmpfs"))
    assert "Mount the host's /dev" in one(host.dev, patient).mend


def test_a_mount_point_with_a_space_is_understood(patient: Patient, tmp_path: Path) -> None:
    (patient.proc / "self/mountinfo").write_text("1 0 0:1 / /with\\040space rw - xfs /dev/sdb rw\ngarbage\n")
    assert host.filesystem(patient, Path("/with space/below")) == "xfs"


def test_a_kernel_log_that_an_nvidia_gpu_needs(patient: Patient) -> None:
    wanting = with_resource(patient, "gpu")
    assert one(host.kernel_log, wanting).level is Level.FINE
    (patient.config.host.dev / "kmsg").unlink()
    assert "XID" in one(host.kernel_log, wanting).found


def test_a_device_cgroup_that_denies_the_kernel_log_is_named_and_a_missing_capability_is_not_taken_for_one(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "open", refuse)
    wanting = with_resource(patient, "gpu")
    finding = one(host.kernel_log, wanting)
    assert "the device cgroup of this process's own container denies it" in finding.found
    assert "privileged" in finding.mend
    assert "DeviceAllow" in finding.mend
    plant(patient.proc, "self/status = CapEff: 0000000000000000\n")
    finding = one(host.kernel_log, wanting)
    assert "cgroup" not in finding.found
    assert "CAP_SYSLOG" in finding.mend


def test_a_module_that_makes_a_configured_node_and_is_not_loaded(patient: Patient) -> None:
    wanting = with_resource(patient, "chardev", CharDevOptions(paths=[PathOption("/dev/kvm")]))
    assert "kvm_intel" in one(host.modules, wanting).mend
    assert one(host.modules, wanting).level is Level.WARNING  # without a file nobody has asked for it
    written = replace(wanting, config=replace(wanting.config, source=Path("/etc/fairlead/config.toml")))
    assert one(host.modules, written).level is Level.FAILURE
    plant(patient.config.host.sys, "module/kvm/\n")
    assert one(host.modules, wanting).level is Level.FINE


def test_a_module_whose_nodes_a_glob_names(patient: Patient) -> None:
    wanting = with_resource(patient, "chardev", CharDevOptions(paths=[PathOption("/dev/i2c-*")]))
    assert one(host.modules, wanting).mend == "Load it: modprobe i2c-dev"
    plant(patient.config.host.dev, "i2c-7 c 89:7")
    assert one(host.modules, wanting).level is Level.FINE


def test_nodes_that_pods_go_without_are_told_with_their_modules(patient: Patient) -> None:
    wanting = with_resource(patient, "infiniband", InfiniBandOptions(issm=False))
    assert one(host.modules, wanting).level is Level.FINE  # there is no adapter
    plant(patient.config.host.sys, "class/infiniband/mlx5_0/\n")
    connections, management = host.modules(wanting)
    assert connections.found == "/dev/infiniband/rdma_cm is not there: pods with a.b/c go without it."
    assert (connections.mend, management.mend) == ("Load it: modprobe rdma_ucm", "Load it: modprobe ib_umad")
    plant(patient.config.host.dev, "infiniband/rdma_cm c 10:121\ninfiniband/umad3 c 231:3")
    assert one(host.modules, wanting).level is Level.FINE


def test_nvidias_memory_node_that_is_missing_beside_its_gpus(patient: Patient) -> None:
    wanting = with_resource(patient, "gpu", GpuOptions())
    assert one(host.modules, wanting).level is Level.FINE
    plant(patient.config.host.dev, "nvidiactl c 195:255")
    assert "nvidia-modprobe -u -c=0" in one(host.modules, wanting).mend


def test_onload_that_is_not_loaded_for_its_cards(patient: Patient) -> None:
    assert "onload_tool reload" in one(host.modules, with_resource(patient, "solarflare")).mend


def test_a_state_directory_that_cannot_be_written_to(patient: Patient) -> None:
    finding = one(host.state_directory, with_settings(patient, state_dir=Path("/proc/sys/nonesuch")))
    assert finding.level is Level.WARNING


def test_a_state_directory_on_a_full_file_system(patient: Patient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=0, f_bavail=0, f_frsize=4096))
    assert "is full" in one(host.state_directory, patient).found


def test_a_sys_that_is_read_only_matters_to_those_who_write_it(
    patient: Patient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert one(host.sysfs, patient).level is Level.FINE
    assert one(host.sysfs, with_resource(patient, "sriov", SriovOptions())).level is Level.FINE
    for writing in (
        with_resource(patient, "gpu", pre_start="reset"),
        with_resource(patient, "sriov", SriovOptions(create={"ens1f0": 8})),
    ):
        assert "can bind no driver, make no function and reset nothing" in one(host.sysfs, writing).found
