"""Kubelet contract: A2. A kubelet takes up a registration that we have given up, beside the one that came after it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from agent.kubelet import kubelet_socket, registration
from agent.simulation.kubelet import Kubelet
from agent.simulation.plugin_client import PluginClient
from tests.kubelet.plugins import TOY
from tests.kubelet.test_registration import noticed_to_die, running, well
from tests.wait import pass_time, settled, until


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """These kubelets close no connection of a client that they have forgotten."""
    monkeypatch.setattr(registration, "_KEPT_AFTER", 0.0)


@pytest.mark.parametrize("earlier", [True, False], ids=["in their order", "the other way round"])
async def test_a_registration_that_is_taken_up_late_does_not_cost_the_resource(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, earlier: bool
) -> None:
    """The kubelet stood still (its disk did) until our patience was over, and one before 1.36 then deals with both."""
    node = Kubelet(tmp_path, version="1.32")
    node.plugin_dir.mkdir()
    gates = _stand_still(monkeypatch)
    await node.start()
    async with running(node) as agent:
        await until(lambda: len(gates) == 1)
        pass_time(kubelet_socket._REGISTER_DEADLINE)
        await until(lambda: len(gates) == 2)
        first, second = gates if earlier else reversed(gates)
        first.set()
        await until(lambda: agent.plugin.streams or agent.plugin.refused)
        second.set()
        await until(lambda: agent.plugin.refused == 1 and agent.plugin.streams >= 2 and well(agent)(node))
        await noticed_to_die(node, agent)
        await until(lambda: well(agent)(node))


def _stand_still(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Event]:
    """Let the kubelet's first two dials wait until each is allowed to go on."""
    gates: list[asyncio.Event] = []
    dial = PluginClient.dial

    async def late(self: PluginClient) -> None:
        if len(gates) < 2:
            gates.append(gate := asyncio.Event())
            await gate.wait()
        await dial(self)

    monkeypatch.setattr(PluginClient, "dial", late)
    return gates


async def test_a_stream_that_is_refused_waits_for_an_allocate_to_be_answered(tmp_path: Path) -> None:
    """To end the stream closes the connection, and fails the pod for good."""
    node = Kubelet(tmp_path)
    node.plugin_dir.mkdir()
    await node.start()
    with capture_logs() as lines:
        async with running(node) as agent:
            await until(lambda: well(agent)(node))
            agent.plugin.allocating += 1
            refused = PluginClient(TOY, agent.socket, node._clock)
            await refused.dial()
            assert "Unavailable" in await refused.watch(lambda: None, _never)
            await until(lambda: agent.plugin.refused == 1)
            await settled()
            assert agent.registrar.registered
            agent.plugin.allocating -= 1
            agent.plugin.on_call()
            await until(lambda: agent.plugin.streams > 1 and well(agent)(node))
            refused.close()
    assert [line["resource"] for line in lines if line["event"] == "stream-refused"] == [TOY]


async def _never(_: object) -> None:
    raise AssertionError("it was sent a list")
