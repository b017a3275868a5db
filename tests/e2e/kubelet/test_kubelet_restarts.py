"""Kubelets that come and go: what the log says of them, and what the first list has.

That every resource is registered again, and nothing piles up, is a matter of the conformance suite.
"""

from __future__ import annotations

import pytest

from agent.simulation.model import Version
from tests.e2e.node import Node

UNTOLD = "from agent.kubelet import kubelet_socket\nkubelet_socket._WORTH_SAYING = 60.0\n"
"""A kubelet's restart may take longer on a busy machine, which the agent would mention."""


@pytest.fixture(params=["1.36", "1.37"])
def version(request: pytest.FixtureRequest) -> Version:
    version: Version = request.param
    return version


async def test_the_agent_waits_for_no_kubelet_that_is_there(node: Node) -> None:
    async with node.agent(prelude=UNTOLD) as agent:
        await node.kubelet.restart()
        await agent.says("kubelet-restarted")
    assert agent.log[0]["event"] == "starting"
    assert agent.log[0]["file"] == str(node.root / "config.toml")
    assert [line["event"] for line in agent.log if "kubelet" in line["event"]] == ["kubelet-found", "kubelet-restarted"]
