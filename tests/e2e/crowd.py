"""A node with thousands of devices, half of which pods hold, and what the steps of its agents' event loops cost."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

from agent.simulation.model import Phase
from tests import loop_steps, nodes
from tests.e2e.node import WIDGET, Node, chardev, pod
from tests.e2e.process import AgentProcess, finish

_PODS: Final = 5
_AT_ONCE: Final = """
from agent.claims import ledger
from agent.kubelet import pod_claims
ledger.REWRITE_AFTER = pod_claims._AFTER_ALLOCATE = pod_claims._WHILE_ENDING = 0.05
pod_claims.IDLE = 5.0
"""
"""What pods hold is asked for once there is something to learn. All the time would hold up each list, where all is counted.

Where the agent was just asking when the pods ended, the minute that passes comes too early for it: it asks again after `IDLE`."""
_RENAMED: Final = "fl.test/renamed"


class Crowd:
    """The node, and what happens to all of its devices."""

    def __init__(self, node: Node, devices: int, *, counted: bool) -> None:
        """Make the devices; steps cost byte-codes if they are to be `counted`, else seconds."""
        self.node, self.devices, self.held = node, devices, devices // 2
        self._pods = [pod(f"p{n}", count=self.held // _PODS) for n in range(_PODS)]
        self._steps, self._seen = node.root / "steps", 0
        self._slower = loop_steps.SLOWER if counted else 1.0
        self._watch = f"from tests import loop_steps\nloop_steps.report({str(self._steps)!r}, counted={counted})\n"
        self._come()

    def longest(self) -> loop_steps.Step:
        """Of the steps since this was asked last."""
        every = loop_steps.reported(self._steps)
        since, self._seen = every[self._seen :], len(every)
        return max(since, default=loop_steps.Step(0, ""))

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[AgentProcess]:
        """An agent that lists all devices."""
        async with self.node.agent(chardev(), self.node.serving, prelude=_AT_ONCE + self._watch) as agent:
            await self._lists(self.devices)
            await agent.says("http-served")
            yield agent

    async def hold(self) -> None:
        """Pods get half of the devices."""
        for wanted in self._pods:
            assert (await self.node.admit(wanted)).phase == Phase.RUNNING

    async def go(self) -> None:
        self.node.unlink(*self._names())
        await self._lists(0, self.held)

    async def come_back(self) -> None:
        self._come()
        await self._lists(self.devices)

    async def end(self, agent: AgentProcess) -> None:
        """All pods end."""
        for held in self._pods:
            self.node.kubelet.end(held)
        agent.pass_minute()
        await agent.says("claims-ended", count=self.held)

    async def give_other_ids(self, agent: AgentProcess) -> None:
        """A reload gives each device two IDs; of the held ones the earlier ID stays, and for each one of the new is kept back."""
        self.node.config(chardev(count=2), self.node.serving)
        await agent.says("config-reloaded")
        await self._lists(2 * self.devices, self.held)

    async def rename(self, agent: AgentProcess) -> None:
        """A reload gives the resource another name, of which the devices of the pods cannot be had."""
        self.node.config(chardev(name=_RENAMED), self.node.serving)
        await agent.says("config-reloaded", changed=[])
        await self._lists(self.devices - self.held, resource=_RENAMED)

    async def ask(self) -> None:
        """Whoever can be asked is asked."""
        config = str(self.node.root / "config.toml")
        for command in (["status", "--json"], ["doctor", "--json"], ["explain", "/dev/w7"], ["explain", "/dev/w77"]):
            _, out, err = await finish(*command, "--config", config)
            assert out, err
        _, _, err = await finish("explain", "/dev/x7", "--config", config)  # a name that none has: all are compared
        assert "did you mean" in err, err
        for path in ("/", "/metrics", "/status.json"):
            # counted, a page of 2,000 devices takes 17 s of an idle core, and 150 s at a load of 16
            assert (await self.node.get(path, slower=self._slower)).startswith("HTTP/1.1 200 ")

    def _names(self) -> Iterator[str]:
        return (f"w{number}" for number in range(self.devices))

    def _come(self) -> None:
        for number, name in enumerate(self._names()):
            nodes.make_node(self.node.dev / name, "c", 240, number)

    async def _lists(self, healthy: int, unhealthy: int = 0, resource: str = WIDGET) -> None:
        def shown() -> bool:
            view = self.node.kubelet.resources[resource]
            return (len(view.healthy), len(view.unhealthy)) == (healthy, unhealthy)

        await self.node.shows(lambda _: shown(), resource)
