"""Who can write beside our sockets and our state can make us write into no other file, and serve from no other place."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.e2e.node import Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

PRECIOUS = b"root:x:0:0:root:/root:/bin/sh\n"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that is nobody's to write but its owner's."""
    file = tmp_path / "victim"
    file.write_bytes(PRECIOUS)
    return file


def is_untouched(victim: Path) -> bool:
    return victim.read_bytes() == PRECIOUS and stat.S_IMODE(victim.stat().st_mode) == 0o644


@pytest.mark.parametrize("link", [os.symlink, os.link])
async def test_a_lock_that_is_a_link_is_refused_until_it_is_gone(node: Node, victim: Path, link: object) -> None:
    node.mknod("w1")
    node.sockets.mkdir()
    assert callable(link)
    link(victim, node.sockets / "lock")
    async with AgentProcess(node.config(chardev())) as agent:
        line = await agent.says("plugin-directory-unusable")
        assert "It is a symbolic link" in line["reason"] or "It has other names" in line["reason"]
        assert is_untouched(victim)
        (node.sockets / "lock").unlink()
        await node.healthy("w1")
    assert is_untouched(victim)
    assert stat.S_ISREG((node.sockets / "lock").lstat().st_mode)


async def test_a_directory_of_ours_that_is_a_link_is_refused_until_it_is_gone(node: Node, tmp_path: Path) -> None:
    node.mknod("w1")
    (tmp_path / "elsewhere").mkdir()
    node.sockets.symlink_to(tmp_path / "elsewhere")
    async with AgentProcess(node.config(chardev())) as agent:
        line = await agent.says("plugin-directory-unusable")
        assert "It is a symbolic link" in line["reason"]
        node.sockets.unlink()
        await node.healthy("w1")
        assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["state.json", ".state.json.new"])
async def test_the_state_is_written_into_no_file_that_a_link_leads_to(node: Node, victim: Path, name: str) -> None:
    node.mknod("w1")
    node.state.mkdir()
    (node.state / name).symlink_to(victim)
    async with node.agent() as agent:
        await node.admit(pod())
        state = node.state / "state.json"
        await until(lambda: state.exists() and not state.is_symlink() and b"w1" in state.read_bytes(), "the state")
        assert stat.S_IMODE(state.lstat().st_mode) == 0o600
        assert is_untouched(victim)
        assert bool(agent.said("state-unreadable")) == (name == "state.json")
    aside = {"state.damaged.json"} if name == "state.json" else set()
    assert {path.name for path in node.state.iterdir()} - {"state.health.json"} == {"state.json"} | aside


async def test_the_file_for_feature_discovery_is_written_through_no_link(node: Node, victim: Path) -> None:
    node.mknod("w1")
    features = node.root / "features.d"
    features.mkdir()
    (features / ".fairlead.new").symlink_to(victim)
    async with node.agent(nfd_features=str(features / "fairlead")):
        await until((features / "fairlead").exists, "the features")
    assert is_untouched(victim)
    assert stat.S_IMODE((features / "fairlead").lstat().st_mode) == 0o644


async def test_what_versions_left_that_were_killed_while_they_wrote_is_removed(node: Node) -> None:
    node.mknod("w1")
    node.state.mkdir()
    for name in (".state.json.4711", ".state.json.new"):
        (node.state / name).write_bytes(b"{")
    async with node.agent():
        await node.admit(pod())
        ours = {"state.json", "state.health.json"}
        await until(
            lambda: {path.name for path in node.state.iterdir()} in (ours, ours - {"state.health.json"}), "nothing else"
        )


async def test_a_kubelets_socket_that_is_a_link_is_refused_until_it_is_gone(node: Node) -> None:
    node.mknod("w1")
    sockets = node.plugin_dir / "kubelet.sock", node.kubelet.pod_resources_socket
    for path in sockets:
        path.rename(path.with_name("elsewhere"))
        path.symlink_to("elsewhere")
    config = node.config(chardev())
    async with AgentProcess(config) as agent:
        for line in (await agent.says("kubelet-silent"), await agent.says("witness-silent", witness="podresources")):
            assert "symbolic link" in line["reason"]
        await agent.says("ready")
        code, out, _ = await finish("doctor", "--json", "--config", str(config))
        assert code == 2
        found = {it["check"]: it["found"] for it in json.loads(out)["findings"]}
        assert "symbolic link" in found["kubelet-socket"]
        assert "symbolic link" in found["podresources"]
        assert not agent.said("registered")
        for path in sockets:
            path.unlink()
            path.with_name("elsewhere").rename(path)
        await node.healthy("w1")


async def test_a_directory_of_the_kubelets_may_be_a_link(node: Node, tmp_path: Path) -> None:
    """On many nodes /var/lib/kubelet lies on another disk."""
    node.mknod("w1")
    root = tmp_path / "by-link"
    root.symlink_to(node.root)
    async with node.agent(plugin_dir=str(root / "device-plugins"), kubelet_root=str(root)) as agent:
        await node.healthy("w1")
        await node.admit(pod())
        assert not agent.said("witness-silent")
