"""The commands as a person or a script starts them: documents, exit codes, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.cli.demo import PAUSE, STUBS, TURNS, busy
from agent.health.causes import WINDOW
from agent.health.drains import FAILURES
from agent.simulation.demo_stage import Outcome
from tests.backends import machines, rdma_trees
from tests.backends.trees import HOST, planted_host
from tests.console.http.serving import is_listening
from tests.e2e.node import WIDGET, Node, chardev
from tests.e2e.process import MAIN, Process, finish
from tests.wait import limit, until

WRONG = """\
[agent]
resinc = "5m"
probe = 1

[[resource]]
name = "no-slash"
backend = "chardef"

[[resource]]
name = "fl.test/a"
backend = "chardev"
paths = [{ path = "relative", permissions = "x" }]

[[resource]]
name = "fl.test/a"
backend = "stub"
devices = -1
"""

# --- run ---


@pytest.mark.parametrize("command", ["run", "discover", "validate"])
async def test_a_bad_config_is_exit_2_with_every_mistake_on_its_line(tmp_path: Path, command: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(WRONG)
    code, out, err = await finish(command, "--config", str(file))
    assert code == 2
    lines = (out if command == "validate" else err).splitlines()
    assert {int(line.removeprefix(f"{file}:").partition(":")[0]) for line in lines} == {2, 3, 6, 7, 12, 15, 17}
    assert "there is no key 'resinc'; did you mean 'resync'?" in lines[0]
    assert "did you mean 'chardev'?" in "".join(lines)
    assert (err if command == "validate" else out) == ""


@pytest.mark.parametrize("command", ["run", "discover", "validate"])
async def test_a_missing_config_is_exit_2(tmp_path: Path, command: str) -> None:
    code, out, err = await finish(command, "--config", str(tmp_path / "nowhere.toml"))
    assert code == 2
    assert (out + err).splitlines() == [f"{tmp_path}/nowhere.toml: the file cannot be read: No such file or directory"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "--confg", "x"], "--confg"),
        (["run", "--log-level", "loud"], "'loud' is not one of"),
        (["rum"], "there is no command 'rum'; did you mean 'run'?"),
        (["demo", "--seconds", "-1"], "-1"),
    ],
)
async def test_wrong_usage_is_exit_2_and_says_what(arguments: list[str], sentence: str) -> None:
    code, out, err = await finish(*arguments)
    assert code == 2
    assert sentence in err
    assert out == ""
    assert "Traceback" not in err


# --- discover and validate ---


async def test_discover_prints_one_document(node: Node) -> None:
    node.mknod("w1", "w2", "x1")
    (node.dev / "w3").touch()
    config = node.config(chardev(), chardev("/dev/?1", "fl.test/other"))
    code, out, err = await finish("discover", "--config", str(config), "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document.keys() == {"resources", "unclaimed", "problems"}
    widget, other = document["resources"]
    assert (widget["name"], other["name"]) == (WIDGET, "fl.test/other")
    assert [device["id"] for device in widget["devices"]] == ["w1", "w2"]
    assert [device["id"] for device in other["devices"]] == ["x1"]
    device = widget["devices"][0]
    assert device.keys() == {"id", "health", "reason", "numa_node", "hardware", "attributes"}
    assert (device["health"], device["reason"], device["numa_node"]) == ("Healthy", "", None)
    assert re.fullmatch(r"node:c:240:\d+", device["hardware"][0])
    assert device["attributes"]["path"] == ["/dev/w1"]
    assert document["unclaimed"] == []  # what one resource offers is not told again of the other
    (problem,) = document["problems"]
    assert problem.keys() == {"backend", "subject", "message"}
    assert problem["subject"] == "/dev/w3"


async def test_discover_says_the_same_to_a_person(node: Node) -> None:
    node.mknod("w1")
    code, out, err = await finish("discover", "--config", str(node.config(chardev(), chardev("/dev/?1", "fl.test/b"))))
    assert (code, err) == (0, "")
    assert out.splitlines()[:2] == [f"{WIDGET}: 1 healthy", "  /dev/w1 (w1), healthy"]
    assert "Not offered" not in out  # what one resource offers is not told again of the other
    code, out, err = await finish(
        "discover",
        "--config",
        str(
            node.config(
                '[[resource]]\nname = "fl.test/s"\nbackend = "stub"\ndevices = [{ attributes = { model = "x1" } }]\nselect = { model = "x9" }\n'
            )
        ),
    )
    title, refused, *_ = out.splitlines()[1:]
    assert (title, refused) == ("Not offered:", "  stub-0: fl.test/s does not take it: model is x1, not x9")


GROUPS = """\
[[resource]]
name = "fl.test/g"
backend = "chardev"
[[resource.groups]]
paths = [{ path = "/dev/w1" }]
count = 2
[[resource.groups]]
paths = [{ path = "/dev/w?" }]
"""


async def test_discover_shows_the_devices_of_all_groups(node: Node) -> None:
    node.mknod("w1")
    node.mknod("w2")
    code, out, err = await finish("discover", "--config", str(node.config(GROUPS)))
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "fl.test/g: 3 healthy",
        "  /dev/w1 (w1::0 and 1 more), healthy",
        "  /dev/w2 (w2), healthy",
    ]


async def test_discover_says_of_hardware_what_a_person_knows_it_by(tmp_path: Path) -> None:
    down = rdma_trees.adapter("mlx5_0", "0000:23:00.0", [rdma_trees.DOWN], numa_node=1)
    planted_host(tmp_path / "host", machines.CONTROLS + machines.nvidia_gpu("0000:3b:00.0", 0) + down)
    config = tmp_path / "config.toml"
    config.write_text(
        HOST.format(root=tmp_path / "host") + '[[resource]]\nname = "nvidia.com/gpu"\nbackend = "gpu"\nreplicas = 2\n'
        '[[resource]]\nname = "rdma/hca"\nbackend = "infiniband"\n'
    )
    code, out, err = await finish("discover", "--config", str(config))
    assert (code, err) == (0, "")
    uuid, why = machines.uuid(0), "mlx5_0 port 1 is down (polling: no cable, or nothing at its other end)"
    assert len(out.splitlines()) == 4  # off a terminal no line is folded
    assert " ".join(out.split()) == " ".join(
        (
            "nvidia.com/gpu: 2 healthy",
            f"{uuid} ({uuid}::0 and 1 more), 0000:3b:00.0, NVIDIA H100 80GB HBM3, NUMA node 0, healthy",
            "rdma/hca: 1 unhealthy",
            f"0000:23:00.0, mlx5_0, NUMA node 1, unhealthy: {why}",
        )
    )


async def test_discover_says_what_is_there_where_a_selector_matches_nothing(node: Node) -> None:
    stub = '[[resource]]\nname = "fl.test/s"\nbackend = "stub"\ndevices = [{ attributes = { colour = "red" } }]\n'
    config = str(node.config(stub + 'select = { color = "red" }\n'))
    sentence = (
        "fl.test/s: its selector color = 'red' matches nothing; no device that the stub backend found has an attribute "
        "'color' (did you mean 'colour'?); they have colour"
    )
    code, out, err = await finish("discover", "--config", config, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["problems"] == [{"backend": "stub", "subject": "fl.test/s", "message": sentence}]
    code, out, err = await finish("discover", "--config", config)
    assert (code, err) == (0, "")
    assert out.startswith(f"fl.test/s: nothing; {sentence.removeprefix('fl.test/s: ')}\n")


async def test_discover_says_that_nothing_is_configured(node: Node) -> None:
    code, out, err = await finish("discover", "--config", str(node.config()))
    assert (code, err) == (0, "")
    assert "no [[resource]]" in out


async def test_validate_prints_one_document(node: Node) -> None:
    config = node.config(chardev())
    code, out, err = await finish("validate", "--config", str(config), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "valid": True,
        "problems": [],
        "resources": [{"name": WIDGET, "backend": "chardev"}],
    }
    config.write_text(WRONG)
    code, out, err = await finish("validate", "--config", str(config), "--json")
    assert (code, err) == (2, "")
    document = json.loads(out)
    assert not document["valid"]
    assert document["problems"][0].keys() == {"file", "line", "path", "message"}
    assert document["problems"][0] | {"message": ""} == {
        "file": str(config),
        "line": 2,
        "path": "agent.resinc",
        "message": "",
    }


# --- demo ---


@pytest.fixture
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment whose temporary files can be counted."""
    return {**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("tmp"))}  # short, for the sockets in it


