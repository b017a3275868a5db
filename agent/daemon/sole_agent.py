"""Runs what only one agent of a node may run: writes the state, ends claims, undoes what was done for pods, prepares hardware."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import anyio
from msgspec import Struct

from agent.daemon import discovery_runner
from agent.daemon.node import Node
from agent.daemon.reporting.nfd_file import FeatureFile
from agent.hardware.adoption import Adopter
from agent.hardware.jobs import Jobs
from agent.hardware.reconciler import Reconciler
from agent.kubelet.rivals import LostResources
from agent.kubernetes.runner import KubernetesParts
from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.restarts import supervise


class SoleAgent(Struct, frozen=True):
    """The parts that run while this agent is the only one."""

    node: Node
    lost_resources: LostResources
    reconciler: Reconciler
    adopter: Adopter
    jobs: Jobs
    kubernetes: KubernetesParts
    features: FeatureFile | None
    problems: Problems

    async def catch_up(self) -> None:
        """Read what the agent before us gave to pods, and was told, while we waited for its lock."""
        await self.node.restore()
        with anyio.move_on_after(discovery_runner.SETTLE):
            await self.node.pod_claims.ask()

    async def run(self) -> None:
        """Run all of it until cancelled; then another agent may."""
        node, keeper = self.node, self.node.keeper
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            "claims": node.pod_claims.run,
            "lost resources": self.lost_resources.run,
            "hardware": self.reconciler.run,
            "history": partial(node.history.run, keeper.write_history),
            "notes of hardware": node.history.notes.run,
            "Kubernetes": self.kubernetes.run,
            "CDI": node.cdi.run,
            "DRA": node.dra.run,
        }
        if self.features is not None:
            parts["features"] = self.features.run
        await keeper.begin()
        try:
            async with anyio.create_task_group() as tasks:
                for part, run in parts.items():
                    tasks.start_soon(partial(supervise, part, run, problems=self.problems))
                tasks.start_soon(self._prepare_hardware)
        finally:
            await keeper.end()
            self.jobs.close()

    async def _prepare_hardware(self) -> None:
        await self.adopter.adopt_what_is_new()
        await self.node.resumer.resume()
