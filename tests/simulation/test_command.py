"""`python -m agent.simulation` in a process of its own."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from grpclib.exceptions import GRPCError

from agent.simulation.kubelet import Kubelet
from tests.simulation.plugin import ToyPlugin, devices

TOY = "example.com/toy"


async def run(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "agent.simulation",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_it_prints_one_json_line_for_each_change_and_ends_on_sigterm(tmp_path: Path) -> None:
    process = await run("--root", str(tmp_path))
    assert process.stdout is not None
    assert json.loads(await process.stdout.readline())["change"] == "started"
    async with ToyPlugin(Kubelet(tmp_path).plugin_dir, TOY, devices("a", unhealthy=["b"])) as plugin:
        await plugin.register()
        while (line := json.loads(await process.stdout.readline()))["change"] != "list":
            pass
        del line["at"]
        assert line == {
            "change": "list",
            "resource": TOY,
            "devices": {"a": "Healthy", "b": "Unhealthy"},
            "capacity": 2,
            "allocatable": 1,
        }
        process.send_signal(signal.SIGTERM)
        output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert json.loads(output.splitlines()[-1])["change"] == "stopped"


async def test_a_pod_that_is_named_gets_its_devices_as_soon_as_there_are_enough(tmp_path: Path) -> None:
    process = await run("--root", str(tmp_path), "--pod", f"clock={TOY}:2")
    assert process.stdout is not None
    assert json.loads(await process.stdout.readline())["change"] == "started"
    async with ToyPlugin(Kubelet(tmp_path).plugin_dir, TOY, devices("a")) as plugin:
        await plugin.register()
        while (line := json.loads(await process.stdout.readline()))["change"] != "list":
            pass
        plugin.publish(devices("a", "b"))
        while (line := json.loads(await process.stdout.readline()))["change"] != "pod":
            pass
        assert line["text"] == "default/clock Running"
        assert [sorted(ids) for ids in plugin.allocations] == [["a", "b"]]
        process.send_signal(signal.SIGTERM)
        await process.communicate()


@pytest.mark.parametrize("wrong", ["clock", "clock=:1", f"={TOY}:1", f"clock={TOY}", f"clock={TOY}:many"])
async def test_a_pod_that_is_none_is_wrong_usage(tmp_path: Path, wrong: str) -> None:
    process = await run("--root", str(tmp_path), "--pod", wrong)
    _, errors = await process.communicate()
    assert (process.returncode, f"invalid pod value: '{wrong}'" in errors.decode()) == (2, True)


async def test_it_ends_after_the_given_time(tmp_path: Path) -> None:
    process = await run("--root", str(tmp_path), "--seconds", "0.01")
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    assert [json.loads(line)["change"] for line in output.splitlines()] == ["started", "stopped"]


async def test_a_root_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = await run("--root", str(tmp_path / "file"))
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().startswith("cannot serve in")
    assert errors.count(b"\n") == 1


async def test_it_behaves_as_the_kubelet_that_is_named(tmp_path: Path) -> None:
    process = await run("--root", str(tmp_path), "--kubelet", "1.37", "--handler", "first")
    assert process.stdout is not None
    assert json.loads(await process.stdout.readline())["change"] == "started"
    async with ToyPlugin(Kubelet(tmp_path).plugin_dir, TOY, devices("a")) as plugin:
        await plugin.register()
        with pytest.raises(GRPCError, match="device plugin already connected"):
            await plugin.register()
        process.send_signal(signal.SIGTERM)
        await process.communicate()
