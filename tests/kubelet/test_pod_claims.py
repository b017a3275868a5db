"""Kubelet contract: A5, A6, A7."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.claims.ledger import MIN_AGE, Ledger
from agent.kubelet import pod_claims as module
from agent.kubelet import witnesses
from agent.kubelet.api.v1 import (
    CdiDevice,
    ClaimResource,
    ContainerDevices,
    ContainerResources,
    DynamicResource,
    ListPodResourcesResponse,
    PodResources,
)
from agent.kubelet.pod_claims import PodClaims
from agent.kubelet.server import SocketServer
from agent.kubelet.witnesses import FILE_NAME
from agent.model import Held, ResourceClaim, SlotKey
from agent.runtime.pacing import Doorbell
from agent.simulation.kubelet import Kubelet as SimulatedKubelet
from agent.simulation.model import Container, Kind, Pod
from tests.kubelet.plugins import TOY, device
from tests.kubelet.test_confirm import KIND, Lists, Told, must_be_waited_for
from tests.kubelet.test_podresources import Lister
from tests.simulation.manual_clock import ManualClock
from tests.simulation.plugin import ToyPlugin, devices
from tests.wait import at_once, limit, pass_time, settled, until

OTHER = "example.com/not-ours"


def held(device_id: str, hardware: str = "", identity: str = "") -> Held:
    return Held(TOY, device_id, KIND, frozenset({hardware}) if hardware else frozenset(), identity)


class House:
    """PodClaims with a clock of their own, and everything they tell."""

    def __init__(self, socket: Path, plugin_dir: Path) -> None:
        self.now = 1000.0
        self.ledger = Ledger()
        lists, told = Lists(), Told()
        self.devices, self.began, self.ended, self.resent = lists.of_slots, told.began, told.ended, told.resent
        self.plugin_dir = plugin_dir
        self.witnesses = PodClaims(self.ledger, lists, told, socket, plugin_dir, clock=lambda: self.now)

    async def ask(self, after: float = 0.0) -> None:
        self.now += after
        async with limit():
            await self.witnesses.ask()

    @property
    def holds(self) -> list[str]:
        return [claim.id for claim in self.ledger.held()]

    # the checkpoint

    def write(self, *ids: str, resource: str = TOY) -> None:
        entry = {"PodUID": "u", "ContainerName": "c", "ResourceName": resource, "DeviceIDs": {"-1": list(ids)}}
        self.scribble(json.dumps({"Data": {"PodDeviceEntries": [entry]}, "Checksum": 1}))

    def scribble(self, text: str) -> None:
        """Replace the file, as the kubelet does; the one before is kept, so that no inode is used twice."""
        path = self.plugin_dir / FILE_NAME
        if path.exists():
            path.rename(self.plugin_dir / f"old-{len(list(self.plugin_dir.iterdir()))}")
        path.write_text(text)


class Pods:
    """A podresources service."""

    def __init__(self) -> None:
        self.ids: list[tuple[str, str]] = []
        self.claims: list[str] = []
        self.fails = False
        self.asked = 0

    def show(self, *ids: str, resource: str = TOY) -> None:
        self.ids = [(resource, device_id) for device_id in ids]

    async def answer(self, stream: object) -> None:
        from grpclib.const import Status
        from grpclib.exceptions import GRPCError

        await stream.recv_message()  # type: ignore[attr-defined]
        self.asked += 1
        if self.fails:
            raise GRPCError(Status.UNKNOWN, "not now")
        found = [ContainerDevices(resource, [device_id]) for resource, device_id in self.ids]
        by_claim = [DynamicResource(name, "default", [ClaimResource([CdiDevice("k=d")])]) for name in self.claims]
        reply = ListPodResourcesResponse([PodResources("pod", "default", [ContainerResources("c", found, by_claim)])])
        await stream.send_message(reply)  # type: ignore[attr-defined]


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[Pods]:
    pods = Pods()
    server = SocketServer([Lister(pods.answer)], tmp_path / "podresources.sock")
    await server.open()
    yield pods
    await server.shut_down(0.1)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    (tmp_path / "plugins").mkdir()
    house = House(tmp_path / "podresources.sock", tmp_path / "plugins")
    yield house
    house.witnesses.close()


# --- adoption ---


@pytest.mark.parametrize("record", ['{"Data": {}, "Checksum": 1}', "{", None], ids=["older", "damaged", "removed"])
async def test_a_record_that_lacks_what_a_pod_has_is_written_again_before_another_kubelet_reads_it(
    house: House, pods: Pods, record: str | None
) -> None:
    if record is not None:
        house.scribble(record)
    pods.ids = [(TOY, "a"), (TOY, "b"), (OTHER, "c")]
    await house.ask()
    await house.ask(after=60)
    assert house.resent == [TOY], "once: the kubelet may have no room for it"
    house.write("a", "b")
    await house.ask(after=60)
    pods.show()
    await house.ask(after=1)
    assert house.resent == [TOY]


async def test_claims_that_only_the_kubelet_remembers_are_adopted_with_their_hardware(house: House, pods: Pods) -> None:
    house.devices[TOY, "a"] = device("a")
    pods.show("a", "b")
    await house.ask()
    assert house.began == [held("a", "toy:a"), held("b")]
    await house.ask(after=1)
    assert len(house.began) == 2, "once"
    house.devices[TOY, "b"] = device("b")
    await house.ask(after=1)
    assert house.began[2:] == [held("b", "toy:b")], "its hardware has turned up"


async def test_without_podresources_the_checkpoint_is_believed(house: House) -> None:
    house.write("a")
    await house.ask()
    assert house.holds == ["a"]


async def test_what_only_the_checkpoint_knows_is_adopted_too(house: House, pods: Pods) -> None:
    """An ordinary init container is in no List (A5)."""
    pods.show("a")
    house.write("a", "init")
    await house.ask()
    assert sorted(house.holds) == ["a", "init"]


async def test_with_an_unreadable_checkpoint_podresources_is_believed(house: House, pods: Pods) -> None:
    pods.show("a")
    house.scribble("{")
    await house.ask()
    assert house.holds == ["a"]


async def test_what_others_serve_is_not_ours(house: House, pods: Pods) -> None:
    pods.show("a", resource=OTHER)
    house.write("b", resource=OTHER)
    await house.ask()
    assert house.holds == []


# --- ends ---


async def test_a_claim_ends_when_both_leave_it_out_the_checkpoint_last(house: House, pods: Pods) -> None:
    house.ledger.allocate([held("a")], house.now)
    house.write()
    await house.ask(after=MIN_AGE)  # absent from the List; this checkpoint may be older than that
    await house.ask(after=1)
    assert house.holds == ["a"]
    house.write()
    await house.ask(after=1)
    assert (house.holds, house.ended) == ([], ["a"])


async def test_the_pod_that_has_a_device_by_a_resource_claim_is_named_and_its_claim_is_not_judged(
    house: House, pods: Pods
) -> None:
    by_claim = replace(held("a", "toy:a"), claim=ResourceClaim("uid-1", "default", "train", "pool", "a"))
    house.ledger.allocate([by_claim], house.now)
    pods.claims = ["another", "train"]
    house.write("b")
    await house.ask(after=MIN_AGE)
    assert house.witnesses.pods(by_claim.slot) == ["default/pod"]
    pods.claims = []
    await house.ask(after=MIN_AGE)
    house.write("b")
    await house.ask(after=MIN_AGE)
    assert "a" in house.holds
    assert house.witnesses.pods(by_claim.slot) == []


async def test_what_a_resource_claim_had_that_ends_while_a_list_is_followed_is_no_pods_by_device_plugin(
    house: House, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be in no ResourceSlice until both witnesses say so."""
    by_claim = replace(held("a", "toy:a"), claim=ResourceClaim("uid-1", "default", "train", "pool", "a"))
    house.ledger.allocate([by_claim], house.now)
    pods.claims = ["train"]
    house.write()
    ask = house.witnesses._ask_pod_resources

    async def asked() -> set[SlotKey] | None:
        present = await ask()
        house.ledger.unprepared("uid-1")
        return present

    monkeypatch.setattr(house.witnesses, "_ask_pod_resources", asked)
    await house.ask(after=MIN_AGE)
    assert house.holds == []


