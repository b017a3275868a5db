"""Pods that run, by the cgroups that the kubelet makes for them."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.kubelet.witnesses import running_pods
from tests.backends.trees import planted_host

ONE, TWO = "0d1f1f4e-8a6a-4c39-9d2c-7a2e5c1f3d11", "6b0b1c6e-8a6a-4c39-9d2c-7a2e5c1f3d11"
STATIC = "3f1c0b8a5d2e4f60718293a4b5c6d7e8"
# names: pkg/kubelet/cm/cgroup_manager_linux.go, pod_container_manager_linux.go; `cgroup.events`: cgroup-v2.rst
SYSTEMD = f"""
sys/fs/cgroup/cgroup.controllers = cpu memory
sys/fs/cgroup/system.slice/fairlead.service/cgroup.events = populated 1
sys/fs/cgroup/kubepods.slice/cgroup.events = populated 1
sys/fs/cgroup/kubepods.slice/kubepods-pod{TWO.replace("-", "_")}.slice/cgroup.events = populated 0\\nfrozen 0
sys/fs/cgroup/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{ONE.replace("-", "_")}.slice/cgroup.events = populated 1\\nfrozen 0
"""
CGROUPFS = f"""
sys/fs/cgroup/cgroup.controllers = cpu memory
sys/fs/cgroup/kubepods/besteffort/pod{ONE}/cgroup.events = populated 1
sys/fs/cgroup/kubepods/burstable/pod{TWO}/cgroup.events = populated 0
"""
KIND = f"""
sys/fs/cgroup/cgroup.controllers = cpu memory
sys/fs/cgroup/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{ONE.replace("-", "_")}.slice/cgroup.events = populated 1
"""
FIRST = f"""
sys/fs/cgroup/pids/kubepods/pod{TWO}/cgroup.procs
sys/fs/cgroup/pids/kubepods/pod{TWO}/4a5b/cgroup.procs
sys/fs/cgroup/pids/kubepods/burstable/pod{ONE}/cgroup.procs
sys/fs/cgroup/pids/kubepods/burstable/pod{ONE}/9c0d/cgroup.procs = 4711
"""


@pytest.mark.parametrize("tree", [SYSTEMD, CGROUPFS, KIND, FIRST], ids=["systemd", "cgroupfs", "kind", "cgroup v1"])
def test_a_pod_runs_while_its_cgroup_has_a_process(tmp_path: Path, tree: str) -> None:
    assert running_pods(planted_host(tmp_path, tree).sys) == frozenset({ONE})


def test_a_static_pod_has_a_hash_for_its_uid(tmp_path: Path) -> None:
    tree = f"sys/fs/cgroup/kubepods/pod{STATIC}/cgroup.events = populated 1"
    assert running_pods(planted_host(tmp_path, tree).sys) == frozenset({STATIC})


@pytest.mark.parametrize("tree", ["", "sys/fs/cgroup/cgroup.controllers = cpu\nsys/fs/cgroup/cgroup.procs = 1"])
def test_where_no_pods_cgroup_is_to_be_seen_nothing_is_known(tmp_path: Path, tree: str) -> None:
    """As in a container that has not the host's /sys."""
    assert running_pods(planted_host(tmp_path, tree).sys) is None


@pytest.mark.parametrize(
    "group", ["kubepods.slice", "kubepods", "kubelet.slice/kubelet-kubepods.slice", "kubelet/kubepods"]
)
def test_a_node_without_pods_is_seen_to_have_none(tmp_path: Path, group: str) -> None:
    tree = f"sys/fs/cgroup/cgroup.controllers = pids\nsys/fs/cgroup/{group}/cgroup.procs =\n"
    assert running_pods(planted_host(tmp_path, tree).sys) == frozenset()
