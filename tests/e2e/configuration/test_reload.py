"""Another configuration for a running agent: what is read when, what it changes, and what it leaves alone."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.simulation.model import Kind, Phase
from tests.e2e.conftest import Trouble
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.wait import limit, until

OTHER = "fl.test/other"
NEW = "fl.test/renamed"
STUB = "fl.test/stub"
TROUBLED = "fl.test/troubled0"

DEAF = """
import anyio
from agent.daemon import reload
async def watch(self): await anyio.sleep_forever()
reload.Reloader.watch = watch
"""  # to changes of the file: only a signal has it read
PATIENT = """
import structlog
from agent.daemon import reload
reload._QUIET_IF_EMPTY, reload._RESTLESS = 120.0, 86400.0
is_empty = reload._is_empty
def looked(file):
    empty = is_empty(file)
    structlog.get_logger().info("looked-at-file", empty=empty)
    return empty
reload._is_empty = looked
"""  # with a file that is written to, however long a busy machine keeps the test from going on

FIRST = chardev()
SECOND = chardev("/dev/x*", OTHER)


def stub(*more: str) -> str:
    return "\n".join(["[[resource]]", f'name = "{STUB}"', 'backend = "stub"', "devices = [{ count = 1 }]", *more])


async def reload(agent: AgentProcess) -> None:
    """By a signal; until it is done, whatever comes of it."""
    done = len(outcomes(agent))
    agent.signal(signal.SIGHUP)
    await until(lambda: len(outcomes(agent)) > done, "the end of a reload")


def outcomes(agent: AgentProcess) -> list[str]:
    wanted = ("config-reloaded", "config-unchanged", "config-invalid")
    return [line["event"] for line in agent.log if line["event"] in wanted]


# --- what is applied ---


async def test_resources_come_change_and_go_and_another_hears_nothing_of_it(node: Node) -> None:
    node.mknod("w1", "x1", "y1")
    opened: list[str] = []
    node.kubelet.subscribe(lambda c: opened.append(c.resource) if c.kind is Kind.STREAM_OPENED else None)
    async with node.agent(FIRST, SECOND, prelude=DEAF) as agent:
        await node.healthy("w1")
        await node.healthy("x1", resource=OTHER)
        await agent.says("resource-listed", resource=OTHER)
        lists = sum(change.resource == WIDGET for change in node.lists)

        node.config(FIRST, SECOND, chardev("/dev/y*", NEW))
        await reload(agent)
        await node.healthy("y1", resource=NEW)
        node.config(FIRST, chardev("/dev/[xy]*", OTHER), chardev("/dev/y*", NEW))
        await reload(agent)
        await node.healthy("x1", "y1", resource=OTHER)
        await node.healthy(resource=NEW)
        node.config(FIRST, chardev("/dev/y*", NEW))
        await reload(agent)
        await until(lambda: node.kubelet.streams(OTHER) == 0, "the end of what was removed")
        await node.healthy("y1", resource=NEW)

        assert [(line["added"], line["changed"], line["removed"]) for line in agent.said("config-reloaded")] == [
            ([NEW], [], []),
            ([], [OTHER], []),
            ([], [], [OTHER]),
        ]
        assert sorted(opened) == sorted([WIDGET, OTHER, NEW])
        assert sum(change.resource == WIDGET for change in node.lists) == lists
        assert (await node.admit(pod())).phase == Phase.RUNNING
        await until(lambda: len(node.served()) == 2, "the end of the removed one's socket")
    assert node.kubelet.panics == []


async def test_a_backend_that_was_not_in_use_is_and_one_that_is_not_any_more_leaves(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(prelude=DEAF) as agent:
        threads = agent.threads()
        for new in ("w2", "w3", "w4", "w5", "w6", "w7"):
            node.config(stub())
            await reload(agent)
            await node.shows(lambda k: len(k.resources[STUB].healthy) == 1, STUB)
            await until(lambda: node.kubelet.streams(WIDGET) == 0, "the end of what was removed")
            node.mknod(new)  # nobody looks any more
            node.config(FIRST)
            await reload(agent)
            await node.shows(lambda k, new=new: {"w1", new} <= k.resources[WIDGET].healthy)  # type: ignore[misc]
        # some that read for the witnesses and about other plugins come when they are first needed
        await until(lambda: agent.threads() < threads + 6, "the end of threads", seen=agent.threads)


async def test_timers_apply_at_once_and_directories_wait_for_a_restart(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a")
    async with node.agent(trouble.resource(), prelude=DEAF, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        for _ in range(2):
            node.config(trouble.resource(), probe="20ms", state_dir=str(node.root / "elsewhere"), dev="/elsewhere")
            await reload(agent)
        trouble.order("ill-a", "")  # of which no event tells
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a"}, TROUBLED)
        (told,) = agent.said("config-needs-restart")
        assert told["settings"] == ["agent.state_dir", "host.dev"]
        assert [line["settings"] for line in agent.said("config-reloaded")] == [["agent.probe"]]
        assert outcomes(agent) == ["config-reloaded", "config-unchanged"]


@pytest.mark.parametrize(
    ("option", "ids"), [('pre_start = "check"', 1), ("replicas = 2", 2)], ids=["asked before", "preferences"]
)
async def test_the_kubelet_is_told_other_options_of_that_resource_alone_and_once(
    node: Node, option: str, ids: int
) -> None:
    opened: list[str] = []
    node.kubelet.subscribe(lambda c: opened.append(c.resource) if c.kind is Kind.STREAM_OPENED else None)
    async with node.agent(stub(), SECOND, prelude=DEAF) as agent:
        for resource, number in ((stub(option), ids), (stub(), 1)):
            opened.clear()
            node.config(resource, SECOND)
            await reload(agent)
            await until(lambda: opened == [STUB], "another registration")
            await node.registered(STUB)
            await node.shows(lambda k, number=number: len(k.resources[STUB].healthy) == number, STUB)  # type: ignore[misc]
        await reload(agent)
        assert opened == [STUB]
        assert len(agent.said("options-changed", resource=STUB)) == 2
    assert node.kubelet.panics == []


# --- what pods hold ---


async def test_what_a_pod_holds_of_a_renamed_resource_stays_and_is_live_again_under_its_name(node: Node) -> None:
    node.mknod("w1", "w2")
    async with node.agent(prelude=DEAF) as agent:
        await node.healthy("w1", "w2")
        await node.admit(pod())
        (kept,) = node.held(pod())
        (free,) = {"w1", "w2"} - {kept}
        since = len(node.lists)
        node.config(chardev(name=NEW))
        await reload(agent)
        await node.healthy(free, resource=NEW)
        await node.shows(lambda k: k.resources[WIDGET].unhealthy == {kept} and not k.resources[WIDGET].healthy)
        assert (await node.admit(pod("late"))).phase == Phase.FAILED
        node.config(chardev())
        await reload(agent)
        await node.healthy("w1", "w2")
        await until(lambda: node.kubelet.streams(NEW) == 0, "the end of the other name")
        assert node.lists_without(kept, since) == []
        assert node.kubelet.streams(WIDGET) == 1
    assert node.kubelet.panics == []


async def test_hardware_is_not_given_away_twice_though_its_ids_have_changed(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(prelude=DEAF) as agent:
        await node.healthy("w1")
        await node.admit(pod())
        node.config(chardev(count=2))
        await reload(agent)
        await node.shows(lambda k: (len(k.resources[WIDGET].healthy), len(k.resources[WIDGET].unhealthy)) == (2, 1))
        assert (await node.admit(pod("second"))).phase == Phase.RUNNING
        assert (await node.admit(pod("third"))).phase == Phase.FAILED
        assert node.lists_without("w1") == []


async def test_an_allocate_that_waits_for_its_backend_is_answered_by_what_is_configured_then(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a", "t0/b")
    trouble.order("claim", "hang")
    async with node.agent(trouble.resource(), prelude=DEAF, environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        first = asyncio.create_task(node.admit(pod("first", TROUBLED)))
        await trouble.asked("claim")
        trouble.forget("claim")
        node.config(trouble.resource(0, 'placement = "pack"'))
        await reload(agent)
        await trouble.release()
        assert (await first).phase == Phase.RUNNING
        trouble.order("claim", "hang")
        second = asyncio.create_task(node.admit(pod("second", TROUBLED)))
        await trouble.asked("claim", times=3)
        node.config(FIRST)
        await reload(agent)
        await trouble.release()
        assert "no longer offered on this node" in (await second).message
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {"a", "b"}, TROUBLED)
    assert node.kubelet.panics == []


# --- what cannot be ---


async def test_a_configuration_with_mistakes_changes_nothing_and_each_is_said_once(node: Node) -> None:
    node.mknod("w1", "x1")
    async with node.agent(FIRST, SECOND, prelude=DEAF) as agent:
        await node.healthy("w1")
        await node.healthy("x1", resource=OTHER)
        lists = len(node.lists)
        config = node.config(FIRST.replace("count = 1", "count = 0"), chardev(name="no name"), SECOND)
        for _ in range(2):
            agent.signal(signal.SIGHUP)
        await until(lambda: len(agent.said("config-invalid")) >= 2, "the mistakes")
        first, second = [line["reason"] for line in agent.said("config-invalid")]
        assert re.match(rf"{config}:\d+: resource\[0\]\.count: ", first)
        assert re.match(rf"{config}:\d+: resource\[1\]\.name: ", second)
        config.unlink()
        await reload(agent)
        (gone,) = [line["reason"] for line in agent.said("config-invalid")[2:]]
        assert gone == f"{config}: the file cannot be read: No such file or directory"
        assert len(node.lists) == lists
        assert (await node.admit(pod(resource=OTHER))).phase == Phase.RUNNING
        node.config(FIRST, SECOND)
        await reload(agent)
        assert outcomes(agent)[-1] == "config-unchanged"


async def test_a_backend_that_hangs_delays_its_own_resources_and_no_allocate(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "w1")
    async with node.agent(prelude=DEAF, environment=trouble.environment) as agent:
        await node.healthy("w1")
        trouble.order("units", "hang")
        node.config(FIRST, trouble.resource())
        agent.signal(signal.SIGHUP)
        await trouble.asked("units")
        assert (await node.admit(pod())).phase == Phase.RUNNING
        assert outcomes(agent) == []
        await agent.out_of_time(agent.says("discovery-problem", backend="troubled0"))
        await node.registered(TROUBLED)
        trouble.forget("units")
        await trouble.release()
        await node.healthy("a", resource=TROUBLED)


# --- by command ---


async def test_the_command_says_what_changed_and_fails_with_every_mistake(node: Node) -> None:
    node.mknod("w1", "x1")
    async with node.agent(FIRST, prelude=DEAF) as agent:
        config = node.config(FIRST, SECOND, plugin_dir="/elsewhere")
        command = ("--config", str(config))
        code, out, _ = await finish("reload", *command, "--json")
        assert (code, json.loads(out)) == (
            0,
            {"added": [OTHER], "removed": [], "changed": [], "needs_restart": ["agent.plugin_dir"]},
        )
        assert (await configuration(config))["needs_restart"] == ["agent.plugin_dir"]
        await node.healthy("x1", resource=OTHER)

        loaded = (await configuration(config))["loaded"]
        node.config(FIRST, chardev(name="no name"), 'colour = "red"')
        code, out, err = await finish("reload", *command)
        assert (code, out) == (1, "")
        mistakes = [line["reason"] for line in agent.said("config-invalid")]
        assert len(mistakes) == 2
        assert all(mistake in err for mistake in mistakes)
        shown = await configuration(config)
        assert (shown["mistakes"], shown["loaded"]) == (mistakes, loaded)
        assert node.kubelet.streams(OTHER) == 1


async def configuration(config: Path) -> dict[str, Any]:
    """As `status` shows it."""
    code, out, _ = await finish("status", "--config", str(config), "--json")
    assert code == 0
    shown: dict[str, Any] = json.loads(out)["configuration"]
    return shown


# --- when the file is read ---


def write_in_place(file: Path, text: str) -> None:
    file.write_text(text)


def rename_over(file: Path, text: str) -> None:
    fresh = file.with_name(".config.toml.swp")
    fresh.write_text(text)
    fresh.rename(file)


def keep_a_backup(file: Path, text: str) -> None:
    file.rename(file.with_name("config.toml~"))
    file.write_text(text)


def delete_first(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


@pytest.mark.parametrize("save", [write_in_place, rename_over, keep_a_backup, delete_first])
async def test_a_file_that_is_saved_in_any_way_is_read_once(node: Node, save: Callable[[Path, str], None]) -> None:
    node.mknod("w1", "x1")
    both, one = (node.config(*resources).read_text() for resources in ((FIRST, SECOND), (FIRST,)))
    async with node.agent(FIRST, prelude=PATIENT) as agent:
        for text, wanted in ((both, 1), (one, 0), (both, 1)):
            save(node.root / "config.toml", text)
            await agent.out_of_time(
                node.shows(lambda k, wanted=wanted: k.streams(OTHER) == wanted, WIDGET)  # type: ignore[misc]
            )
        await until(lambda: len(outcomes(agent)) >= 3, "the last reload's line")
        assert outcomes(agent) == ["config-reloaded"] * 3


async def test_a_file_that_is_emptied_before_it_is_written_takes_nothing_away(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(FIRST, prelude=PATIENT) as agent:
        file = node.root / "config.toml"
        text = file.read_text()
        for number in (1, 2):
            file.write_text("")
            await agent.says("looked-at-file", empty=True, times=number)
            file.write_text(text)
            await agent.out_of_time(agent.says("config-unchanged", times=number))
        assert outcomes(agent) == ["config-unchanged"] * 2


async def test_a_file_that_is_left_empty_as_by_a_full_disk_takes_nothing_away(node: Node) -> None:
    node.mknod("w1")
    async with node.agent(FIRST, prelude=DEAF) as agent:
        (node.root / "config.toml").write_text("")
        await reload(agent)
        assert "the file is empty" in (await agent.says("config-invalid"))["reason"]
        assert node.kubelet.streams(WIDGET) == 1
        (node.root / "config.toml").write_text("# nothing any more\n")
        await reload(agent)
        assert outcomes(agent) == ["config-invalid", "config-reloaded"]


async def test_a_config_map_that_is_swapped_is_read(node: Node) -> None:
    """As the kubelet writes it (pkg/volume/util/atomic_writer.go): the file leads through ..data to a directory."""
    mount = node.root / "config"
    mount.mkdir()

    def publish(number: int, *resources: str) -> None:
        fresh = mount / f"..{number}"
        fresh.mkdir()
        node.config(*resources).rename(fresh / "config.toml")
        (mount / "..data_tmp").symlink_to(fresh.name)
        (mount / "..data_tmp").rename(mount / "..data")
        for old in mount.glob("..[0-9]"):
            if old != fresh:
                (old / "config.toml").unlink()
                old.rmdir()

    node.mknod("w1", "x1")
    publish(0, FIRST)
    (mount / "config.toml").symlink_to("..data/config.toml")
    async with AgentProcess(mount / "config.toml", PATIENT) as agent:
        await node.registered()
        for number in (1, 3):
            publish(number, FIRST, SECOND)
            await agent.out_of_time(node.registered(OTHER))
            publish(number + 1, FIRST)
            await agent.out_of_time(node.shows(lambda k: k.streams(OTHER) == 0))
        await until(lambda: len(agent.said("config-reloaded")) == 4, "the last reload's line")
        assert not agent.said("config-invalid")


async def test_a_file_that_appears_takes_the_place_of_what_was_built_in(node: Node) -> None:
    missing = node.root / "etc" / "fairlead" / "config.toml"
    aside = node.config(FIRST)
    prelude = f"""