async def test_a_young_claim_is_not_judged(house: House, pods: Pods) -> None:
    house.ledger.allocate([held("a")], house.now)
    for _ in range(10):
        house.write()
        await house.ask(after=MIN_AGE / 10 - 0.01)
    assert house.holds == ["a"]


@pytest.mark.parametrize(("list_says", "checkpoint_says"), [(True, True), (True, False), (False, True)])
async def test_what_one_of_both_shows_does_not_end(
    house: House, pods: Pods, list_says: bool, checkpoint_says: bool
) -> None:
    house.ledger.allocate([held("a")], house.now)
    pods.show(*["a"] * list_says)
    for _ in range(5):
        house.write(*["a"] * checkpoint_says)
        await house.ask(after=MIN_AGE)
    assert house.holds == ["a"]


async def test_if_no_checkpoint_comes_our_list_is_sent_again(house: House, pods: Pods) -> None:
    house.ledger.allocate([held("a")], house.now)
    house.write()
    await house.ask(after=MIN_AGE)
    await house.ask(after=1)
    assert house.resent == []
    await house.ask(after=1)
    assert house.resent == [TOY]


async def test_a_damaged_checkpoint_is_written_anew_because_our_list_is_sent_again(house: House, pods: Pods) -> None:
    house.ledger.allocate([held("a")], house.now)
    house.write()
    await house.ask(after=MIN_AGE)
    house.scribble("{")
    await house.ask(after=5)
    assert (house.holds, house.resent) == (["a"], [TOY])
    house.write()
    await house.ask(after=1)
    assert house.ended == ["a"]