def left_behind(environment: dict[str, str]) -> list[Path]:
    return list(Path(environment["TMPDIR"]).iterdir())


def assert_loop_comes_and_goes(document: dict[str, Any]) -> str:
    """The changes of the demo's own loop device; its name."""
    changes = [change for change in document["changes"] if change["resource"] == "demo.fairlead/loop"]
    assert [change["health"] for change in changes[:2]] == ["Healthy", "gone"]
    name: str = changes[0]["device"]
    assert changes[1]["device"] == name
    return name


QUICK = "import agent.cli.demo as demo\ndemo.PAUSE = 0.02\n"
ONE_ROUND = """
import anyio, os, signal
restart = demo.Play._restart
async def restarted(self):
    await restart(self)
    while True:
        os.kill(os.getpid(), signal.SIGUSR1)  # a second passes (tests.e2e.passing)
        await anyio.sleep(0)
demo.Play._restart = restarted
"""  # after which its time is up


PARTS = ("latency_ms", "kernel_ms", "waited_ms", "fairlead_ms")


@pytest.mark.parametrize("how", [(), ("--dra",)], ids=["plugin", "dra"])
async def test_demo_prints_one_document_and_leaves_nothing_behind(alone: dict[str, str], how: tuple[str, ...]) -> None:
    code = f"{QUICK}{ONE_ROUND}{MAIN}"
    async with Process("demo", *how, "--seconds", "600", "--json", code=code, environment=alone) as process:
        returncode, out, err = await process.finished()
    assert (returncode, err) == (0, "")
    document = json.loads(out)
    assert document.keys() == {"resources", "changes", "median"}
    resources = {resource["name"]: resource for resource in document["resources"]}
    assert resources.keys() == {"devices.kubevirt.io/kvm", "demo.fairlead/loop", "demo.fairlead/stub"}
    assert resources["demo.fairlead/stub"].keys() == {"name", "capacity", "allocatable"}
    assert resources["demo.fairlead/stub"]["capacity"] == STUBS
    if Path("/dev/kvm").exists():
        assert resources["devices.kubevirt.io/kvm"]["allocatable"] == 1000
    for change in document["changes"]:
        assert change.keys() == {"resource", "device", "health", *PARTS}
        assert min(change[part] for part in PARTS) >= 0
        assert change["latency_ms"] == pytest.approx(sum(change[part] for part in PARTS[1:]), abs=0.02)
    assert document["median"].keys() == set(PARTS)
    stub = [change["health"] for change in document["changes"] if change["resource"] == "demo.fairlead/stub"]
    assert stub == ["Unhealthy", "Healthy"]
    if Path("/dev/loop-control").exists():
        assert not Path("/dev", assert_loop_comes_and_goes(document)).exists()
    assert left_behind(alone) == []


