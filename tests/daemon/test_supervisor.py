"""The daemon as a whole, in this process, with a simulated kubelet."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from structlog.testing import capture_logs

from agent.daemon import serving
from agent.daemon.serving import Serving
from agent.daemon.state_file import StateFile
from agent.daemon.supervisor import Agent
from agent.discovery import runner
from agent.kubelet import registration, rivals
from agent.kubelet.plugin import Plugin
from agent.model import Held
from agent.runtime import limits, watchdog
from agent.simulation.kubelet import Kubelet as SimulatedKubelet
from agent.simulation.model import Kind, Phase
from backends.base import (
    Backend,
    ContainerEdits,
    Device,
    Discovery,
    Grant,
    Host,
    Resource,
    ResourceSpec,
    Signal,
)
from backends.chardev import CharDevOptions, PathOption
from backends.stub import StubDevice, StubOptions
from tests.daemon.node import NEVER, TOY, Node, come_of_age, ended, hurry, pod, serving_of, toys
from tests.kubelet.test_rivals import rival
from tests.nodes import make_node
from tests.wait import limit, settled, until

OTHER = "example.com/other"


@pytest.fixture(scope="module", autouse=True)
def few_objects() -> Iterator[None]:
    """What is there before these tests is no garbage, and not walked after each of them."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
async def nothing_left_behind(anyio_backend: str) -> AsyncIterator[None]:
    """No task outlives a test, and no connection is left to the garbage collector (a ResourceWarning is an error)."""
    yield
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() if "TestRunner" not in repr(task.get_coro())}
    assert not left
    gc.collect()


@pytest.fixture
def node(node_alone: Node) -> Node:
    """Its kubelet is started by the tests."""
    return node_alone


# --- start ---


def began(agent: Agent, held: Sequence[Held]) -> None:
    agent.node.adopted(held)
    agent.node.claims_settled()


def over(agent: Agent, held: Sequence[Held]) -> None:
    agent.node.released(held)
    agent.node.claims_settled()


async def test_it_is_ready_before_there_is_a_kubelet_and_says_so_once(node: Node) -> None:
    async with node.running(toys()):
        await until(lambda: node.sockets() == ["example.com_toy.sock"])
        first, *others = node.messages()
        assert first == f"READY=1\nSTATUS=waiting for {node.kubelet.socket}"
        assert others[-1] == f"STATUS=waiting for {node.kubelet.socket}"
        await node.kubelet.start()
        await node.has(TOY, healthy=3)
        await node.kubelet.restart()
        await node.has(TOY, healthy=3)
        told = node.messages()

        def registered() -> bool:
            """The kubelet may have the list before it answers the registration."""
            told.extend(node.messages())
            return told[-1:] == ["STATUS=1 of 1 resources registered"]

        await until(registered)
        assert not any("READY" in message for message in told)


