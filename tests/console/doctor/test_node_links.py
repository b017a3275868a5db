"""Nodes that a `systemctl daemon-reload` would take from running pods are found before it happens."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from agent.console.doctor import Finding, Level
from agent.console.doctor.hardware import node_links
from agent.inventory.inventory import Inventory
from backends.base import Host, HostPath, Node
from tests.backends.trees import plant, planted_host
from tests.fakes import KIND, Fake, by_unit, device, resource

A = "a.example/gpu"
NODES = """
dev/nvidia0 c 195:0
dev/nvidiactl c 195:255
dev/odd c 240:1
dev/kvm c 10:232
sys/dev/char/10:232 -> ../../devices/virtual/misc/kvm
"""


def look(host: Host, *paths: str) -> Finding:
    """What is said where a pod may have these nodes."""
    nodes = tuple(Node(HostPath(path), path, "rw") for path in paths)
    fake = resource(A)
    inventory = Inventory([fake], {KIND: Fake(fake)})
    inventory.update(KIND, by_unit([replace(device("d", A), nodes=nodes)]))
    (finding,) = node_links(host, inventory)
    return finding


def test_a_node_that_systemd_cannot_find_is_named_with_what_makes_its_link(tmp_path: Path) -> None:
    host = planted_host(tmp_path, f"{NODES}dev/char/195:255 -> ../nvidiactl\nsys/fs/cgroup/kubepods.slice/\n")
    found = look(host, "/dev/nvidia0", "/dev/nvidiactl", "/dev/kvm", "/dev/nowhere")
    assert found.level is Level.WARNING
    assert (
        "/dev/char/195:0 is missing: the next `systemctl daemon-reload` takes /dev/nvidia0 from the pods" in found.found
    )
    assert "nvidia-ctk system create-dev-char-symlinks" in found.mend
    assert "`ln -s /dev/nvidia0 /dev/char/195:0`" in found.mend
    plant(tmp_path, "dev/char/195:0 -> ../nvidia0\n")
    assert look(host, "/dev/nvidia0", "/dev/nvidiactl").level is Level.FINE


def test_of_another_vendors_node_nvidias_tool_is_not_spoken(tmp_path: Path) -> None:
    host = planted_host(tmp_path, f"{NODES}sys/fs/cgroup/systemd/kubepods.slice/\n")
    assert look(host, "/dev/odd").mend == (
        "At each boot, before pods start, link them: by hand it is `ln -s /dev/odd /dev/char/240:1`."
    )


def test_where_the_kubelet_manages_cgroups_itself_links_do_not_matter(tmp_path: Path) -> None:
    host = planted_host(tmp_path, f"{NODES}sys/fs/cgroup/kubepods/\n")
    assert look(host, "/dev/nvidia0").level is Level.FINE
