"""The daemon counts what it does: lists, registrations, allocations, looks, events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from agent.kubelet import plugin
from agent.simulation.model import Phase
from tests.daemon.node import TOY, Node, pod, serving_of, toys
from tests.wait import settled, until


async def test_a_registration_and_its_first_list(node: Node) -> None:
    async with node.running(toys()) as agent:
        await node.has(TOY, healthy=3)
        # the kubelet may have the list before it answers the registration
        await until(lambda: agent.counts.registrations == {(TOY, "registered"): 1})
        assert agent.counts.updates == 1
        assert sum(agent.counts.discovery["stub"].buckets) >= 1
        assert sum(agent.counts.hotplug.buckets) == 0  # what was there at the start is no event's doing


async def test_a_change_that_an_event_told_of(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "time", SimpleNamespace(monotonic=lambda: 100.25))
    monkeypatch.setattr(plugin, "COALESCE", 0.0)  # which that clock would never let pass
    async with node.running(toys()) as agent:
        await node.has(TOY, healthy=3)
        await settled()  # whatever the start hinted at has its time from the clock of before
        monkeypatch.setattr(agent.discoverers["stub"], "_clock", lambda: 100.0)
        node.say("stub-0 unhealthy It is on fire.")
        await node.has(TOY, healthy=2, unhealthy=1)
        await until(lambda: len(agent.counts.transitions) > 0)
        node.say("")
        await node.has(TOY, healthy=3)
        await until(lambda: len(agent.counts.transitions) > 1)
        (failed,) = {reason for _, reason in agent.counts.transitions} - {"healthy"}
        assert agent.counts.transitions == {(TOY, failed): 1, (TOY, "healthy"): 1}
        assert sum(agent.counts.hotplug.buckets) == 2
        assert agent.counts.hotplug.total == 2 * 0.25  # seconds from the event to the list


async def test_what_a_pod_was_given(node: Node) -> None:
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        assert (await node.kubelet.admit(pod())).phase is Phase.RUNNING
        assert agent.counts.allocations == {(TOY, "granted"): 1}
        assert sum(agent.counts.allocating.buckets) == 1


async def test_what_a_pod_was_refused(node: Node) -> None:
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        serving_of(agent).plugins[TOY].publish = lambda snapshot, since=None: None  # type: ignore[method-assign]
        node.say("stub-0 unhealthy It is on fire.")
        await until(lambda: (slot := agent.inventory.slot(TOY, "stub-0")) is not None and not slot.health.offered)
        assert (await node.kubelet.admit(pod())).phase is Phase.FAILED
        assert agent.counts.allocations == {(TOY, "refused"): 1}
