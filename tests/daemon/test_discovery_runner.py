"""When the node is looked at as a whole at a start: once, if no event could be missed from then on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from anyio import TASK_STATUS_IGNORED
from anyio.abc import TaskStatus

from agent.config import AgentConfig, Config
from agent.daemon.node import Node
from agent.discovery.runner import DiscoveryRunner
from agent.discovery.uevents import UeventSource
from agent.runtime.counts import Counts
from agent.runtime.problems import Problems
from agent.runtime.watchdog import Notifier, Watchdog
from backends.base import Backend, ContainerEdits, Discovery, Host
from backends.stub import StubOptions


class Looks(Backend[Any]):
    """Counts how often it was looked at as a whole."""

    options_type = StubOptions
    whole = 0

    def units(self) -> list[str]:
        self.whole += 1
        return ["it"]

    def discover(self, unit: str) -> Discovery:
        return Discovery()

    def edits(self, resource: object, grants: object) -> ContainerEdits:
        raise AssertionError


@pytest.mark.parametrize(("heard", "looks"), [(True, 1), (False, 2)])
async def test_a_start_looks_again_only_if_an_event_may_have_been_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heard: bool, looks: int
) -> None:
    opens = asyncio.Event()

    async def run(_: UeventSource, *, task_status: TaskStatus[None] = TASK_STATUS_IGNORED) -> None:
        await opens.wait()
        task_status.started()
        await anyio.sleep_forever()

    monkeypatch.setattr(UeventSource, "listen", lambda _: heard)
    monkeypatch.setattr(UeventSource, "run", run)
    host, backend = Host.below(tmp_path), Looks(Host.below(tmp_path), ())
    config, backends = (
        Config(AgentConfig(tmp_path), host, resources=()),
        cast(dict[str, Backend[Any]], {"looks": backend}),
    )
    node = Node(config, backends, Problems())
    runner = DiscoveryRunner(config.agent, host, backends, node, Watchdog(Notifier(None)), Counts())
    async with anyio.create_task_group() as tasks:
        runner.start(tasks)
        await node.looked()
        assert backend.whole == 1
        opens.set()
        for _ in range(2):  # whatever is asked for when the socket is open is done by the end of the second
            await runner.discoverers["looks"].look_at(["it"])
        assert backend.whole == looks
        tasks.cancel_scope.cancel()
