"""On a node where nothing is registered, or offered, one call of `doctor` or `explain` names the cause."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from grpclib.const import Status
from grpclib.exceptions import GRPCError

from agent.kubelet.api.v1beta1 import Empty, RegisterRequest, RegistrationBase
from agent.kubelet.server import SocketServer
from tests.backends.machines import intel_gpu
from tests.backends.trees import planted_host
from tests.e2e.node import WIDGET, Node, chardev
from tests.e2e.process import AgentProcess, Process, finish
from tests.simulation.plugin import ToyPlugin, devices, recorded
from tests.wait import until

OTHER = "fl.test/other"
STUB = '[[resource]]\nname = "fl.test/stub"\nbackend = "stub"\ndevices = [{ attributes = { model = "x1" } }]\n'


async def says(command: str, config: Path, *arguments: str) -> str:
    """What a command prints, on one line: where lines are broken does not matter here."""
    _, out, err = await finish(command, "--config", str(config), *arguments)
    return " ".join((out + err).split())


async def test_the_kubelet_is_absent(bare_node: Node) -> None:
    bare_node.plugin_dir.mkdir()
    config = bare_node.config(chardev())
    async with AgentProcess(config) as agent:
        await agent.says("waiting-for-kubelet")
        said = await says("doctor", config)
    assert f"failure kubelet-socket {bare_node.plugin_dir}/kubelet.sock does not exist" in said
    assert f"It is waiting for {bare_node.plugin_dir}/kubelet.sock" in said


async def test_the_plugin_directory_is_elsewhere(node: Node) -> None:
    config = node.config(chardev(), plugin_dir=str(node.root / "elsewhere"))
    async with AgentProcess(config) as agent:
        await agent.says("plugin-directory-unusable")
        said = await says("doctor", config)
    assert f"failure plugin-directory {node.root}/elsewhere does not exist" in said
    assert f"It is waiting for {node.root}/elsewhere: no such file or directory" in said
    assert "No Fairlead" not in said
    assert said.count("is not registered") == 0
    assert "set agent.plugin_dir" in said


@pytest.mark.needs("mounts")
async def test_the_plugin_directory_is_read_only(node: Node) -> None:
    config = node.config(chardev())
    mount = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c", mount, str(node.plugin_dir)]
    async with AgentProcess(config, wrapper=alone) as agent:
        assert "Read-only" in (await agent.says("plugin-directory-unusable"))["reason"]
        enter = ["nsenter", f"--target={agent.pid}", "--mount"]
        async with Process("doctor", "--config", str(config), wrapper=enter) as doctor:
            _, out, _ = await doctor.finished()
            said = " ".join(out.split())
    assert f"failure plugin-directory {node.plugin_dir} is mounted read-only" in said


async def test_the_configuration_has_a_mistake(node: Node) -> None:
    config = node.config(chardev(), resync="often")
    async with AgentProcess(config) as agent:
        assert await agent.ended() == 2
    said = await says("doctor", config)
    assert "failure configuration" in said
    assert "agent.resync" in said


async def test_a_mistake_in_the_configuration_of_a_daemon_that_runs_is_told_once(node: Node) -> None:
    async with node.agent() as agent:
        config = node.root / "config.toml"
        config.write_text(config.read_text().replace("count = 1", "count = -1"))
        await agent.says("config-invalid")
        said = await says("doctor", config)
    assert said.count("failure") == 1
    assert said.endswith("1 check is well, 0 warn, 1 fail.")


async def test_a_selector_matches_nothing(node: Node) -> None:
    async with node.agent(STUB + 'select = { model = "x9" }\n'):
        said = await says("doctor", node.root / "config.toml")
    why = "its selector model = 'x9' matches nothing; the stub backend found model x1"
    assert f"fl.test/stub offers nothing: {why}" in said


async def test_a_driver_is_not_bound(node: Node) -> None:
    machine = node.root / "machine"
    machine.mkdir()
    planted_host(machine, intel_gpu("0000:4d:00.0", 0, None))
    gpus = '[[resource]]\nname = "gpu.intel.com/i915"\nbackend = "gpu"\n'
    async with node.agent(gpus, sys=f"{machine}/sys", dev=f"{machine}/dev", proc=f"{machine}/proc"):
        said = await says("explain", node.root / "config.toml", "0000:4d:00.0")
    assert said.startswith("0000:4d:00.0 is not offered")
    assert "driver" in said


async def test_an_operator_has_drained_it(node: Node) -> None:
    node.mknod("w1")
    async with node.agent():
        config = node.root / "config.toml"
        assert await says("drain", config, "w1", "--reason", "new fan") == "Drained: w1."
        assert re.search(r"drained since .+?: an operator drained it: new fan", await says("explain", config, "w1"))
        assert f"{WIDGET}: 1 of 1 IDs are drained; an operator drained it: new fan" in await says(
            "doctor", config, "--all"
        )


async def test_what_an_operator_decides_cannot_be_kept(node: Node) -> None:
    node.mknod("w1")
    node.state.touch()  # a file, where a directory has to be
    async with node.agent():
        config = node.root / "config.toml"
        why = f"{node.state}/state.json cannot be written: File exists: {node.state}; a restart would forget drains"
        assert await says("drain", config, "w1") == f"Drained: w1. It will not last: {why}."
        assert f"PROBLEMS {why}" in await says("status", config)
        node.state.unlink()
        assert await says("drain", config, "w1") == "Drained: w1."
        assert "PROBLEMS" not in await says("status", config)


async def test_another_agent_has_the_directory(node: Node) -> None:
    async with node.agent() as first:
        second = node.config(chardev(), admin_socket=str(node.root / "second.sock"))
        async with AgentProcess(second) as waiting:
            await waiting.says("another-agent-runs")
            await first.says("standby-ready")
            await until((node.root / "second.sock").exists, "the second agent's admin socket")
            said = await says("doctor", second)
    assert f"It is standing by: process {first.pid} serves this node, and hands it over when it is told to end" in said


async def test_the_kubelets_socket_is_dead(bare_node: Node) -> None:
    bare_node.plugin_dir.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(bare_node.plugin_dir / "kubelet.sock"))
    config = bare_node.config(chardev())
    async with AgentProcess(config) as agent:
        await agent.says("kubelet-silent")
        said = await says("doctor", config)
    assert f"Nobody answers at {bare_node.plugin_dir}/kubelet.sock: nothing can be registered" in said
    assert "It is waiting for the kubelet, which does not answer" in said


async def test_a_module_is_not_loaded(node: Node) -> None:
    (node.root / "sys").mkdir()
    async with node.agent(chardev("/dev/kvm"), sys=str(node.root / "sys")):
        said = await says("doctor", node.root / "config.toml")
    assert "failure modules /dev/kvm is not there, and the module that makes it is not loaded. → Load kvm_intel" in said


async def test_another_resource_has_the_hardware(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(chardev(), chardev("/dev/w1", OTHER)):
        config = node.root / "config.toml"
        why = f"{OTHER}: selects it, but node:c:240:30513 belongs to {WIDGET}"
        assert why in await says("explain", config, "w1")
        assert f"{OTHER} offers nothing" in await says("doctor", config)


async def test_another_plugin_has_the_name(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent(), ToyPlugin(node.plugin_dir, WIDGET, devices("x1"), "vendor-widget.sock") as toy:
        await node.healthy("w1", "w2")
        config = node.root / "config.toml"
        alike = f"vendor-widget.sock, beside the kubelet's socket, may be another plugin for {WIDGET}"
        assert alike in await says("doctor", config)
        await toy.register()
        await recorded(node.plugin_dir, WIDGET, "x1")
        said = await says("doctor", config)
    by_doctor = f"The kubelet has x1, which Fairlead does not offer, among its healthy devices of {WIDGET}"
    by_daemon = "has registered this name, and the kubelet has its devices: x1"  # once it has noticed by itself
    assert by_doctor in said or by_daemon in said
    assert "Remove the other plugin" in said


class Refusing(RegistrationBase):
    """A kubelet that takes nobody."""

    async def register(self, register_request: RegisterRequest) -> Empty:
        raise GRPCError(Status.UNKNOWN, "the feature gate is off")


async def test_the_kubelet_refuses(bare_node: Node) -> None:
    bare_node.plugin_dir.mkdir()
    server = SocketServer([Refusing()], bare_node.plugin_dir / "kubelet.sock")
    await server.open()
    config = bare_node.config(chardev())
    async with AgentProcess(config) as agent:
        await agent.says("not-registered")
        said = await says("doctor", config)
    await server.shut_down()
    assert f"{WIDGET} is not registered with the kubelet: the kubelet refused: the feature gate is off" in said


async def test_without_a_daemon_a_device_is_explained_by_a_look(node: Node) -> None:
    node.mknod("w1")
    config = node.config(chardev())
    code, out, err = await finish("explain", "--config", str(config), "w1")
    assert code == 0
    assert err.startswith("no Fairlead answers")
    assert out.startswith(f"/dev/w1 is offered in {WIDGET} as w1: healthy")
    assert f"device {node.dev}/w1" not in out  # the host's path is what a pod gets
    assert "device /dev/w1 (rw)" in out
    code, _, err = await finish("explain", "--config", str(config), "stick")
    assert (code, "there is no device 'stick'; there are '/dev/w1'" in err) == (2, True)
