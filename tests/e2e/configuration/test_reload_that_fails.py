"""Another configuration that fails half way, hardware that hangs before it or under it, and what a removed backend leaves."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from agent.simulation.model import Kind, Phase
from tests.e2e.configuration.test_reload import DEAF, FIRST, NEW, OTHER, SECOND, TROUBLED, outcomes, reload
from tests.e2e.conftest import Trouble
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish
from tests.wait import until

FAILING = """
from pathlib import Path
from agent.{room} import {module}
call = {module}.{where}
def failing(*arguments, **named):
    if Path({flag!r}).exists():
        raise ZeroDivisionError("a bug of ours")
    return call(*arguments, **named)
{module}.{where} = failing
"""
"""A bug of ours, as long as there is that file."""

HASTY = """
from agent.discovery import discoverer
from agent.discovery import runner
discoverer.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 0.5
runner.SETTLE = 1.0
"""


async def refused(agent: AgentProcess) -> None:
    """Ask for a reload; wait until it is refused."""
    done = len(outcomes(agent))
    agent.signal(signal.SIGHUP)
    await until(lambda: len(outcomes(agent)) > done or agent.said("part-failed"), "the end of a reload")


async def status(config: Path) -> dict[str, Any]:
    code, out, _ = await finish("status", "--config", str(config), "--json")
    assert code == 0
    shown: dict[str, Any] = json.loads(out)
    return shown


NAMING = """
import signal, structlog, threading
def tell(*_):
    structlog.get_logger().info("threads", names=[thread.name for thread in threading.enumerate()])
