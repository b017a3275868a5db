"""What the running daemon shows of itself, and what it does when it is told to."""

from __future__ import annotations

import time

import pytest
from msgspec.structs import replace

from agent.cli.explain import lines as explained
from agent.console.control import NoSuchDeviceError, RefusedError
from agent.console.device_views import draw
from agent.console.views import Held, Holder, Resource
from agent.daemon import list_reporter
from agent.daemon.supervisor import Agent
from agent.health import Statement
from agent.history import recorder
from agent.model import Health, ResourceClaim, Slot, Snapshot, State
from agent.model import Held as Claimed
from backends.base import Clears, Discovery, Signal, Verdict
from tests.daemon.node import TOY, Node, hear, pod, serving_of, toys
from tests.daemon.test_supervisor_health import CARDS, Cards, cards, xid
from tests.fakes import device
from tests.wait import until, until_told


async def shown(agent: Agent, name: str = TOY) -> Resource:
    return next(resource for resource in (await agent.control.status()).resources if resource.name == name)


async def test_a_resource_is_shown_with_its_devices_and_their_place(node: Node) -> None:
    before = time.time()
    async with node.running(toys(2)) as agent:
        await node.has(TOY, healthy=2)
        await until(
            lambda: serving_of(agent).registrars[TOY].registered
        )  # the kubelet may have the list before it answers the registration
        resource = await shown(agent)
        assert (resource.backend, resource.registered, resource.streaming, resource.complaint) == (
            "stub",
            True,
            True,
            "",
        )
        assert [(it.key, it.ids, it.state, it.since, it.numa_node) for it in resource.devices] == [
            ("stub-0", ("stub-0",), "Healthy", 0.0, 0),
            ("stub-1", ("stub-1",), "Healthy", 0.0, 0),
        ]
        status = await agent.control.status()
        assert (status.kubelet.present, status.kubelet.waiting_for) == (True, "")
        assert before <= status.started <= status.now


async def test_a_device_that_fails_says_why_and_since_when(node: Node) -> None:
    async with node.running(toys(2)) as agent:
        await node.has(TOY, healthy=2)
        before = time.time()
        node.say("stub-1 unhealthy its fan is stuck")
        await node.has(TOY, healthy=1, unhealthy=1)
        bad = (await shown(agent)).devices[1]
        assert (bad.key, bad.state, bad.message) == ("stub-1", "Unhealthy", "its fan is stuck")
        after = time.time()
        assert before <= bad.since <= after


async def test_a_device_that_a_pod_holds_and_that_is_gone_says_since_when(node: Node) -> None:
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        await node.kubelet.admit(pod("p", 1, TOY))
        before = time.time()
        node.say("stub-0 gone")
        await node.has(TOY, healthy=0, unhealthy=1)
        after = time.time()
        for it in (await shown(agent)).devices[0], await agent.control.explain("stub-0"):
            assert it.reason == "gone"
            assert before <= it.since <= after
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=0, unhealthy=1)
        for it in (await shown(agent)).devices[0], await agent.control.explain("stub-0"):
            assert (it.reason, it.since) == ("gone", 0.0)  # this run has not seen it go


