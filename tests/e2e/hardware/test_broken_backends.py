"""A backend that raises, hangs or returns nonsense: its resources are reported, the others are not concerned."""

from __future__ import annotations

import json

import pytest

from tests.e2e.conftest import Trouble
from tests.e2e.daemon.test_stop import ENDLESS
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, Line, finish
from tests.wait import until

TROUBLED = "fl.test/troubled0"

# --- it is reported, and served ---

AGAIN = """
from agent.discovery import discoverer, reading
reading._RETRY_FIRST = reading._RETRY_MOST = 0.05
"""
HASTY = f"""{AGAIN}
from agent.discovery import runner
runner.SETTLE = 0.2
discoverer.Discoverer.__init__.__kwdefaults__["unit_deadline"] = 0.1
"""  # only where a backend hangs: on a busy machine one that does not may take as long


@pytest.mark.parametrize(
    ("call", "order", "report"),
    [
        ("start", "raise", "backend troubled0 cannot list its units: it could not be started: "),
        ("units", "raise", "backend troubled0 cannot list its units: units was told to fail"),
        ("units", "nonsense", "backend troubled0 cannot list its units: it returned 7 where a unit's name is due"),
        ("discover-a", "raise", "a cannot be read: discover-a was told to fail"),
        ("discover-a", "nonsense", "a cannot be read: discover() returned list where a Discovery is due"),
    ],
)
async def test_a_backend_that_fails_is_reported_once_and_its_resource_served(
    node: Node, trouble: Trouble, call: str, order: str, report: str
) -> None:
    node.mknod("t0/a", "w1")
    trouble.order(call, order)
    resources = trouble.resource(), chardev()
    async with node.agent(*resources, prelude=AGAIN, environment=trouble.environment) as agent:
        await node.healthy("w1")
        await node.shows(lambda k: k.resources[TROUBLED].capacity == 0, TROUBLED)
        said = await agent.says("discovery-problem", backend="troubled0")
        assert report in said["reason"]
        if call != "start":
            await trouble.asked("units" if call == "units" else "discover", times=3)  # it is tried again
            assert len(agent.said("discovery-problem")) == 1
            trouble.forget(call)
            await node.healthy("a", resource=TROUBLED)
            await agent.says("discovery-problem-solved", backend="troubled0")