# --- silent witnesses ---


async def test_an_unreachable_podresources_ends_nothing_and_is_said_once(house: House) -> None:
    house.ledger.allocate([held("a")], house.now)
    with capture_logs() as lines:
        for _ in range(5):
            house.write()
            await house.ask(after=MIN_AGE)
    assert house.holds == ["a"]
    assert [line["event"] for line in lines] == ["witness-silent"]


async def test_a_witness_that_is_back_is_said_too(house: House, pods: Pods) -> None:
    pods.fails = True
    with capture_logs() as lines:
        await house.ask()
        await house.ask()
        pods.fails = False
        await house.ask()
        await house.ask()
    assert [line["event"] for line in lines] == ["witness-silent", "witness-answers"]
    assert "not now" in lines[0]["reason"]


@pytest.mark.parametrize("content", ["", "{", '{"Data": 3}', "\x00" * 100, None])
async def test_a_corrupt_or_missing_checkpoint_ends_nothing(house: House, pods: Pods, content: str | None) -> None:
    house.ledger.allocate([held("a")], house.now)
    with capture_logs() as lines:
        for _ in range(4):
            if content is not None:
                house.scribble(content)
            await house.ask(after=MIN_AGE)
    assert house.holds == ["a"]
    assert [line["witness"] for line in lines] == ([] if content is None else ["checkpoint"])


async def test_a_slow_podresources_ends_nothing(house: House, tmp_path: Path) -> None:
    async def never(stream: object) -> None:
        await asyncio.Event().wait()

    server = SocketServer([Lister(never)], tmp_path / "podresources.sock")
    await server.open()
    house.ledger.allocate([held("a")], house.now)
    for _ in range(3):
        house.write()
        await at_once(house.ask(after=MIN_AGE))
    assert house.holds == ["a"]
    await server.shut_down(0)


