"""What an operator decided is kept: through an agent that waits, a disk that loses what it was not told to keep, damage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

SYNCS = """
import os
from pathlib import Path

def told(sync):
    def note(fd):
        with open({file!r}, "a") as file:
            file.write(os.readlink(f"/proc/self/fd/{{fd}}") + "\\n")
        sync(fd)
    return note

os.fsync, os.fdatasync = told(os.fsync), told(os.fdatasync)
"""


AT_ONCE = """
from agent.history import recorder
recorder._PAUSE = 0.0
"""

WITHOUT_HISTORY = """
import anyio
from agent.history.recorder import Recorder
Recorder.run = lambda *_: anyio.sleep_forever()
"""
"""Nothing is written but what a test is about: who holds what is part of a device's history, too."""


async def test_a_drain_asked_of_an_agent_that_waits_for_another_is_refused(node: Node) -> None:
    node.mknod("w1")
    async with node.agent() as first:
        await node.healthy("w1")
        other = node.root / "other.sock"
        config = node.config(chardev(), admin_socket=str(other))
        async with AgentProcess(config) as second:
            await first.says("standby-ready")
            for command in ("drain", "undrain"):
                code, _, err = await finish(command, "--config", str(config), "w1")
                assert code == 1
                assert "would forget it" in err
                assert f"process {first.pid} serves this node" in " ".join(err.split())
            await first.kill()
            await second.says("took-over")
            await node.registered()
            await node.healthy("w1")
            assert (await finish("drain", "--config", str(config), "w1"))[0] == 0
            await node.healthy()


async def test_a_drain_is_on_the_disk_itself_before_it_is_answered(node: Node) -> None:
    node.mknod("w1", "w2")
    synced = node.root / "synced"
    async with node.agent(prelude=SYNCS.format(file=str(synced))):
        config = str(node.root / "config.toml")
        for name in ("w1", "w2"):
            assert (await finish("drain", "--config", config, name))[0] == 0
            names = [Path(line).name for line in synced.read_text().splitlines()]
            synced.unlink()
            first = name == "w1"  # makes the file, which later ones add to
            assert (".state.json.new" if first else "state.json") in names
            assert ".state.health.json.new" in names
            assert node.state.name in names
    assert node.state.joinpath("state.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["\0" * 100, '{"version": 99}\n', "wrong line\n"], ids=repr)
async def test_drains_outlive_a_damaged_state_file_and_every_face_tells_of_it(node: Node, damage: str) -> None:
    node.mknod("w1", "w2")
    config = str(node.root / "config.toml")
    async with node.agent():
        assert (await finish("drain", "--config", config, "w1", "--reason", "new fan"))[0] == 0
    file = node.state / "state.json"
    file.write_text(damage)
    async with node.agent() as agent:
        await node.shows(lambda k: k.resources[WIDGET].healthy == {"w2"})
        assert "state.health.json" in (await agent.says("state-unreadable"))["then"]
        await until((node.state / "state.damaged.json").exists, "the damaged file, moved aside")
        assert (node.state / "state.damaged.json").read_text() == damage
        explained = json.loads((await finish("explain", "--json", "--config", config, "w1"))[1])
        assert "new fan" in json.dumps(explained)
        status = json.loads((await finish("status", "--json", "--config", config))[1])
        assert [it["subject"] for it in status["problems"]] == ["state"]
        doctor = json.loads((await finish("doctor", "--json", "--config", config))[1])
        assert [it["level"] for it in doctor["findings"] if it["check"] == "state"] == [2]
    async with node.agent() as agent:  # the damage is over
        await node.shows(lambda k: k.resources[WIDGET].healthy == {"w2"})
        assert not agent.said("state-unreadable")


async def test_who_drains_again_is_told_whose_reason_and_end_he_replaces(node: Node) -> None:
    node.mknod("w1")
    config = str(node.root / "config.toml")
    async with node.agent() as agent:
        first = ("drain", "--config", config, "w1", "--reason", "new fan", "--until", "2099-11-20T18:00")
        for arguments in (first, first):  # the same again replaces nothing
            assert (await finish(*arguments))[2] == ""
        _, _, err = await finish("drain", "--config", config, "w1", "--reason", "new cable")
        assert "new fan" in err
        assert "2099-11-20" in err
        assert "new fan" in (await agent.says("drain-replaced"))["reason"]


async def test_an_allocate_writes_what_it_changes_however_much_is_held(node: Node) -> None:
    node.mknod("w1")
    node.state.mkdir()
    file = node.state / "state.json"
    claims = [
        {"resource": "fl.test/gone", "id": f"gone-{n}", "backend": "chardev", "hardware": [f"node:c:{n}:1"]}
        for n in range(4000)
    ]
    file.write_text(json.dumps({"version": 2, "claims": claims}) + "\n")
    async with node.agent(chardev(count=100), prelude=WITHOUT_HISTORY):
        await node.shows(lambda k: k.resources[WIDGET].allocatable == 100)
        await node.admit(pod("first"))
        with file.open() as opened:
            before = os.fstat(opened.fileno()).st_size
            assert before > 256 << 10
            for n in range(20):
                await node.admit(pod(f"pod{n}"))
            after = os.fstat(opened.fileno())
        assert after.st_nlink, "it was written anew"
        assert 0 < after.st_size - before < 20 * 1000
    async with node.agent(chardev(count=100)):
        await node.shows(lambda k: k.resources[WIDGET].allocatable == 100)
        status = json.loads((await finish("status", "--json", "--config", str(node.root / "config.toml")))[1])
        assert json.dumps(status).count("gone-") >= 4000


async def test_how_a_device_was_is_kept_though_the_daemon_is_killed(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(prelude=AT_ONCE) as first:
        await node.healthy("w1")
        assert (await finish("drain", "--config", str(node.root / "config.toml"), "w1"))[0] == 0
        await node.keeps('"Drained"')
        await first.kill()
    async with node.agent(prelude=AT_ONCE):
        _, out, _ = await finish("status", "--history", "w1", "--json", "--config", str(node.root / "config.toml"))
        states = [it["state"] for it in json.loads(out)["periods"]]
        assert states[0] == "Unknown"
        assert states[-3:] == ["Drained", "Unknown", "Drained"]
