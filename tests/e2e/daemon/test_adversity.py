"""What is missing or forbidden gets one clear line, however often it is tried, and heals when it is mended."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.needs import has

SOON = """
from agent.daemon import serving
from agent.kubelet import registration
serving._DIRECTORY_RETRY = registration._UNREACHABLE_DELAY = 0.01
"""
OFTEN = 20  # retries

# --- the plugin directory ---


async def test_a_missing_plugin_directory_is_waited_for(bare_node: Node) -> None:
    bare_node.mknod("w1")
    async with AgentProcess(bare_node.config(chardev()), SOON) as agent:
        said = await agent.says("plugin-directory-unusable")
        assert "No such file or directory" in said["reason"]
        await agent.takes_turns(OFTEN)
        async with bare_node.kubelet:
            await bare_node.healthy("w1")
    assert len(agent.said("plugin-directory-unusable")) == 1


async def test_a_file_in_place_of_the_plugin_directory_is_waited_out(bare_node: Node) -> None:
    bare_node.mknod("w1")
    bare_node.plugin_dir.touch()
    async with AgentProcess(bare_node.config(chardev()), SOON) as agent:
        assert "Not a directory" in (await agent.says("plugin-directory-unusable"))["reason"]
        await agent.takes_turns(OFTEN)
        bare_node.plugin_dir.unlink()
        async with bare_node.kubelet:  # makes the directory, which for a moment is "No such file", and may be said so
            await bare_node.healthy("w1")
    reasons = [said["reason"] for said in agent.said("plugin-directory-unusable")]
    assert len(reasons) == len(set(reasons))


async def test_room_on_a_full_disk_is_waited_for_and_the_message_names_the_file(node: Node) -> None:
    node.mknod("w1")
    (full := node.root / "full").touch()
    prelude = f"""
import errno, os
whole = os.pwrite
def pwrite(*arguments):
    if os.path.exists({str(full)!r}) and os.readlink(f"/proc/self/fd/{{arguments[0]}}").endswith("/fairlead/lock"):
        raise OSError(errno.ENOSPC, "No space left on device")
    return whole(*arguments)
os.pwrite = pwrite
"""
    async with AgentProcess(node.config(chardev()), SOON + prelude) as agent:
        said = await agent.says("plugin-directory-unusable")
        assert said["reason"] == f"No space left on device: {node.sockets}/lock"
        await agent.takes_turns(OFTEN)
        _, out, err = await finish("status", "--json", "--config", str(node.root / "config.toml"))
        assert f"{node.sockets}/lock" in out, err
        full.unlink()
        await node.healthy("w1")
    assert len(agent.said("plugin-directory-unusable")) == 1
    assert not agent.said("part-restarts")


@pytest.mark.needs("setpriv")
async def test_a_forbidden_plugin_directory_is_waited_for(bare_node: Node) -> None:
    bare_node.mknod("w1")
    bare_node.plugin_dir.mkdir(mode=0o555)
    config = bare_node.config(chardev())
    powerless = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if has("root") else []
    async with AgentProcess(config, SOON, wrapper=powerless) as agent:
        assert "Permission denied" in (await agent.says("plugin-directory-unusable"))["reason"]
        await agent.takes_turns(OFTEN)
        bare_node.plugin_dir.chmod(0o755)
        async with bare_node.kubelet:
            await bare_node.healthy("w1")
    assert len(agent.said("plugin-directory-unusable")) == 1


async def test_a_plugin_directory_with_a_long_path_is_served(tmp_path: Path) -> None:
    home = tmp_path.parent  # whose name is not already too long
    root = home / ("long" + "g" * (75 - len(f"{home}/long/device-plugins")))
    root.mkdir()
    node = Node(root)
    node.mknod("w1")
    async with node.kubelet, node.agent():
        await node.healthy("w1")


# --- sockets ---


async def test_a_dead_kubelets_socket_is_reported_once(bare_node: Node) -> None:
    bare_node.mknod("w1")
    bare_node.plugin_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(bare_node.plugin_dir / "kubelet.sock"))
    async with AgentProcess(bare_node.config(chardev(), chardev("/dev/v*", "fl.test/v")), SOON) as agent:
        said = await agent.says("kubelet-silent")
        assert "Connection refused" in said["reason"]
        await agent.takes_turns(OFTEN)
        async with bare_node.kubelet:
            await bare_node.registered(WIDGET, "fl.test/v")
            await bare_node.healthy("w1")
            assert len(agent.said("kubelet-silent")) == 1  # here: once it has stopped it is silent again
            assert not agent.said("not-registered")


async def test_stale_sockets_of_ours_are_replaced_or_removed(node: Node) -> None:
    node.mknod("w1")
    node.sockets.mkdir()
    for name in ("fl.test_widget.sock", "fl.test_gone.sock", ".4242"):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(node.sockets / name))
    async with node.agent() as agent:
        await node.healthy("w1")
        assert node.served() == {"fl.test_widget.sock"}
        assert not [line for line in agent.log if line["level"] in ("warning", "error")]


async def test_a_socket_of_ours_that_somebody_removes_is_made_again(node: Node) -> None:
    node.mknod("w1")
    async with node.agent():
        await node.healthy("w1")
        node.remove(node.sockets)
        await node.kubelet.restart()
        await node.registered()
        await node.healthy("w1")
        assert node.served() == {"fl.test_widget.sock"}


# --- the state directory ---

FULL = """
from contextlib import suppress
from pathlib import Path
from tests.e2e import hermetic
hermetic.isolate()
hermetic.private_tmpfs({directory!r})
with suppress(OSError):
    Path({directory!r}, "filler").write_bytes(bytes(32 << 20))