from pathlib import Path
from agent.daemon import reload, supervisor
from agent import config
from agent.config import AgentConfig
from backends.base import Host
from msgspec.structs import replace
default = Path({str(missing)!r})
reload.Reloader.__init__.__defaults__ = (default,)
paths = map(Path, {[str(path) for path in (node.plugin_dir, node.root, node.state, node.admin)]!r})
here = AgentConfig(*paths, uevents="off")
load = config.load
config.load = lambda _: replace(load(None, default=default), agent=here, host=Host(dev=Path({str(node.dev)!r})))
"""
    node.mknod("kvm", "w1")
    async with AgentProcess(aside, prelude) as agent:
        await node.registered("devices.kubevirt.io/kvm")
        missing.parent.mkdir(parents=True)
        rename_over(missing, aside.read_text())
        await node.healthy("w1")
        await until(lambda: node.kubelet.streams("devices.kubevirt.io/kvm") == 0, "the end of the built-in ones")
        missing.unlink()
        await agent.out_of_time(agent.says("config-invalid"))
        await node.healthy("w1")


async def test_what_was_written_while_the_agent_started_is_read(node: Node) -> None:
    node.mknod("w1", "x1")
    late = "from agent import config\nfrom agent.daemon import supervisor  # which reads as ever\nload = config.load\n"
    late += "def later(p):\n c = load(p)\n p.rename(p.with_name('old'))\n"
    late += " p.write_text(p.with_name('new').read_text())\n return c\nconfig.load = later\n"
    node.config(FIRST, SECOND).rename(node.root / "new")
    async with AgentProcess(node.config(FIRST), late) as agent:
        await node.registered(WIDGET, OTHER)
        await agent.says("config-reloaded", added=[OTHER])


# --- again and again ---


async def test_systemd_is_told_when_each_reload_begins_and_ends(node: Node) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(node.root / "notify"))
        told.setblocking(False)
        async with node.agent(prelude=DEAF, environment={"NOTIFY_SOCKET": str(node.root / "notify")}) as agent:
            messages = [await receive(told)]
            for text in ("", "nonsense"):
                node.config(FIRST, text)
                await reload(agent)
            while "".join(messages).count("READY=1") < 3:
                messages.append(await receive(told))
    _, *reloads = [message for message in messages if not message.startswith("STATUS")]
    assert [message[:7] for message in reloads] == ["RELOADI", "READY=1"] * 2
    times = [int(found[1]) for message in reloads if (found := re.search("MONOTONIC_USEC=([0-9]+)", message))]
    assert len(times) == 2
    assert times == sorted(times)
    assert reloads[-1] == "READY=1\nSTATUS=1 of 1 resources registered"


async def receive(told: socket.socket) -> str:
    async with limit("a message to systemd"):
        return (await asyncio.get_running_loop().sock_recv(told, 4096)).decode()


async def test_fifty_reloads_leave_nothing_behind(node: Node) -> None:
    node.mknod("w1", "x1")
    odd, even = (FIRST, SECOND), (f'{FIRST}pre_start = "check"\n', chardev("/dev/x*", NEW))
    async with node.agent(*odd, prelude=DEAF) as agent:

        async def twice() -> None:
            for resources, name in ((even, NEW), (odd, OTHER)):
                node.config(*resources)
                await reload(agent)
                await node.registered(WIDGET, name)
                await until(lambda: len(node.served()) == 2, "the end of the other's socket")

        for _ in range(3):
            await twice()
        files, threads = agent.open_files(), agent.threads()
        for _ in range(22):
            await twice()
        # two more may have come for another reason; what is left behind would be many
        await until(lambda: agent.open_files() <= files + 2, "as many files as before")
        await until(lambda: agent.threads() <= threads + 2, "as many threads as before")
        assert not agent.said("part-failed")
        assert not agent.said("part-restarts")
        assert (await node.admit(pod())).phase == Phase.RUNNING
    assert node.kubelet.panics == []


HELD_UP = """
import structlog
from pathlib import Path
reload.READ_DEADLINE = 60.0
read, request = reload._read, reload.Reloader.request
def held_up(*arguments):
    structlog.get_logger().info("reading")
    Path({go!r}).read_text()
    return read(*arguments)
def asked(self):
    structlog.get_logger().info("asked")
    return request(self)
reload._read, reload.Reloader.request = held_up, asked
"""  # until somebody opens the FIFO


async def test_reloads_that_come_while_one_is_under_way_are_one_more(node: Node) -> None:
    go = node.root / "go"
    os.mkfifo(go)
    async with node.agent(prelude=DEAF + HELD_UP.format(go=str(go))) as agent:

        def told(what: str) -> int:
            return len(agent.said(what))

        agent.signal(signal.SIGHUP)
        await until(lambda: told("reading") == 1, "the first reload")
        for number in range(2, 21):
            agent.signal(signal.SIGHUP)  # two that nobody has heard yet are one
            await until(lambda number=number: told("asked") == number, "the signal")  # type: ignore[misc]
        for number in (1, 2):
            await asyncio.to_thread(go.write_text, "")
            await until(lambda number=number: len(outcomes(agent)) == number, "a reload's end")  # type: ignore[misc]
        await agent.out_of_time(agent.takes_turns(20))
        assert (told("reading"), outcomes(agent)) == (2, ["config-unchanged"] * 2)