async def test_a_backend_that_cannot_say_what_it_watches_hears_of_what_it_watched_before(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a")
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        trouble.order("watches", "raise")
        node.mknod("t0/b")  # after which it is asked
        await agent.says("discovery-problem", subject="watches")
        node.mknod("t0/c")
        await node.healthy("a", "b", "c", resource=TROUBLED)
        trouble.forget("watches")
        node.mknod("event")  # in the directory above: nothing of its own changes
        await agent.says("discovery-problem-solved")


@pytest.mark.parametrize(("call", "report"), [("units", "listing its units"), ("discover-a", "reading a")])
async def test_a_backend_that_hangs_is_reported_and_its_other_units_go_on(
    node: Node, trouble: Trouble, call: str, report: str
) -> None:
    node.mknod("t0/a", "t0/b", "w1")
    trouble.order(call, "hang")
    resources = trouble.resource(), chardev()
    async with node.agent(*resources, prelude=HASTY, environment=trouble.environment) as agent:
        await node.healthy("w1")
        hung = f"{report} has hung for "
        await until(lambda: lines_of(agent, hung), hung)
        if call == "discover-a":
            await node.healthy("b", resource=TROUBLED)
        else:
            await node.shows(lambda k: k.resources[TROUBLED].capacity == 0, TROUBLED)
        trouble.forget(call)
        await trouble.release()
        await node.healthy("a", "b", resource=TROUBLED)
        await agent.says("discovery-problem-solved")
        trouble.order(call, "hang")  # once more
        node.unlink("t0/b")
        await until(lambda: len(lines_of(agent, hung)) == 2, "it hangs again", lambda: agent.log)
        trouble.forget(call)
        await trouble.release()
        await node.healthy("a", resource=TROUBLED)
        await agent.says("discovery-problem-solved", times=2)


def lines_of(agent: AgentProcess, reason: str) -> list[Line]:
    return [line for line in agent.said("discovery-problem") if line["reason"].startswith(reason)]


async def test_devices_that_are_held_stay_listed_while_their_backend_hangs_after_a_restart(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("t0/a", "t0/b")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        await node.admit(holder)
        (held,) = node.held(holder, resource=TROUBLED)
        await agent.kill()
    since = len(node.lists)
    trouble.order("units", "hang")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment):
        await node.shows(lambda k: k.resources[TROUBLED].unhealthy == {held}, TROUBLED)
        assert node.lists_without(held, since, TROUBLED) == []


@pytest.mark.parametrize("call", ["units", "discover-{held}"])
async def test_what_was_not_looked_at_since_the_start_is_not_called_gone(
    node: Node, trouble: Trouble, call: str
) -> None:
    node.mknod("t0/a", "t0/b")
    holder = pod(resource=TROUBLED)
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", "b", resource=TROUBLED)
        await node.admit(holder)
        (held,) = node.held(holder, resource=TROUBLED)
        await agent.kill()
    trouble.order(call.format(held=held), "hang")
    async with node.agent(trouble.resource(), prelude=HASTY, environment=trouble.environment) as agent:
        await agent.says("discovery-problem")
        config = str(node.root / "config.toml")
        shown = json.loads((await finish("status", "--json", "--config", config))[1])
        (seen,) = [it for it in shown["resources"][0]["devices"] if held in it["ids"]]
        explained = json.loads((await finish("explain", "--json", "--config", config, held))[1])
        for said in (seen, explained):
            assert said["reason"] == "not-seen"
            assert "has hung" in said["message"]
        trouble.forget(call.format(held=held))
        node.unlink(f"t0/{held}")
        await trouble.release()
        await agent.says("discovery-problem-solved")
        shown = json.loads((await finish("status", "--json", "--config", config))[1])
        (seen,) = [it for it in shown["resources"][0]["devices"] if held in it["ids"]]
        assert seen["reason"] == "gone"


@pytest.mark.parametrize(
    ("call", "order", "sentence"),
    [
        (
            "needs_claim",
            "raise",
            "a of fl.test/troubled0 could not be made ready: the backend troubled0 failed (needs_claim was told",
        ),
        (
            "needs_claim",
            "exit",
            "a of fl.test/troubled0 could not be made ready: the backend troubled0 failed (it raised",
        ),
        (
            "claim",
            "raise",
            "a of fl.test/troubled0 could not be made ready: the backend troubled0 failed (claim was told",
        ),
        (
            "edits",
            "raise",
            "a of fl.test/troubled0 could not be made ready: the backend troubled0 failed (edits was told",
        ),
        ("edits", "nonsense", "a of fl.test/troubled0 could not be made ready: the backend troubled0 failed"),
    ],
)
async def test_a_backend_that_fails_in_allocate_refuses_the_pod_with_a_sentence(
    node: Node, trouble: Trouble, call: str, order: str, sentence: str
) -> None:
    node.mknod("t0/a")
    trouble.order(call, order)
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        refused = await node.admit(pod("one", TROUBLED))
        assert refused.phase == "Failed"
        assert sentence in refused.message
        await agent.says("backend-failed", call=call)
        trouble.forget(call)
        assert (await node.admit(pod("two", TROUBLED))).phase == "Running"


async def test_a_claim_that_hangs_refuses_the_pod_and_delays_no_other(node: Node, trouble: Trouble) -> None:
    node.mknod("t0/a", "w1")
    trouble.order("claim", "hang")
    resources = trouble.resource(), chardev()
    async with node.agent(*resources, environment=trouble.environment) as agent:
        await node.healthy("a", resource=TROUBLED)
        await node.healthy("w1")
        refused = await agent.out_of_time(node.admit(pod("one", TROUBLED)))
        assert "a of fl.test/troubled0 could not be made ready: not done within 10 s" in refused.message
        await agent.says("backend-hangs", call="claim")
        assert (await node.admit(pod("two", WIDGET))).phase == "Running"


async def test_a_backend_that_cannot_be_imported_is_a_mistake_in_the_config(node: Node, trouble: Trouble) -> None:
    (trouble.site / "fairlead_troubled.py").write_text("import a_module_that_nobody_has")
    async with AgentProcess(node.config(trouble.resource()), environment=trouble.environment) as agent:
        assert await agent.ended() == 2
        (line,) = agent.log
        assert "cannot be imported: ModuleNotFoundError" in line["text"]


@pytest.mark.parametrize("order", ["raise", "nonsense"])
async def test_a_call_that_answers_again_for_a_minute_is_a_problem_no_more(
    node: Node, trouble: Trouble, order: str
) -> None:
    node.mknod("t0/a")
    trouble.order("affects", order)
    async with node.agent(trouble.resource(), environment=trouble.environment) as agent:
        node.mknod("t0/b")
        await agent.says("discovery-problem", subject="affects")
        await node.healthy("a", "b", resource=TROUBLED)
        trouble.forget("affects")
        node.mknod("t0/c")
        await node.healthy("a", "b", "c", resource=TROUBLED)
        agent.pass_minute()
        await agent.says("discovery-problem-solved", subject="affects")
        code, out, err = await finish("status", "--json", "--config", str(node.root / "config.toml"))
        assert code == 0, err
        assert json.loads(out)["problems"] == []
        assert len(agent.said("discovery-problem")) == 1


# --- the others are not delayed ---


async def test_others_are_listed_change_by_change_while_backends_hang_fail_and_talk_nonsense(
    node: Node, trouble: Trouble
) -> None:
    node.mknod("w1", *(f"t{n}/{name}" for n in range(4) for name in "ab"))
    for number, (call, order) in enumerate(
        [("units", "hang"), ("discover-a", "hang"), ("units", "raise"), ("discover", "nonsense")]
    ):
        trouble.order(call, order, number)
    trouble.order("affects", "raise", 3)
    resources = *map(trouble.resource, range(4)), chardev()
    prelude = ENDLESS + "from agent.discovery import runner\nrunner.SETTLE = 0.2\n"
    async with node.agent(*resources, prelude=prelude, environment=trouble.environment):
        await node.healthy("w1")
        for _ in range(6):
            for change, ids in ((node.mknod, ("w1", "w9")), (node.unlink, ("w1",))):
                since = len(node.lists)
                change("w9")
                await node.healthy(*ids)
                assert [made.resource for made in node.lists[since:]].count(WIDGET) == 1
        for number, call in ((0, "units"), (1, "discover-a")):
            assert trouble.calls(number).count(call) == 1, "it hangs yet"