signal.signal(signal.SIGTTOU, tell)
"""


# --- nothing is half applied ---


@pytest.mark.parametrize(
    ("room", "module", "where"),
    [
        ("inventory", "selection", "Selection.__init__"),
        ("discovery", "discoverer", "Discoverer.__init__"),
        ("inventory", "lists", "Listing.__init__"),
        ("inventory", "selection", "Selection.select"),
    ],
)
async def test_a_reload_that_fails_by_a_bug_of_ours_changes_nothing_and_every_face_says_so(
    node: Node, room: str, module: str, where: str
) -> None:
    node.mknod("w1", "x1", "y1")
    flag = node.root / "flag"
    prelude = DEAF + FAILING.format(room=room, module=module, where=where, flag=str(flag))
    async with node.agent(FIRST, SECOND, node.serving, prelude=prelude) as agent:
        await node.healthy("w1")
        await node.healthy("x1", resource=OTHER)
        lists = len(node.lists)
        flag.touch()
        config = node.config(chardev(count=2), chardev("/dev/y*", NEW), node.serving)
        before = await status(config)
        await refused(agent)
        after = await status(config)
        assert after["resources"] == before["resources"]
        assert after["configuration"]["loaded"] == before["configuration"]["loaded"]
        mistake, *_ = mistakes = after["configuration"]["mistakes"]
        assert "a bug of ours" in mistake
        assert mistakes == [line["reason"] for line in agent.said("config-invalid")]
        assert "fairlead_config_last_reload_successful 0" in await node.get("/metrics")
        assert mistake in " ".join((await finish("doctor", "--config", str(config)))[1].split())
        assert len(node.lists) == lists
        flag.unlink()
        assert (await node.admit(pod(resource=OTHER))).phase == Phase.RUNNING

        await reload(agent)
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 2)
        await node.healthy("y1", resource=NEW)
        (said,) = agent.said("config-reloaded")
        assert (said["added"], said["removed"], said["changed"]) == ([NEW], [OTHER], [WIDGET])
        assert (await status(config))["configuration"]["mistakes"] == []
        assert "fairlead_config_last_reload_successful 1" in await node.get("/metrics")
        assert not agent.said("part-restarts")
    assert node.kubelet.panics == []


@pytest.mark.parametrize("order", ["raise", "exit"])
async def test_a_backend_that_cannot_be_started_leaves_all_as_it_was(node: Node, trouble: Trouble, order: str) -> None:
    node.mknod("t0/a", "t0/b", "w1")
    async with node.agent(trouble.resource(), FIRST, prelude=DEAF, environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        lists = len(node.lists)
        trouble.order("start", order)
        config = node.config(trouble.resource(0, "replicas = 2"), chardev(count=2))
        await reload(agent)
        (mistake,) = (await status(config))["configuration"]["mistakes"]
        assert "the backend troubled0: it could not be started" in mistake
        assert len(node.lists) == lists
        assert (await node.admit(pod(resource=TROUBLED))).phase == Phase.RUNNING
        trouble.forget("start")
        await reload(agent)
        await node.shows(lambda k: len(k.resources[TROUBLED].healthy) >= 3, TROUBLED)
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 2)
        assert outcomes(agent) == ["config-invalid", "config-reloaded"]


@pytest.mark.parametrize(
    ("call", "order"),
    [("units", "raise"), ("units", "hang"), ("discover", "raise"), ("discover", "hang"), ("watches", "raise")],
)
async def test_a_backend_whose_new_look_fails_keeps_its_devices_and_delays_no_other(
    node: Node, trouble: Trouble, call: str, order: str
) -> None:
    node.mknod("t0/a", "t0/b", "w1")
    resources = trouble.resource(), trouble.resource(1), FIRST
    async with node.agent(*resources, prelude=DEAF + HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        since = len(node.lists)
        trouble.order(call, order)
        node.config(trouble.resource(0, 'placement = "pack"'), trouble.resource(1), chardev(count=2))
        await reload(agent)
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 2)
        assert outcomes(agent) == ["config-reloaded"]
        assert node.lists_without("a", since, TROUBLED) == node.lists_without("b", since, TROUBLED) == []
        trouble.forget(call)
        if order == "hang":
            await trouble.release()
        node.mknod("t0/c")
        if call != "watches":
            await node.healthy("a", "b", "c", resource=TROUBLED)
        await reload(agent)
        await node.healthy("a", "b", "c", resource=TROUBLED)
        await until(lambda: agent.said("discovery-problem-solved", backend="troubled0"), "the end of what was wrong")


# --- what hung before ---


@pytest.mark.parametrize("call", ["units", "discover-a", "probe"])
@pytest.mark.parametrize("change", [False, True], ids=["unchanged", "changed"])
async def test_a_reload_cures_a_read_that_hangs(node: Node, trouble: Trouble, call: str, change: bool) -> None:
    node.mknod("t0/a", "t0/b", "w1")
    trouble.order(call, "hang")
    resources = trouble.resource(), FIRST
    async with node.agent(*resources, prelude=DEAF + HASTY, environment=trouble.environment) as agent:
        await agent.says("discovery-problem", backend="troubled0")
        trouble.forget(call)
        lists = sum(made.resource == WIDGET for made in node.lists)
        config = node.config(trouble.resource(0, *['placement = "pack"'] * change), FIRST)
        await reload(agent)
        await node.healthy("a", "b", resource=TROUBLED)
        await until(lambda: agent.said("discovery-problem-solved", backend="troubled0"), "the end of what was wrong")
        assert (await status(config))["problems"] == []
        node.unlink("t0/b")
        node.mknod("t0/c")
        await node.healthy("a", "c", resource=TROUBLED)
        since = len(node.lists)
        await trouble.release()  # the reads of the instance before come back: nobody hears them
        node.mknod("t0/d")
        await node.healthy("a", "c", "d", resource=TROUBLED)
        assert node.lists_without("a", since, TROUBLED) == node.lists_without("c", since, TROUBLED) == []
        assert sum(made.resource == WIDGET for made in node.lists) == lists
        assert (await node.admit(pod(resource=TROUBLED))).phase == Phase.RUNNING


async def test_a_cure_loses_nothing_that_pods_have_or_an_operator_has_said(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b", "t0/c")
    opened: list[str] = []
    node.kubelet.subscribe(lambda c: opened.append(c.resource) if c.kind is Kind.STREAM_OPENED else None)
    async with node.agent(trouble.resource(), prelude=DEAF + HASTY, environment=trouble.environment) as agent:
        await node.healthy("a", "b", "c", resource=TROUBLED)
        await node.admit(pod(resource=TROUBLED))
        (held,) = node.held(pod(), resource=TROUBLED)
        drained, hung = sorted({"a", "b", "c"} - {held})
        config = node.root / "config.toml"
        assert (await finish("drain", "--config", str(config), drained))[0] == 0
        node.unlink(f"t0/{held}")
        await node.healthy(hung, resource=TROUBLED)
        trouble.order(f"discover-{hung}", "hang")
        node.mknod("t0/d")
        await node.healthy("d", resource=TROUBLED)
        trouble.forget(f"discover-{hung}")
        since = len(node.lists)
        await reload(agent)
        await node.healthy("d", hung, resource=TROUBLED)
        assert node.listed(TROUBLED) == {held, drained, hung, "d"}
        assert all(not node.lists_without(it, since, TROUBLED) for it in (held, drained, hung, "d"))
        (shown,) = (await status(config))["resources"]
        assert {it["key"]: it["reason"] for it in shown["devices"]} == {
            held: "gone",
            drained: "drained",
            hung: "",
            "d": "",
        }
        assert opened == [TROUBLED]
        await trouble.release()


async def test_a_read_that_hangs_again_stays_what_it_was_and_takes_no_more_threads_for_ever(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a", "t0/b")
    trouble.order("discover-a", "hang")
    prelude = DEAF + HASTY + "discoverer.THREADS = 6\n"
    async with node.agent(trouble.resource(), FIRST, prelude=prelude, environment=trouble.environment) as agent:
        await agent.says("discovery-problem", backend="troubled0")
        await node.healthy("b", resource=TROUBLED)
        for number in range(12):
            await reload(agent)
            node.mknod(f"t0/c{number}")
            await node.healthy("b", *(f"c{n}" for n in range(number + 1)), resource=TROUBLED)
        assert trouble.calls().count("discover") < 200
        before = agent.threads()
        trouble.forget("discover-a")
        await trouble.release()
        await node.shows(lambda k: "a" in k.resources[TROUBLED].healthy, TROUBLED)
        await until(lambda: agent.threads() < before, "the end of threads")


# --- what a removed backend leaves ---


async def test_a_backend_that_is_removed_leaves_nothing_but_what_pods_hold(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "t0/b", "t0/c", "w1")
    async with node.agent(FIRST, node.serving, prelude=DEAF + HASTY + NAMING, environment=trouble.environment) as agent:
        await node.healthy("w1")
        await agent.says("http-served")
        await node.get("/metrics")
        await node.admit(pod("first"))  # which has the state's file opened, and threads that read and write
        files, watches = agent.open_files(), watched(agent)
        node.config(FIRST, trouble.resource(), node.serving, probe="20ms")
        await reload(agent)
        await node.healthy("a", "b", "c", resource=TROUBLED)
        assert (await node.admit(pod(resource=TROUBLED))).phase == Phase.RUNNING
        (held,) = node.held(pod(), resource=TROUBLED)
        trouble.order("discover-c", "hang")
        node.mknod("t0/d")  # which has all of them looked at
        await agent.says("discovery-problem", backend="troubled0")
        trouble.order("affects", "raise")
        node.unlink("t0/d")
        await agent.says("discovery-problem", backend="troubled0", subject="affects")

        config = node.config(FIRST, node.serving)
        await reload(agent)
        await node.shows(lambda k: node.listed(TROUBLED) == {held} == k.resources[TROUBLED].unhealthy, TROUBLED)
        shown = await status(config)
        assert shown["problems"] == []
        assert [it["name"] for it in shown["resources"]] == [WIDGET, TROUBLED]
        assert 'backend="troubled0"' not in await node.get("/metrics")
        calls = len(trouble.calls())
        node.mknod("t0/e")
        node.mknod("w2")
        await node.healthy("w1", "w2")
        await trouble.release()
        files += 2  # the socket and the stream of what is held
        await until(lambda: agent.open_files() <= files, "as many files as before", agent.open_files)
        await until(lambda: not (trouble.release_late() or threads_of("troubled0", agent)), "the end of its threads")
        assert watched(agent) == watches
        assert trouble.calls()[calls:] in ([], ["probe"]), "that of the device whose read hung"
        assert (await node.admit(pod("second"))).phase == Phase.RUNNING


def threads_of(backend: str, agent: AgentProcess) -> bool:
    """Whether there are any, as far as it has told when it was asked last. It is asked again."""
    agent.signal(signal.SIGTTOU)
    names = [line["names"] for line in agent.said("threads")] or [[backend]]
    return any(name.startswith(backend) for name in names[-1])


def watched(agent: AgentProcess) -> int:
    """How many directories inotify watches for the process."""
    infos = [path.read_text() for path in Path(f"/proc/{agent.pid}/fdinfo").iterdir()]
    return sum(len(re.findall("^inotify ", info, re.MULTILINE)) for info in infos)


# --- one after the other ---


async def test_a_storm_of_reloads_while_a_look_hangs_ends_with_the_last_configuration(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a", "w1")
    async with node.agent(FIRST, trouble.resource(), prelude=DEAF, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        trouble.order("units", "hang")
        looked = trouble.calls().count("units")
        node.config(FIRST, trouble.resource(0, 'placement = "pack"'))
        agent.signal(signal.SIGHUP)
        await trouble.asked("units", times=looked + 1)
        for number in range(20):
            node.config(chardev(count=2 + number % 2), trouble.resource(0, 'placement = "pack"'))
            agent.signal(signal.SIGHUP)
            assert (await node.admit(pod(f"p{number}"))).phase == (Phase.FAILED if number else Phase.RUNNING)
        trouble.forget("units")
        await trouble.release()
        await node.shows(lambda k: len(k.resources[WIDGET].healthy) == 3)  # its former ID is one of them
        await node.healthy("a", resource=TROUBLED)
        await reload(agent)
        assert outcomes(agent)[-1] == "config-unchanged"
        assert not agent.said("part-failed")


@pytest.mark.parametrize("call", ["start", "units", "discover"])
async def test_a_stop_during_the_second_look_is_clean(node: Node, trouble: Trouble, call: str) -> None:
    node.mknod("t0/a", "w1")
    async with node.agent(FIRST, trouble.resource(), prelude=DEAF, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        trouble.order(call, "hang")
        asked = trouble.calls().count(call)
        node.config(FIRST, trouble.resource(0, 'placement = "pack"'))
        agent.signal(signal.SIGHUP)
        waiting = asyncio.create_task(finish("reload", "--config", str(node.root / "config.toml")))
        await trouble.asked(call, times=asked + 1)
        agent.signal(signal.SIGTERM)
        assert await agent.ended() == 0
        await agent.says("stopped")
        assert not [line for line in agent.log if line["event"] in ("part-failed", "no-json")]
        assert (await waiting)[0] != 0
        assert node.leftovers() == set()