async def test_a_demo_fits_a_terminal_serves_its_live_page_and_ends_with_three_commands(alone: dict[str, str]) -> None:
    lines, page = [], ""
    async with Process("demo", code=QUICK + MAIN, environment=alone) as process:
        async with limit("a whole round, and its page"):
            async for line in process.stdout:
                lines.append(line.decode().rstrip())
                if found := re.fullmatch("The live page: http://127.0.0.1:([0-9]+)/", lines[-1]):
                    port = int(found[1])
                    await until(lambda: is_listening(port), "the page is served")  # noqa: B023
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    page = (await reader.read(-1)).decode()
                    writer.close()
                if "the kubelet restarts" in lines[-1]:
                    break
        process.signal(signal.SIGINT)
        code, out, err = await process.finished()
    assert (code, err) == (0, "")
    assert "demo.fairlead/stub" in page
    lines += out.splitlines()
    assert [line for line in lines if len(line) > 80 and alone["TMPDIR"] not in line] == []
    *_, first, _, second, _, third, _ = lines
    assert [line.split()[1] for line in (first, second, third)] == ["discover", "suggest", "doctor"]


async def test_a_demo_of_dynamic_allocation_shows_a_taint_a_pod_with_a_claim_and_slices_that_come_back(
    alone: dict[str, str],
) -> None:
    lines: list[str] = []
    async with Process("demo", "--dra", code=QUICK + MAIN, environment=alone) as process:
        async with limit("a whole round"):
            async for line in process.stdout:
                lines.append(line.decode().rstrip())
                if "it deletes the slices" in lines[-1]:
                    break
        process.signal(signal.SIGINT)
        code, _, err = await process.finished()
    assert (code, err) == (0, "")
    assert "  demo.fairlead/stub       8 of 8" in lines
    said = "\n".join(lines)
    assert re.search(
        r"a stub device fails     stub-0   unhealthy   7 of 8 .*(\n  the machine.*)?\n  taint fairlead.dev/unhealthy=\S+:NoSchedule\n"
        r"and recovers            stub-0   healthy     8 of 8 .*(\n  the machine.*)?\n"
        r"a pod with a claim      stub-0   Running dra.fairlead.dev/claim=\S+-stub-0\n"
        r"the kubelet restarts    all 2 registered again .*\n"
        r"it deletes the slices   8 devices there again",
        said,
    )
    assert [line for line in lines if len(line) > 80 and alone["TMPDIR"] not in line] == []