async def test_a_checkpoint_whose_reading_hangs_ends_nothing_and_costs_two_threads(
    house: House, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(witnesses, "read_checkpoint", lambda _: let_go.wait())
    monkeypatch.setattr(witnesses, "read_at_once", must_be_waited_for)
    house.ledger.allocate([held("a")], house.now)
    before = threading.active_count()
    for _ in range(5):
        await at_once(house.ask(after=MIN_AGE))
    assert house.holds == ["a"]
    assert threading.active_count() <= before + 2
    let_go.set()


# --- when it asks ---


async def test_it_asks_soon_after_an_allocate_and_again_when_that_comes_of_age(
    house: House, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE", 36_000.0)
    asked: list[float] = []
    original = PodClaims.ask

    async def ask(self: PodClaims) -> None:
        asked.append(house.now)
        if len(asked) == 2:
            house.witnesses.allocated()  # while it asks: the answer may be older than that
        await original(self)

    monkeypatch.setattr(PodClaims, "ask", ask)
    running = asyncio.ensure_future(house.witnesses.run())
    for seconds, allocates, count in (
        (0.0, False, 1),
        (module.IDLE / 2, False, 1),  # nothing happens, so it waits
        (0.0, True, 1),
        (module._AFTER_ALLOCATE, False, 2),
        (module._AFTER_ALLOCATE, False, 3),
        (module.IDLE / 4, False, 3),
    ):
        if allocates:
            house.witnesses.allocated()
        pass_time(seconds)
        await settled()
        assert len(asked) == count, (seconds, allocates)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_where_no_checkpoint_comes_it_asks_and_has_lists_sent_less_and_less_often(
    house: House, pods: Pods
) -> None:
    house.ledger.allocate([held("a")], house.now - MIN_AGE)
    house.write()
    running = asyncio.ensure_future(house.witnesses.run())

    clock = asyncio.get_running_loop().time

    async def pass_seconds(seconds: int) -> None:
        for _ in range(seconds // 2):
            house.now += 2
            pass_time(2)
            await settled()

    began, asked = clock(), pods.asked
    await pass_seconds(600)
    most = 16 + (clock() - began) / 60  # a slow machine's own seconds pass, too
    assert pods.asked - asked <= most
    assert 1 < len(house.resent) <= most
    assert house.holds == ["a"]
    house.write()  # it is asked as often as before for what ends after that
    await pass_seconds(70)
    assert house.ended == ["a"]
    house.resent.clear()
    house.ledger.allocate([held("b")], house.now - MIN_AGE)
    await pass_seconds(64)
    assert house.resent
    house.write()
    await pass_seconds(8)
    assert house.ended == ["a", "b"]
    running.cancel()
    await asyncio.wait([running])


async def test_it_can_be_run_again_and_again(house: House, pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    has_asked = asyncio.Event()

    async def wait(self: PodClaims) -> None:
        has_asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(PodClaims, "_wait", wait)
    for _ in range(5):  # more often than it may have threads
        with capture_logs() as lines:
            running = asyncio.ensure_future(house.witnesses.run())
            await until(has_asked.is_set)
            running.cancel()
            await asyncio.wait([running])
        assert lines == []
        has_asked.clear()


@pytest.mark.parametrize(
    ("ages", "ending", "seconds"),
    [((), False, 60.0), ((100.0,), False, 60.0), ((10.0,), False, 21.0), ((100.0,), True, 2.0)],
)
async def test_how_long_it_waits(
    house: House, pods: Pods, monkeypatch: pytest.MonkeyPatch, ages: Sequence[float], ending: bool, seconds: float
) -> None:
    waits: list[float] = []

    async def over(_: Doorbell, at_most: float, *, gather: float) -> None:  # as `rung` is called
        waits.append(at_most)

    for n, age in enumerate(ages):
        house.ledger.allocate([held(f"d{n}")], house.now - age)
    if ending:
        house.ledger.listed(set(), house.now, house.now, None)
    monkeypatch.setattr(Doorbell, "rung", over)
    await house.witnesses._wait()
    assert waits == [pytest.approx(seconds)]


# --- with a kubelet ---


async def hold(house: House, node: SimulatedKubelet, plugin: ToyPlugin, pod: Pod) -> None:
    """Have the pod admitted; what it is given is claimed."""
    await plugin.register()
    await node.wait_for(lambda k: TOY in k.resources and k.resources[TOY].allocatable == 3)
    await node.admit(pod)
    house.ledger.allocate([held(device_id) for ids in plugin.allocations for device_id in ids], house.now)


async def rounds(
    house: House, node: SimulatedKubelet, clock: ManualClock, plugin: ToyPlugin, count: int, each: float
) -> None:
    """Ask again and again; what it wants resent is sent, and the kubelet writes its checkpoint."""
    for _ in range(count):
        house.resent.clear()
        clock.advance(each)
        await house.ask(after=each)
        if house.resent:
            with node.changes() as changes:
                plugin.publish(devices("a", "b", "c"))
                while (await changes.get()).kind is not Kind.CHECKPOINT:
                    pass


async def test_a_long_init_container_keeps_its_claims_as_long_as_it_runs(tmp_path: Path) -> None:
    clock = ManualClock()
    pod = Pod("slow", (Container("app"),), (Container("init", {TOY: 2}, long=True),))
    async with (
        SimulatedKubelet(tmp_path / "k", clock=clock) as node,
        ToyPlugin(node.plugin_dir, TOY, devices("a", "b", "c")) as plugin,
    ):
        house = House(node.pod_resources_socket, node.plugin_dir)
        await hold(house, node, plugin, pod)
        before = sorted(house.holds)
        await rounds(house, node, clock, plugin, 60, each=3.0)
        assert sorted(house.holds) == before
        assert len(before) == 2
        node.end(pod)
        await rounds(house, node, clock, plugin, 60, each=3.0)
        assert sorted(house.ended) == before
    house.witnesses.close()


async def test_a_restarted_kubelet_that_learns_of_its_pods_slowly_costs_no_claim(tmp_path: Path) -> None:
    clock = ManualClock()
    (tmp_path / "k/device-plugins/fairlead").mkdir(parents=True)
    async with (
        SimulatedKubelet(tmp_path / "k", clock=clock, pod_delay=50.0) as node,
        ToyPlugin(node.plugin_dir, TOY, devices("a", "b", "c"), "fairlead/toy.sock") as plugin,
    ):
        house = House(node.pod_resources_socket, node.plugin_dir)
        await hold(house, node, plugin, Pod("one", (Container("app", {TOY: 1}),)))
        await node.admit(Pod("two", (Container("app", {TOY: 1}),)))
        house.ledger.allocate([held(plugin.allocations[-1][0])], house.now)
        before = sorted(house.holds)
        await rounds(house, node, clock, plugin, 3, each=MIN_AGE)
        await node.restart()
        await plugin.register()
        await rounds(house, node, clock, plugin, 40, each=3.0)
        assert sorted(house.holds) == before
        assert len(before) == 2
    house.witnesses.close()


# --- a kubelet that forgets ---

UID = "0d1f1f4e-8a6a-4c39-9d2c-7a2e5c1f3d11"


class Forgetful(House):
    """With a kubelet's socket, and cgroups of pods."""

    def __init__(self, root: Path) -> None:
        super().__init__(root / "podresources.sock", root / "plugins")
        self.witnesses._sys = root / "sys"
        self._group = root / f"sys/fs/cgroup/kubepods/pod{UID}"
        self.restart()

    def restart(self) -> None:
        """Another kubelet makes its socket anew."""
        socket = self.plugin_dir / "kubelet.sock"
        socket.unlink(missing_ok=True)
        socket.touch()
        os.utime(socket, ns=(self.starts, self.starts))
        self.starts += 1

    starts = 1

    def run(self, *, runs: bool = True) -> None:
        self._group.mkdir(parents=True, exist_ok=True)
        (self._group / "cgroup.events").write_text(f"populated {int(runs)}\n")

    def record(self, *uids: str, device_id: str = "a") -> None:
        entries = [
            {"PodUID": uid, "ContainerName": "c", "ResourceName": TOY, "DeviceIDs": {"-1": [device_id]}} for uid in uids
        ]
        self.scribble(json.dumps({"Data": {"PodDeviceEntries": entries or None}, "Checksum": 1}))

    @property
    def trouble(self) -> str:
        (claim,) = self.ledger.held()
        return claim.trouble


@pytest.fixture
async def forgetful(tmp_path: Path) -> AsyncIterator[Forgetful]:
    (tmp_path / "plugins").mkdir()
    house = Forgetful(tmp_path)
    house.ledger.allocate([held("a")], house.now)
    yield house
    house.witnesses.close()


@pytest.mark.parametrize("how", ["removed", "damaged", "emptied", "begun anew"])
async def test_what_a_new_kubelet_does_not_know_is_kept_before_its_first_list(forgetful: Forgetful, how: str) -> None:
    forgetful.record(UID)
    await forgetful.ask(after=1)
    forgetful.restart()
    if how == "removed":
        (forgetful.plugin_dir / FILE_NAME).unlink()
    elif how == "damaged":
        forgetful.scribble("")
    elif how == "emptied":
        forgetful.record()
    else:
        forgetful.record("another", device_id="b")
    async with limit():
        await forgetful.witnesses.confirm(TOY, lambda: {"a", "b"})
    assert forgetful.ledger.forgotten() == [(TOY, "a")]
    for _ in range(2):
        forgetful.record()
        await forgetful.ask(after=MIN_AGE)
    assert "a" in forgetful.holds
    forgetful.record(UID)
    await forgetful.ask(after=1)
    assert forgetful.ledger.forgotten() == []


@pytest.mark.parametrize("how", ["removed", "damaged"])
@pytest.mark.parametrize("runs", [True, False])
async def test_a_kubelet_that_has_run_all_the_while_has_forgotten_nothing_whatever_became_of_its_record(
    forgetful: Forgetful, pods: Pods, how: str, runs: bool
) -> None:
    forgetful.run(runs=runs)
    forgetful.record(UID)
    pods.show("a")
    await forgetful.ask(after=1)
    (forgetful.plugin_dir / FILE_NAME).unlink()
    if how == "damaged":
        forgetful.scribble("")
    async with limit():
        await forgetful.witnesses.confirm(TOY, lambda: {"a", "b"})
    assert forgetful.ledger.forgotten() == []
    agent = Forgetful(forgetful.plugin_dir.parent)  # one that is started then has heard a List before
    agent.ledger.allocate([held("a")], agent.now)
    await agent.ask(after=1)
    async with limit():
        await agent.witnesses.confirm(TOY, lambda: {"a", "b"})
    assert agent.ledger.forgotten() == []
    agent.witnesses.close()


async def test_what_a_kubelet_asks_for_that_has_written_nothing_yet_is_not_forgotten(tmp_path: Path) -> None:
    """Its pod was refused where a list went out between the claim and the answer; podresources is not there."""
    (tmp_path / "plugins").mkdir()
    house = Forgetful(tmp_path)
    async with limit():
        await house.witnesses.confirm(TOY, lambda: {"a", "b"})
        house.ledger.allocate([held("a")], house.now)
        await house.witnesses.confirm(TOY, lambda: {"a", "b"})
    assert house.ledger.forgotten() == []
    house.witnesses.close()


@pytest.mark.parametrize("runs", [True, False])
async def test_a_record_that_lacks_only_pods_that_have_ended_was_not_lost(
    forgetful: Forgetful, pods: Pods, runs: bool
) -> None:
    """An Allocate that a stopped agent read after the kubelet's end was withheld from every pod, for good."""
    forgetful.record(UID, device_id="b")
    await forgetful.ask(after=1)
    forgetful.run(runs=runs)
    forgetful.ledger.allocate([held("a")], forgetful.now)  # by a kubelet that ends before it reads the reply
    forgetful.restart()
    forgetful.record()
    async with limit():
        await forgetful.witnesses.confirm(TOY, lambda: {"a", "b"})
    assert ((TOY, "a") in forgetful.ledger.forgotten()) is runs


@pytest.mark.parametrize("begins", [True, False], ids=["a kubelet begins with it", "the kubelet goes on"])
async def test_a_record_of_before_a_pod_that_was_written_last_is_no_loss_but_for_a_kubelet_that_begins_with_it(
    forgetful: Forgetful, pods: Pods, begins: bool
) -> None:
    """The kubelet takes a snapshot under a lock, and writes after it: of two the older may come last."""
    forgetful.run()
    forgetful.record(UID)
    pods.show("a")
    await forgetful.ask(after=1)
    if begins:
        forgetful.restart()
    forgetful.record("another", device_id="b")
    async with limit():
        await forgetful.witnesses.confirm(TOY, lambda: {"a", "b"})
    assert ((TOY, "a") in forgetful.ledger.forgotten()) is begins
    assert forgetful.witnesses._allocated.is_set() is not begins, "a List is asked soon"


async def test_a_device_is_free_again_when_the_kubelet_has_given_its_container_another(
    forgetful: Forgetful, pods: Pods
) -> None:
    """It drops a pod that it does not admit at its start, and may admit it at the next: the pod's cgroup stays (the lab, d_traps)."""
    forgetful.run()
    forgetful.record(UID)
    await forgetful.ask(after=1)
    forgetful.restart()
    forgetful.ledger.allocate([held("b")], forgetful.now)
    forgetful.record(UID, device_id="b")
    pods.show("b")
    await forgetful.ask(after=1)
    assert forgetful.ledger.forgotten() == []
    for device_id in "bb":
        forgetful.record(UID, device_id=device_id)
        await forgetful.ask(after=MIN_AGE)
    assert forgetful.ended == ["a"]
    assert forgetful.holds == ["b"]


async def test_what_ended_before_a_kubelets_restart_ends(forgetful: Forgetful, pods: Pods) -> None:
    forgetful.record(UID)
    await forgetful.ask(after=1)
    forgetful.record()
    await forgetful.ask(after=MIN_AGE)
    forgetful.restart()
    await forgetful.ask(after=1)
    forgetful.record()
    await forgetful.ask(after=1)
    assert forgetful.ended == ["a"]


async def test_a_pod_that_runs_keeps_its_device_and_shows_its_uid_until_its_processes_have_ended(
    forgetful: Forgetful, pods: Pods
) -> None:
    forgetful.run()
    forgetful.record(UID)
    await forgetful.ask(after=1)
    assert [claim.pods for claim in forgetful.began] == [{UID}]
    assert forgetful.witnesses.unnamed((TOY, "a")) == {UID: "c"}
    forgetful.record()  # by whatever fault
    await forgetful.ask(after=MIN_AGE)
    forgetful.record()
    await forgetful.ask(after=MIN_AGE)
    assert (forgetful.holds, forgetful.trouble) == (["a"], "forgotten")
    assert forgetful.witnesses.unnamed((TOY, "a")) == {UID: ""}
    forgetful.run(runs=False)
    await forgetful.ask(after=1)
    assert forgetful.trouble == ""
    forgetful.record()
    await forgetful.ask(after=1)
    assert forgetful.ended == ["a"]


async def test_whom_a_list_names_is_not_named_a_second_time_by_the_checkpoint(forgetful: Forgetful, pods: Pods) -> None:
    pods.show("a")
    forgetful.record(UID)
    await forgetful.ask(after=1)
    assert forgetful.witnesses.unnamed((TOY, "a")) == {}
    forgetful.record(UID, "another")
    await forgetful.ask(after=1)
    assert forgetful.witnesses.unnamed((TOY, "a")) == {UID: "c", "another": "c"}
    assert forgetful.trouble == "two-pods"


async def test_the_holder_of_a_device_is_asked_for_where_its_processes_are_not_to_be_seen(
    forgetful: Forgetful, pods: Pods
) -> None:
    slot = (TOY, "a")
    pods.show("a")
    forgetful.record(UID)
    assert await forgetful.witnesses.holder([slot]) == (slot, "default/pod (c)")
    pods.show()  # as of one that has ended, or of an init container: the checkpoint may show it yet
    assert await forgetful.witnesses.holder([slot]) is None
    pods.fails = True
    assert await forgetful.witnesses.holder([slot]) is None


async def test_a_pod_whose_processes_run_has_its_device_for_certain_and_one_that_was_seen_to_end_has_not(
    forgetful: Forgetful, pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LIST_WAITS", 1e6)  # however busy the machine is that looks for the processes
    slot = (TOY, "a")
    forgetful.run()
    forgetful.record(UID)
    await forgetful.ask(after=1)
    asked = pods.asked
    finding = asyncio.ensure_future(forgetful.witnesses.holder([slot]))
    while not finding.done():
        pass_time(0.5)
        await settled()
    assert await finding == (slot, f"the pod with the UID {UID}, of which processes run,")
    finding = asyncio.ensure_future(forgetful.witnesses.holder([slot]))  # it was deleted by force a moment ago
    await settled()
    assert not finding.done()
    forgetful.run(runs=False)
    while not finding.done():
        pass_time(0.5)
        await settled()
    assert await finding is None
    assert pods.asked == asked, "a List meets no Allocate (A11.8)"


async def test_no_list_is_asked_for_while_an_allocate_is_under_way(house: House, pods: Pods) -> None:
    """It would make the kubelet forget the ID that is being given (A11.8)."""
    house.witnesses.being_given.add(("a.example/cards", "a"))
    running = asyncio.ensure_future(house.witnesses.run())
    for _ in range(10):
        pass_time(1)
        await settled()
    assert pods.asked == 0
    house.witnesses.being_given.clear()
    while not pods.asked:
        pass_time(1)
        await settled()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