"""


@pytest.mark.needs("namespaces")
async def test_a_full_state_directory_is_reported_once_and_refuses_nothing(node: Node) -> None:
    node.mknod("w1", "w2", "w3")
    node.state.mkdir()
    async with node.agent(prelude=FULL.format(directory=str(node.state))) as agent:
        await node.healthy("w1", "w2", "w3")
        for name in ("one", "two"):
            assert (await node.admit(pod(name))).phase == "Running"
        assert "No space left" in (await agent.says("state-not-written"))["reason"]
        Path(f"/proc/{agent.pid}/root{node.state}/filler").unlink()
        assert (await node.admit(pod("three"))).phase == "Running"
        await agent.says("state-written-again")
        assert len(agent.said("state-not-written")) == 1


async def test_a_file_in_place_of_the_state_directory_is_reported_and_refuses_nothing(node: Node) -> None:
    node.mknod("w1", "w2")
    node.state.touch()
    async with node.agent() as agent:
        await node.healthy("w1", "w2")
        assert (await node.admit(pod("one"))).phase == "Running"
        await agent.says("state-not-written")
        node.state.unlink()
        assert (await node.admit(pod("two"))).phase == "Running"
        await agent.says("state-written-again")
        assert len([line for line in agent.log if line["level"] in ("warning", "error")]) <= 2


@pytest.mark.parametrize("content", ["", '{"version": 99}', '{"claims": [7]}', "\0"], ids=repr)
async def test_a_broken_state_file_is_reported_and_the_kubelet_asked(node: Node, content: str) -> None:
    node.mknod("w1")
    holder = pod()
    async with node.agent():
        await node.healthy("w1")
        await node.admit(holder)
    (node.state / "state.json").write_text(content)
    node.unlink("w1")
    async with node.agent() as agent:
        await agent.says("state-unreadable")
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {"w1"})


# --- events ---

NO_NETLINK = """
import socket
from agent.runtime import watchdog
watchdog._FIRST_DELAY = watchdog._MOST_DELAY = 0.01

class WithoutUevents(socket.socket):
    def __init__(self, family=-1, type=-1, proto=-1, fileno=None):
        if (family, proto) == (socket.AF_NETLINK, 15):
            raise PermissionError(1, "Operation not permitted")
        super().__init__(family, type, proto, fileno)

socket.socket = WithoutUevents
"""


async def test_without_hot_plug_events_inotify_still_sees_nodes(node: Node) -> None:
    async with node.agent(prelude=NO_NETLINK, uevents="kernel") as agent:
        said = await agent.says("part-restarts", part="uevents")
        assert "allow AF_NETLINK" in said["reason"]
        node.mknod("w1")
        await node.healthy("w1")
        await agent.takes_turns(OFTEN)
        assert len(agent.said("part-restarts", part="uevents")) == 1