async def test_what_a_pod_holds_keeps_its_place_after_it_went(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(list_reporter, "_PAUSE", 0.0)
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        await node.kubelet.admit(pod("p", 1, TOY))
        before = (await shown(agent)).devices[0]
        node.say("stub-0 gone")
        await node.has(TOY, healthy=0, unhealthy=1)
        await until(lambda: agent.node.shortfall.gone(before.hardware))
        after = (await shown(agent)).devices[0]
        assert (after.reason, after.numa_node, after.hardware) == ("gone", 0, before.hardware)


async def test_what_a_pod_holds_and_that_cannot_be_used_any_more_keeps_its_place(node: Node) -> None:
    class Withheld(Cards):
        why = ""

        def discover(self, unit: str) -> Discovery:
            (device,) = super().discover(unit).devices
            return Discovery((replace(device, numa_node=1, unusable=self.why),))

    backend = Withheld()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        await node.kubelet.admit(pod("p", 4, CARDS))
        backend.why = "it has no driver"
        agent.discoverers["cards"].rescan()
        await node.has(CARDS, healthy=0, unhealthy=4)
        devices = (await shown(agent, CARDS)).devices
        assert {(it.reason, it.numa_node, it.hardware) for it in devices} == {
            ("unusable", 1, ("pci:0",)),
            ("unusable", 1, ("pci:1",)),
        }


async def test_who_holds_what_is_told_once_the_kubelet_has_said_it(node: Node) -> None:
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        await node.kubelet.admit(pod("p", 1, TOY))
        assert (await shown(agent)).devices[0].held == (Held("stub-0", ()),)
        await agent.node.pod_claims.ask()
        assert (await shown(agent)).devices[0].held == (Held("stub-0", (Holder("default", "p", "app"),)),)
        assert (await agent.control.explain("stub-0")).held == (await shown(agent)).devices[0].held


async def test_who_has_a_device_by_a_resource_claim_is_told_with_the_claim(node: Node) -> None:
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        (found,) = agent.inventory.devices("stub")
        claim = ResourceClaim("claim-uid", "team", "train", "pool", "stub-0")
        held = replace(Claimed.of(TOY, "stub-0", "stub", found), pods=frozenset({"pod-uid"}), claim=claim)
        await agent.node.allocated([held])
        (shown_held,) = (await shown(agent)).devices[0].held
        assert [str(it) for it in shown_held.holders] == ["the pod with the UID pod-uid (by ResourceClaim train)"]


async def test_devices_are_drawn_once_for_each_list(node: Node) -> None:
    async with node.running(toys(2)) as agent:
        await node.has(TOY, healthy=2)
        assert (await shown(agent)).devices is (await shown(agent)).devices


async def test_a_devices_ids_stand_together_by_their_state() -> None:

    card, sick = device("card"), Health(State.UNHEALTHY, "hot", "It burns.")
    slots = [Slot(f"card::{n}", card, Health(State.HEALTHY) if n == 1 else sick) for n in range(4)]
    gone = Slot("old", None, Health(State.UNHEALTHY, "gone"))
    until = 1_800_000_000.0
    said = [
        Statement(
            "record", Verdict.NOW, "xid-79", "It fell.", 0.0, True, waits_for=frozenset({Clears.REBIND, Clears.BOOT})
        ),
        Statement("operator", Verdict.NOW, "drained", "New riser.", 0.0, True, until),
        Statement("quarantine", Verdict.NOW, "flapping", "It flaps.", 0.0, True, until),
        Statement("probe", Verdict.NOW, "hot", "It burns.", 0.0, True),
        Statement("probe", Verdict.NOW, "dim", "It is dim.", 0.0, False),
    ]
    snapshot = Snapshot("r", 1, {slot.id: slot for slot in (*slots, gone)})
    drawn = await draw(snapshot, lambda monotonic: monotonic, lambda _: said)
    at = "2027-01-15 08:00:00 UTC"
    assert [it.ends for it in drawn.devices] == [
        "",
        "; and ".join(
            (
                "a reboot or its driver bound again",
                f"`fairlead undrain`, or at {at}",
                f"time, at {at} if it stays well, or `fairlead undrain`",
                "the next look that finds it well",
            )
        ),
        "its return, or the end of the pod that has it",
    ]
    assert [(it.key, it.ids, it.state) for it in drawn.devices] == [
        ("card", ("card::1",), "Healthy"),
        ("card", ("card::0", "card::2", "card::3"), "Unhealthy"),
        ("old", ("old",), "Unhealthy"),
    ]
    assert drawn.numbers == {"card::1": 0, "card::0": 1, "card::2": 1, "card::3": 1, "old": 2}


async def test_what_is_awaited_is_said(tmp_path_factory: pytest.TempPathFactory) -> None:
    node = Node(tmp_path_factory.mktemp("n"))
    async with node.running(toys(1)) as agent:
        await until(lambda: "kubelet.sock" in serving_of(agent).waiting_for)
        status = await agent.control.status()
        assert not status.kubelet.present
        assert (status.resources[0].registered, status.resources[0].streaming) == (False, False)
    node.notified.close()


async def test_problems_and_what_nobody_takes_are_shown(node: Node) -> None:
    node.say("stub-9 unhealthy")
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        assert [problem.message for problem in (await agent.control.status()).problems] == [
            "/run/toys: there is no device stub-9"
        ]


async def test_a_drain_names_its_ids_and_those_that_pods_keep(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        await node.kubelet.admit(pod("p", 1, CARDS))
        drained = await agent.control.drain("card 0", "the fan", None)
        assert drained.ids == ("card 0::0", "card 0::1")
        await node.has(CARDS, healthy=2, unhealthy=2)
        assert len((await agent.control.drain("pci:1", "", None)).held) + len(drained.held) == 1
        hear(agent, xid())
        again = await agent.control.drain("card 0", "the fan", None)
        assert again.besides == ("xid-79",)
        explained = await agent.control.explain("card 0")
        assert (explained.condition, explained.besides, explained.until) == ("Drained", "xid-79", "")
        listed = {it.key: it for it in (await shown(agent, CARDS)).devices}
        assert (listed["card 0"].besides, listed["card 1"].besides) == ("xid-79", "")
        undrained = await agent.control.undrain("card 0")
        assert (undrained.ids, undrained.ended) == (drained.ids, ("drained", "xid-79"))
        assert (await agent.control.undrain("card 0")).ended == ()
        fault = (await agent.control.explain("card 0")).fault  # it was drained when it fell ill: no list showed it
        assert fault is None
        assert [it.message.partition(";")[0] for it in (await agent.control.explain("card 0")).notes] == [
            "ended by `fairlead undrain`"
        ]


async def test_events_and_replies_name_a_device_as_a_person_does_also_once_it_has_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Named(Cards):
        def discover(self, unit: str) -> Discovery:
            (device,) = super().discover(unit).devices
            return Discovery((replace(device, attributes={"name": (f"toy{unit[-1]}",)}),))

    monkeypatch.setattr(list_reporter, "_PAUSE", 0.0)
    backend = Named()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        await node.kubelet.admit(pod("p", 1, CARDS))
        for line in (
            {"event": "drained", "device": "card 1::0", "reason": "by the node's annotation"},
            {"event": "allocated", "resource": CARDS, "ids": ["card 1::0", "card 1::1"]},
            {"event": "device-changed", "resource": CARDS, "device": "card 0", "called": "Toy toy0"},
        ):
            agent.control._parts.events.note(line)
        await until(lambda: len([*agent.node.shortfall.offered]) == 2)
        backend.there = ["card 1"]
        agent.discoverers["cards"].rescan()
        await until(lambda: agent.node.shortfall.former)
        assert (await agent.control.drain("card 0", "", None)).name == "toy0"
        assert (await agent.control.undrain("card 0")).name == "toy0"
        names = {it.kind: it.name async for it in agent.control.watch(100, follow=False)}
        assert (names["drained"], names["allocated"], names["device-changed"]) == ("toy1", "toy1", "Toy toy0")


async def test_what_has_ended_is_told_with_when_it_was_and_what_ended_it(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        hear(agent, xid())
        await node.has(CARDS, healthy=2, unhealthy=2)
        await until_told(lambda: agent.control.history("card 0"), lambda it: it.periods[-1].reason == "xid-79")
        assert (await agent.control.explain("card 0")).fault is None  # it has not ended
        began = (await agent.control.history("card 0")).periods[-1].begins
        await agent.control.drain("card 0", "", None)
        await until_told(lambda: agent.control.history("card 0"), lambda it: it.periods[-1].state == "Drained")
        assert (await agent.control.explain("card 0")).fault is None
        await agent.control.undrain("card 0")
        await node.has(CARDS, healthy=4)
        await until_told(lambda: agent.control.history("card 0"), lambda it: it.periods[-1].state == "Healthy")
        fault = (await agent.control.explain("card 0")).fault
        assert fault is not None
        assert (fault.reason, fault.by) == ("xid-79", "ended by `fairlead undrain`")
        assert fault.begins == pytest.approx(began, abs=0.1)
        assert fault.ends >= (await agent.control.history("card 0")).periods[-2].begins
        said = [*explained(await agent.control.explain("card 0"))]
        assert any(line.startswith("  xid-79 from ") and "ended by `fairlead undrain`" in line for line in said)


async def test_a_device_that_is_gone_is_drained_for_when_it_is_back_and_says_that_a_pod_holds_it(node: Node) -> None:
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        await node.kubelet.admit(pod("p", 1, TOY))
        node.say("stub-0 gone")
        await node.has(TOY, healthy=0, unhealthy=1)
        drained = await agent.control.drain("stub-0", "the fan", None)
        assert (drained.ids, drained.held) == ((), ("stub-0",))
        assert [it.reason for it in (await agent.control.explain("stub-0")).signals] == ["drained"]
        node.say("stub-0 healthy")
        await until_told(lambda: agent.control.explain("stub-0"), lambda it: it.reason == "drained")
        again = await agent.control.drain("stub-0", "the fan", None)
        assert (again.ids, again.held) == (("stub-0",), ("stub-0",))


async def test_what_cannot_be_done_is_refused_with_a_sentence(node: Node) -> None:
    async with node.running(cards(), backends={"cards": Cards()}) as agent:
        await node.has(CARDS, healthy=4)
        with pytest.raises(RefusedError, match="later than now"):
            await agent.control.drain("card 0", "", 1.0)
        for ask in (agent.control.drain("card 7", "", None), agent.control.undrain("card 7")):
            with pytest.raises(NoSuchDeviceError, match="there are card 0 to card 1"):
                await ask


async def test_a_delayed_signal_is_among_the_signals_before_it_counts(node: Node) -> None:
    backend = Cards()
    async with node.running(cards(), backends={"cards": backend}) as agent:
        await node.has(CARDS, healthy=4)
        backend.said = (Signal("pci:0", "flaky", Verdict.DELAYED, "It flickers.", after=3600.0),)
        before = time.time()
        agent.discoverers["cards"].rescan()
        await until_told(lambda: agent.control.explain("card 0"), lambda it: it.signals, "it is said")
        after = time.time()
        (signal,) = (await agent.control.explain("card 0")).signals
        assert (signal.reason, signal.counts, (await agent.control.explain("card 0")).state) == (
            "flaky",
            False,
            "Healthy",
        )
        assert signal.changes is not None
        assert before <= signal.changes - 3600.0 <= after


async def test_how_a_device_was_is_told_by_any_of_its_names_also_once_it_is_gone(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_PAUSE", 0.0)
    monkeypatch.setattr(list_reporter, "_PAUSE", 0.0)
    async with node.running(toys(2)) as agent:
        await node.has(TOY, healthy=2)
        await until(lambda: TOY in agent.control._parts.node.history._compared)
        node.say("stub-1 unhealthy its fan is stuck")
        await node.has(TOY, healthy=1, unhealthy=1)
        await node.kubelet.admit(pod("p", 1, TOY))
        await agent.node.pod_claims.ask()
        held = ("default/p",)
        await until_told(lambda: agent.control.history("stub-0"), lambda it: it.periods[-1].holders == held)
        node.say("stub-1 gone")
        await node.has(TOY, healthy=1)
        await until_told(lambda: agent.control.history("stub-1"), lambda it: it.periods[-1].state == "Gone")
        for name in ("stub-1", f"{TOY}/stub-1"):
            told = await agent.control.history(name)
            assert (told.key, told.resource) == ("stub-1", TOY)
            assert [it.state for it in told.periods][-3:] == ["Healthy", "Unhealthy", "Gone"]
        with pytest.raises(NoSuchDeviceError):
            await agent.control.history("stub-7")
    async with node.running(toys(2)) as agent:
        await node.has(TOY, healthy=1)
        await until_told(lambda: agent.control.history("stub-1"), lambda it: it.periods[-1].state == "Gone")
        assert [it.state for it in (await agent.control.history("stub-1")).periods] == [
            *("Unknown", "Healthy", "Unhealthy", "Gone", "Unknown", "Gone")
        ]