async def test_nothing_is_registered_before_the_first_scan(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """No list without the devices goes out, not even for a moment."""
    monkeypatch.setattr(runner, "SETTLE", NEVER)  # however busy the machine is
    await node.kubelet.start()
    with node.kubelet.changes() as changes:
        async with node.running(toys()):
            await node.has(TOY, healthy=3)
        lists = []
        while not changes.empty():
            if (change := changes.get_nowait()).kind is Kind.LIST:
                lists.append(change.after)
    assert [view.capacity for view in lists if view] == [3]


async def test_a_selector_that_matches_nothing_is_said_once_with_what_is_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE", NEVER)  # of what has not been looked at by then, nothing is said
    options = StubOptions([StubDevice(2, attributes={"colour": "red"})])
    picky: Resource[Any] = Resource(TOY, ResourceSpec("stub", options, select=({"colour": ("rad",)},)))
    await node.kubelet.start()
    with capture_logs() as logs:
        async with node.running(picky, toys(name=OTHER)):
            await node.has(OTHER, healthy=3)
    (warning,) = [entry for entry in logs if entry["event"] == "selector-matches-nothing"]
    assert warning["reason"] == (
        f"{TOY}: its selector colour = 'rad' matches nothing; the stub backend found colour red (2)"
    )


async def test_a_resource_without_any_device_is_registered(node: Node) -> None:
    await node.kubelet.start()
    missing = Resource(OTHER, ResourceSpec("chardev", CharDevOptions([PathOption("/dev/missing")])))
    async with node.running(toys(0), missing):
        await node.has(TOY, healthy=0)
        await node.has(OTHER, healthy=0)


async def test_names_that_are_too_long_for_a_socket_are_served_under_a_hash(node: Node) -> None:
    await node.kubelet.start()
    name = "a-rather-long-domain.of-some-company.example.com/" + "n" * 63
    async with node.running(toys(name=name)):
        await node.has(name, healthy=3)
        (found,) = node.sockets()
        assert len(found) < 20


async def test_a_long_plugin_directory_leaves_less_room_for_names(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("n")
    longest = limits.SOCKET_PATH_LIMIT - len("/fairlead/123456-example.com_toy.sock")
    node = Node(root / ("d" * (longest - len(f"{root}//k/device-plugins") + 1)))
    await node.kubelet.start()
    async with node.running(toys()):
        await node.has(TOY, healthy=3)
        assert node.sockets() != ["example.com_toy.sock"]
    await node.kubelet.stop()
    node.notified.close()


async def test_a_node_that_comes_and_goes_is_followed(node: Node) -> None:
    await node.kubelet.start()
    kvm = Resource(TOY, ResourceSpec("chardev", CharDevOptions([PathOption("/dev/toy", permissions="rw")], count=5)))
    async with node.running(kvm):
        await node.has(TOY, healthy=0)
        make_node(node.root / "dev" / "toy", "c", 10, 232)
        await node.has(TOY, healthy=5)
        await node.kubelet.admit(pod())
        (node.root / "dev" / "toy").unlink()
        await node.has(TOY, healthy=0, unhealthy=1)


# --- events and pods ---


async def test_what_another_plugin_took_and_left_is_offered_again(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "INTERVAL", 0.01)
    monkeypatch.setattr(rivals, "SETTLED", 0.01)
    monkeypatch.setattr(registration, "_CLOSED_WITHIN", 0.01)  # the kubelet has forgotten us
    await node.kubelet.start()
    async with node.running(toys()):
        await node.has(TOY, healthy=3)
        async with rival(node.kubelet, TOY):
            await until(lambda: node.kubelet.streams(TOY) == 2)
        await node.has(TOY, healthy=3)


async def test_a_change_of_the_file_reaches_the_kubelet(node: Node) -> None:
    await node.kubelet.start()
    async with node.running(toys()):
        await node.has(TOY, healthy=3)
        node.say("stub-0 unhealthy", "stub-1 gone")
        await node.has(TOY, healthy=1, unhealthy=1)
        node.say("* healthy")
        await node.has(TOY, healthy=3)


async def test_a_pod_gets_its_devices_and_its_claim_is_written_down(node: Node) -> None:
    await node.kubelet.start()
    async with node.running(toys()):
        await node.has(TOY, healthy=3)
        status = await node.kubelet.admit(pod(count=2))
        assert status.phase is Phase.RUNNING
        assert len(StateFile(node.state).read().claims or ()) == 2
        node.say("* gone")
        await node.has(TOY, healthy=0, unhealthy=2)


async def test_a_pod_that_is_refused_reads_why(node: Node) -> None:
    await node.kubelet.start()
    async with node.running(toys(1)) as agent:
        await node.has(TOY, healthy=1)
        serving_of(agent).plugins[TOY].publish = lambda snapshot, since=None: None  # type: ignore[method-assign]  # the kubelet is not told
        node.say("stub-0 unhealthy It is on fire.")
        await until(lambda: (slot := agent.inventory.slot(TOY, "stub-0")) is not None and not slot.health.offered)
        status = await node.kubelet.admit(pod())
        assert status.phase is Phase.FAILED
        assert "Device stub-0 of example.com/toy cannot be used now: It is on fire. Create" in status.message


# --- claims outlive us ---


async def hold_one(node: Node, *resources: Resource[Any]) -> str:
    """A pod gets a device; the agent ends; the device vanishes. The ID."""
    async with node.running(*resources):
        await node.has(TOY, healthy=3)
        await node.kubelet.admit(pod())
        (device_id,) = node.kubelet.held(pod(), "app")[TOY]
    node.say(f"{device_id} gone")
    return device_id


@pytest.mark.parametrize("lost", ["k/device-plugins/kubelet_internal_checkpoint", "state/state.json"])
async def test_a_tombstone_is_rebuilt_from_our_own_state_or_the_checkpoint_alone(node: Node, lost: str) -> None:
    await node.kubelet.start()
    device_id = await hold_one(node, toys())
    await node.kubelet.stop()
    (node.root / lost).rename(node.root / "aside")
    async with node.running(toys()):
        await until(lambda: bool(node.sockets()))
        if not lost.startswith("state"):  # the kubelet itself still knows
            (node.root / "aside").rename(node.root / lost)
        await node.kubelet.start()
        await node.has(TOY, healthy=2, unhealthy=1)
        assert node.kubelet.resources[TOY].unhealthy == {device_id}


async def test_a_tombstone_is_rebuilt_from_podresources_alone(node: Node) -> None:
    await node.kubelet.start()
    device_id = await hold_one(node, toys())
    (node.state / "state.json").unlink()
    (node.kubelet.plugin_dir / "kubelet_internal_checkpoint").unlink()
    async with node.running(toys()):
        await node.has(TOY, healthy=2, unhealthy=1)
        assert node.kubelet.resources[TOY].unhealthy == {device_id}


async def both_witnesses_speak(node: Node, agent: Agent, resource: str) -> None:
    """The kubelet is asked who holds what, writes its checkpoint, and is asked again: a claim that may end has ended.

    What came of that is in the lists that it has got.
    """

    def written() -> tuple[int, int]:
        found = (node.kubelet.plugin_dir / "kubelet_internal_checkpoint").stat()
        return found.st_ino, found.st_mtime_ns

    for _ in range(2):
        await agent.node.pod_claims.ask()
        before = written()
        agent.node.resend(resource)
        await until(lambda: written() != before, "the kubelet writes its checkpoint")  # noqa: B023  # awaited here


async def test_a_renamed_resource_retires_until_its_claim_ends_and_then_its_server_goes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.kubelet.start()
    device_id = await hold_one(node, toys())
    node.say()
    await node.kubelet.stop()
    hurry(monkeypatch)
    come_of_age(monkeypatch)
    with capture_logs() as lines:
        async with node.running(toys(name=OTHER)) as agent:
            await until(lambda: len(node.sockets()) == 2)
            await node.kubelet.start()
            await node.has(TOY, healthy=0, unhealthy=1)
            assert node.kubelet.resources[TOY].unhealthy == {device_id}
            await node.has(OTHER, healthy=3)
            await both_witnesses_speak(node, agent, TOY)
            assert node.sockets() == ["example.com_other.sock", "example.com_toy.sock"]
            node.kubelet.end(pod())
            await until(lambda: node.sockets() == ["example.com_other.sock"])
            await until(lambda: node.kubelet.streams(TOY) == 0)
            await until(lambda: StateFile(node.state).read().claims == ())  # a thread writes it
            await node.has(OTHER, healthy=3)
    events = [line["event"] for line in lines]
    assert events.count("resource-retired") == 1
    assert "part-failed" not in events
    assert "part-restarts" not in events


async def test_a_retired_name_that_is_back_waits_for_its_old_server(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "_ALLOCATE_PATIENCE", NEVER)
    await node.kubelet.start()
    most = 0

    def count(_: object) -> None:
        nonlocal most
        most = max(most, node.kubelet.streams(OTHER))

    node.kubelet.subscribe(count)
    held = [Held(OTHER, "a", "stub")]
    async with node.running(toys()) as agent:
        await node.has(TOY, healthy=3)
        began(agent, held)
        await node.has(OTHER, healthy=0, unhealthy=1)
        for _ in range(3):
            old = serving_of(agent).registrars[OTHER]
            old.plugin.allocating = 1  # an Allocate under way keeps the old server
            over(agent, held)
            await until(lambda: len(serving_of(agent).registrars) == 1)
            began(agent, held)
            await settled()
            assert old.plugin.streaming
            assert len(serving_of(agent).registrars) == 1
            old.plugin.allocating = 0
            old.plugin.on_call()
            await until(
                lambda: len(serving_of(agent).registrars) == 2 and serving_of(agent).registrars[OTHER].registered
            )
            await node.has(OTHER, healthy=0, unhealthy=1)
    assert most == 1


async def test_a_retired_name_that_is_back_does_not_overtake_the_end_of_its_old_stream(node: Node) -> None:
    """However late the kubelet deals with it: else it would forget the new client, and not miss it when it is gone (A2)."""
    node.kubelet = SimulatedKubelet(node.root / "k", disconnect_delay=0.1)
    node.kubelet.subscribe(node.note_list)
    missed: list[str] = []
    node.kubelet.subscribe(lambda it: missed.append(it.resource) if it.kind is Kind.DISCONNECTED else None)
    await node.kubelet.start()
    held = [Held(OTHER, "a", "stub")]
    async with node.running(toys()) as agent:
        await node.has(TOY, healthy=3)
        began(agent, held)
        await node.has(OTHER, healthy=0, unhealthy=1)
        over(agent, held)
        await until(lambda: len(serving_of(agent).registrars) == 1)
        began(agent, held)
        await until(lambda: node.kubelet.registrations[OTHER] == 2)
        await node.has(OTHER, healthy=0, unhealthy=1)
        assert missed == [OTHER]
    await until(lambda: sorted(missed) == [OTHER, OTHER, TOY])


async def test_a_claim_that_has_ended_lets_its_tombstone_go(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    await node.kubelet.start()
    async with node.running(toys()) as agent:
        await node.has(TOY, healthy=3)
        await node.kubelet.admit(pod())
        come_of_age(monkeypatch)
        (device_id,) = node.kubelet.held(pod(), "app")[TOY]
        node.say(f"{device_id} gone")
        await node.has(TOY, healthy=2, unhealthy=1)
        await both_witnesses_speak(node, agent, TOY)
        assert node.shows(TOY, healthy=2, unhealthy=1)
        node.kubelet.end(pod())
        await node.has(TOY, healthy=2)


# --- broken backends ---


class BadOptions(msgspec.Struct, frozen=True):
    pass


class Bad(Backend[BadOptions]):
    """Does as a test says; by default it has one good device."""

    options_type: ClassVar = BadOptions

    def __init__(self, kind: str = "bad", **does: Callable[..., Any]) -> None:
        super().__init__(Host(), [bad(kind)])
        self.kind = kind
        self.does = does

    def _do(self, name: str, *args: Any) -> Any:
        return self.does[name](*args)

    def units(self) -> Iterable[str]:
        return self._do("units") if "units" in self.does else ["u"]

    def discover(self, unit: str) -> Discovery:
        if "discover" in self.does:
            found: Discovery = self._do("discover", unit)
            return found
        return Discovery((Device("d", unit, frozenset({f"{self.kind}:d"})),))

    def probe(self, device: Device) -> Iterable[Signal]:
        return self._do("probe", device) if "probe" in self.does else ()

    def ids(self, resource: Resource[BadOptions], device: Device) -> Sequence[str]:
        return self._do("ids", resource, device) if "ids" in self.does else (device.key,)

    def edits(self, resource: Resource[BadOptions], grants: Sequence[Grant]) -> ContainerEdits:
        return self._do("edits") if "edits" in self.does else ContainerEdits()


BAD = "example.com/bad"


def bad(kind: str = "bad") -> Resource[BadOptions]:
    return Resource(f"example.com/{kind}", ResourceSpec(kind, BadOptions()))


def oh_no(*_: Any) -> Any:
    raise RuntimeError("oh no")


NONSENSE: dict[str, dict[str, Callable[..., Any]]] = {
    "units raises": {"units": oh_no},
    "units is a number": {"units": lambda: 3},
    "units has a number": {"units": lambda: [3]},
    "discover raises": {"discover": oh_no},
    "discover is None": {"discover": lambda _: None},
    "discover has a text": {"discover": lambda _: Discovery(("d",))},  # type: ignore[arg-type]
    "probe raises": {"probe": oh_no},
    "probe is a number": {"probe": lambda _: 3},
    "ids raises": {"ids": oh_no},
    "ids is a number": {"ids": lambda *_: 3},
    "ids has a number": {"ids": lambda *_: [3]},
    "ids has one that cannot be encoded": {"ids": lambda *_: ["\udcff"]},
}


async def test_backends_that_raise_or_talk_nonsense_are_reported_and_the_others_go_on(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE", NEVER)  # nobody is slow, however busy the machine is
    kinds = {f"bad-{n:02}": does for n, does in enumerate(NONSENSE)}
    backends = {kind: Bad(kind, **NONSENSE[does]) for kind, does in kinds.items()}
    await node.kubelet.start()
    with capture_logs() as lines:
        async with node.running(*map(bad, kinds), toys(), backends=backends):
            await node.has(TOY, healthy=3)
            for kind in kinds:
                await node.has(f"example.com/{kind}", healthy=0)
            node.say("stub-0 unhealthy")
            await node.has(TOY, healthy=2, unhealthy=1)
    said = [str(it) for it in lines if it["log_level"] in ("warning", "error") and it["event"] != "device-changed"]
    times = {does: sum(kind in line for line in said) for kind, does in kinds.items()}
    assert {does: number for does, number in times.items() if not 1 <= number <= 3} == {}
    assert sum(times.values()) == len(said), "nothing else is said"


async def test_a_backend_that_hangs_costs_the_others_nothing_and_does_not_hold_up_the_end(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE", 0.0)
    let_go, came_back = threading.Event(), threading.Event()

    def hang(_: str) -> Discovery:
        let_go.wait()
        came_back.set()
        return Discovery()

    await node.kubelet.start()
    with capture_logs() as lines:
        async with node.running(bad(), toys(), backends={"bad": Bad(discover=hang)}) as agent:
            await node.has(TOY, healthy=3)
            await node.has(BAD, healthy=0)
            for n in range(6):
                node.say("stub-0 unhealthy" if n % 2 == 0 else "")
                await node.has(TOY, healthy=2 + n % 2, unhealthy=(n + 1) % 2)
            assert not agent.discoverers["bad"].first_scan.is_set()
        assert not came_back.is_set(), "it hangs beyond the end"
    let_go.set()
    # on a busy machine the other may be slow, too
    assert [line["backend"] for line in lines if line["event"] == "backend-slow"].count("bad") == 1


@pytest.mark.parametrize("restarts", [False, True], ids=["the kubelet goes on", "the kubelet restarts"])
async def test_a_first_list_waits_for_what_was_offered_before_as_long_as_the_kubelet_goes_on(
    node: Node, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(runner, "SETTLE", 0.0)
    let_go = threading.Event()

    def late(unit: str) -> Discovery:
        if unit == "v":
            let_go.wait()
        return Discovery((Device(unit, unit, frozenset({f"bad:{unit}"})),))

    def backend() -> Bad:
        return Bad(units=lambda: ["u", "v"], discover=late)

    await node.kubelet.start()
    let_go.set()
    async with node.running(bad(), backends={"bad": backend()}):
        await node.has(BAD, healthy=2)
        await until(lambda: len(StateFile(node.state).read().offered or ()) == 2)
    let_go.clear()
    with node.kubelet.changes() as changes:
        async with node.running(bad(), backends={"bad": backend()}) as agent:
            await until(lambda: any("wait for devices" in it.sentence for it in agent.problems.lasting()))
            if restarts:
                await node.kubelet.restart()
                await node.has(BAD, healthy=1)
                assert any("what it has found so far" in it.sentence for it in agent.problems.lasting())
            let_go.set()
            await node.has(BAD, healthy=2)
            await until(lambda: not any("first look" in it.sentence for it in agent.problems.lasting()))
        lists = []
        while not changes.empty():
            change = changes.get_nowait()
            if change.kind is Kind.LIST and change.after:
                lists.append(len(change.after.healthy))
    assert restarts or lists[0] == 2


async def test_a_first_list_does_not_wait_for_ever_for_what_was_offered_before(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE", 0.0)
    monkeypatch.setattr("agent.daemon.supervisor.HELD_BACK", 0.0)
    let_go = threading.Event()
    await node.kubelet.start()
    async with node.running(bad(), backends={"bad": Bad()}):
        await node.has(BAD, healthy=1)
        await until(lambda: len(StateFile(node.state).read().offered or ()) == 1)

    def hang(_: str) -> Discovery:
        let_go.wait()
        return Discovery()

    async with node.running(bad(), backends={"bad": Bad(discover=hang)}):
        await node.has(BAD, healthy=0)
    let_go.set()


@pytest.mark.parametrize("does", [oh_no, lambda: None, lambda: ContainerEdits(env={"A": 1})])  # type: ignore[dict-item]
async def test_a_backend_whose_edits_are_nonsense_refuses_with_a_sentence(node: Node, does: Callable[[], Any]) -> None:
    await node.kubelet.start()
    async with node.running(bad(), backends={"bad": Bad(edits=does)}):
        await node.has(BAD, healthy=1)
        status = await node.kubelet.admit(pod(resource=BAD))
        assert status.phase is Phase.FAILED
        assert "d of example.com/bad could not be made ready: the backend bad failed" in status.message


# --- the plugin directory ---


async def test_a_plugin_directory_that_comes_later_is_said_once_and_used(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SETTLE", NEVER)  # nothing else is said, however busy the machine is
    monkeypatch.setattr(serving, "_DIRECTORY_RETRY", NEVER)  # an event tells of it
    node.kubelet.plugin_dir.rmdir()
    with capture_logs() as lines:
        async with node.running(toys()):
            await until(lambda: any(line["event"] == "plugin-directory-unusable" for line in lines))
            assert node.messages()[-1].startswith(f"STATUS=waiting for {node.kubelet.plugin_dir}")
            await settled()
            await node.kubelet.start()
            await node.has(TOY, healthy=3)
    assert [line["event"] for line in lines if line["log_level"] != "info"] == ["plugin-directory-unusable"]


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_plugin_directory_that_is_made_anew_is_used_again(node: Node, noticed: bool) -> None:
    await node.kubelet.start()
    async with node.running(toys()):
        await node.has(TOY, healthy=3)
        await node.kubelet.stop()
        node.kubelet.plugin_dir.rename(node.root / "old")
        if noticed:
            await settled()
        await node.kubelet.start()
        await node.has(TOY, healthy=3)


async def test_a_plugin_directory_that_is_made_anew_is_another_one_as_soon_as_a_kubelet_is_there(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then another agent may serve there, and this one registers the same resources."""
    monkeypatch.setattr(serving, "POLL", NEVER)  # an event tells of it
    await node.kubelet.start()
    with capture_logs() as lines:
        async with node.running(toys()):
            await node.has(TOY, healthy=3)
            await node.kubelet.stop()
            node.kubelet.plugin_dir.rename(node.root / "old")
            await settled()
            node.kubelet.plugin_dir.mkdir()
            await settled()
            await node.kubelet.start()
            await until(lambda: any(line["event"] == "plugin-directory-replaced" for line in lines))
            await node.has(TOY, healthy=3)


@pytest.mark.parametrize("in_the_way", ["fairlead", "fairlead/lock"])
async def test_something_in_the_way_is_said_once_and_tried_again(
    node: Node, in_the_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "_DIRECTORY_RETRY", 0.001)
    monkeypatch.setattr(watchdog, "_FIRST_DELAY", 0.001)
    monkeypatch.setattr(runner, "SETTLE", NEVER)  # nothing else is said, however busy the machine is
    mkdir, tries = Path.mkdir, 0

    def count(self: Path, *args: Any, **settings: Any) -> None:
        nonlocal tries
        tries += self == node.ours
        mkdir(self, *args, **settings)

    await node.kubelet.start()
    path = node.kubelet.plugin_dir / in_the_way
    if in_the_way == "fairlead":
        path.write_text("")
    else:
        path.mkdir(parents=True)
    with capture_logs() as lines:
        async with node.running(toys()):
            monkeypatch.setattr(Path, "mkdir", count)
            await until(lambda: tries >= 4)
            path.rmdir() if path.is_dir() else path.unlink()
            await node.has(TOY, healthy=3)
    assert len([line for line in lines if line["log_level"] != "info"]) == 1


async def test_leftovers_of_a_killed_agent_are_removed_and_foreign_files_and_sockets_of_the_living_kept(
    node: Node,
) -> None:
    node.ours.mkdir()
    for name in ("example.com_gone.sock", ".1a2b"):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(node.ours / name))
    (node.ours / "notes.txt").write_text("mine")
    with socket.socket(socket.AF_UNIX) as lives:  # an agent that hands over, and may have to serve on
        lives.bind(str(node.ours / "example.com_lives.sock"))
        lives.listen()
        async with node.running(toys()):
            await until(lambda: node.sockets() == ["example.com_lives.sock", "example.com_toy.sock"])
        assert sorted(path.name for path in node.ours.iterdir()) == ["example.com_lives.sock", "lock", "notes.txt"]


# --- the parts ---


async def test_serving_starts_again_after_a_failure_of_its_own(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.kubelet.start()
    original, times = Serving._follow_names, 0

    def follow(self: Serving, tasks: Any) -> None:
        nonlocal times
        times += 1
        original(self, tasks)
        if times == 1:
            raise RuntimeError("oh no")

    monkeypatch.setattr(Serving, "_follow_names", follow)
    with capture_logs() as lines:
        async with node.running(toys()):
            await node.has(TOY, healthy=3)
    assert [line["event"] for line in lines].count("part-restarts") == 1


async def test_a_list_that_is_too_long_is_said_when_that_changes(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    await node.kubelet.start()
    with capture_logs() as lines:
        async with node.running(toys(4)):
            await node.has(TOY, healthy=4)
            monkeypatch.setattr(limits, "MESSAGE_LIMIT", 60)  # bytes: two devices
            node.say("stub-0 unhealthy")
            await node.has(TOY, healthy=1, unhealthy=1)
            node.say("stub-3 gone")
            await until(lambda: sum(line["event"] == "list-too-long" for line in lines) == 2)
            node.say("stub-3 gone\nstub-2 gone")
            await until(lambda: any(line["event"] == "list-fits-again" for line in lines))
    assert [line["count"] for line in lines if line["event"] == "list-too-long"] == [2, 1]


# --- the end ---


async def test_a_cancelled_agent_leaves_no_socket_and_lets_its_streams_return(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, returned = Plugin._send_lists, []

    async def send_lists(self: Plugin, stream: Any, ending: asyncio.Event) -> None:
        await original(self, stream, ending)
        returned.append(self.resource)

    monkeypatch.setattr(Plugin, "_send_lists", send_lists)
    await node.kubelet.start()
    async with node.running(toys(), toys(name=OTHER)):
        await node.has(TOY, healthy=3)
        await node.has(OTHER, healthy=3)
    assert sorted(returned) == [OTHER, TOY]
    await until(lambda: node.kubelet.streams(TOY) == node.kubelet.streams(OTHER) == 0)
    assert node.sockets() == []


async def test_it_can_be_cancelled_at_any_moment(node: Node) -> None:
    """Each time later, counted in turns of the event loop, until its list had come."""
    await node.kubelet.start()
    turns, listed = 0, False
    while not listed:
        task = asyncio.ensure_future(node.agent(toys()).run())
        for _ in range(turns):
            await asyncio.sleep(0)
        listed = node.shows(TOY, healthy=3)
        await ended(task)
        assert task.cancelled()
        assert node.sockets() == []
        node.listed.clear()
        turns += 1 + turns // 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_well(node: Node, number: signal.Signals) -> None:
    await node.kubelet.start()
    running = asyncio.ensure_future(node.agent(toys()).run_until_signal())
    await node.has(TOY, healthy=3)
    os.kill(os.getpid(), number)
    async with limit("it ends"):
        await running
    assert node.messages()[-1] != "READY"
    assert node.sockets() == []
    for each in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().remove_signal_handler(each)