@pytest.mark.parametrize(
    ("parts", "note"),
    [
        ((2.1, 0.3, 0.0), ""),
        ((40.0, 0.3, 0.0), ""),  # it is us who are slow
        ((114.2, 110.1, 0.0), "the machine is busy: the kernel took 110 ms, Fairlead 4"),
        ((45.0, 1.0, 41.0), "the machine is busy: the kernel took 1 ms, Fairlead 3, waiting for a CPU 41"),
    ],
)
def test_a_demo_says_when_it_is_the_machine_that_is_slow(parts: tuple[float, float, float], note: str) -> None:
    assert busy(Outcome("a/b", "c", "Healthy", *parts), 10.0) == note


def test_no_device_of_a_demo_fails_so_often_that_it_is_left_out_as_flapping() -> None:
    round_takes = 4 * PAUSE  # without a loop device, which has two acts more
    assert (FAILURES - 1) * STUBS * TURNS * round_takes > WINDOW


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
async def test_a_demo_that_is_stopped_leaves_nothing_behind(alone: dict[str, str], number: int) -> None:
    loop = ""
    async with Process("demo", code=QUICK + MAIN, environment=alone) as process:
        async with limit("a loop device"):
            async for line in process.stdout:
                if found := re.search(r"a loop device appears +(\w+) +healthy", line.decode()):
                    loop = found[1]
                    break
                if b"Loop devices cannot be made here" in line:
                    break
        process.signal(number)
        code, _, err = await process.finished()
    assert (code, err) == (0, "")
    assert not loop or not Path("/dev", loop).exists()
    assert left_behind(alone) == []


async def test_a_demo_whose_reader_goes_ends_quietly(alone: dict[str, str]) -> None:
    read, write = os.pipe()
    async with Process("demo", code=QUICK + MAIN, environment=alone, stdout=write) as process:
        os.close(write)
        async with limit("what it prints"):
            await asyncio.to_thread(os.read, read, 1)
        os.close(read)
        code, _, err = await process.finished()
    assert (code, err) == (1, "")
    assert left_behind(alone) == []


async def test_version_and_help_are_exit_0() -> None:
    code, out, _ = await finish("--version")
    assert code == 0
    assert out.startswith("fairlead ")
    code, out, _ = await finish("--help")
    assert code == 0
    assert all(command in out for command in ("run", "discover", "validate", "demo"))
