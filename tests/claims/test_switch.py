"""Whatever pods another plugin has left on a node, no hardware is given to more pods than may have it, and no ID gets lost.

The kubelet is a model of a few lines; what takes up claims, decides and lists is the program's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass
from dataclasses import replace as replaced
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace
from structlog.testing import capture_logs

from agent.claims.ledger import MIN_AGE, Ledger
from agent.inventory.inventory import Inventory
from agent.kubelet import pod_claims, witnesses
from agent.kubelet.api.v1beta1 import ContainerAllocateResponse, DeviceSpec
from agent.kubelet.pod_claims import PodClaims
from agent.kubelet.wire import PodDevices
from agent.kubelet.witnesses import Checkpoint, CheckpointEntry
from agent.model import HEALTHY, Health, Held, State
from backends.base import Device, HostPath, Node, Resource
from tests.fakes import KIND, Sharing, device, held, reconfigure, resource

A, B = OURS = ("a.example/one", "b.example/two")
THEIRS = "their.example/three"
PIECES = ("h0", "h1", "h2")
FOREIGN = ("f0", "f1", "f2")
BROKEN = Health(State.UNHEALTHY, "broken", "It broke.")

Group = frozenset[str]
"""Hardware that is one device."""

some_groups = st.lists(st.integers(0, 3), min_size=3, max_size=3).map(
    lambda numbers: [
        frozenset(piece for piece, number in zip(PIECES, numbers, strict=True) if number == group)
        for group in range(3)
        if group in numbers
    ]
)
"""Each piece is in one of three devices, or it is not there."""
some_ids = st.lists(st.sampled_from(FOREIGN), min_size=1, max_size=2, unique=True)
some_hardware = st.frozensets(st.sampled_from(PIECES), min_size=1, max_size=2)


@dataclass(frozen=True)
class Pod:
    """A pod that runs."""

    resource: str
    ids: tuple[str, ...]
    hardware: frozenset[str]
    answer: bytes
    """What the plugin that gave it said, as the checkpoint has it."""
    is_told: bool = True
    """Whether the answer says what it has."""
    is_known: bool = True
    """Whether its ID says what it has: not of several parts, which may be in other devices once our state is lost."""


def answer(hardware: frozenset[str]) -> bytes:
    nodes = [DeviceSpec(f"/dev/{piece}", f"/dev/{piece}", "rw") for piece in sorted(hardware)]
    return msgspec.json.encode(bytes(ContainerAllocateResponse(devices=nodes)))


class Kubelet:
    """Who has what, the record of it, and the lists."""

    def __init__(self) -> None:
        self.pods: dict[str, Pod] = {}
        self.lists: dict[str, frozenset[str]] = {}
        """Of the plugin that is registered: resource → healthy IDs."""
        self.written: Checkpoint | None = None
        self._admitted = self._writings = 0

    def admit(self, pod: Pod) -> None:
        self._admitted += 1
        self.pods[f"pod-{self._admitted}"] = pod
        self.write()

    def write(self) -> None:
        self._writings += 1
        entries = tuple(CheckpointEntry(uid, "c", it.resource, it.ids, it.answer) for uid, it in self.pods.items())
        ids = {name: frozenset(i for it in entries if it.resource == name for i in it.ids) for name in (*OURS, THEIRS)}
        self.written = Checkpoint((self._writings, 0, 0), entries, ids)

    def held(self, name: str) -> frozenset[str]:
        return frozenset(i for pod in self.pods.values() if pod.resource == name for i in pod.ids)

    def free(self, name: str) -> list[str]:
        return sorted(self.lists.get(name, frozenset()) - self.held(name))

    async def list_pods(self, *_: object) -> list[PodDevices]:
        return [PodDevices("default", uid, "c", it.resource, it.ids) for uid, it in self.pods.items()]


class Daemon:
    """Claims and lists of one run of the program."""

    def __init__(self, resources: Sequence[Resource[Any]], kept: Sequence[Held], clock: list[float]) -> None:
        self.inventory, self.ledger = Inventory(resources, {KIND: Sharing(*resources)}), Ledger()
        self.ledger.restore(kept, clock[0])
        self.inventory.claim(kept)
        self.claims = PodClaims(
            self.ledger, self.inventory, self, Path("podresources"), Path("plugins"), clock=lambda: clock[0]
        )

    def adopted(self, held: Sequence[Held]) -> None:
        self.inventory.claim(held)

    def released(self, ended: Sequence[Held]) -> None:
        self.inventory.unclaim(ended)

    def resend(self, resource: str) -> None:
        self.inventory.touch(resource)

    def claims_settled(self) -> None: ...

    def claims_asked(self) -> None: ...


class Switching(RuleBasedStateMachine):
    """A node that changes between another plugin and Fairlead, while pods come and go."""

    def __init__(self) -> None:
        super().__init__()
        self.loop, self.patches = asyncio.new_event_loop(), ExitStack()
        self.kubelet, self.clock = Kubelet(), [1000.0]
        self.patches.enter_context(patch.object(witnesses, "read_at_once", lambda _: self.kubelet.written))
        self.patches.enter_context(patch.object(pod_claims, "list_pods", self.kubelet.list_pods))
        self.patches.enter_context(capture_logs())
        self.groups: list[Group] = []
        self.takers: tuple[str, ...] = (A,)
        self.scheme, self.is_ours = "n", False
        self.sick: Group = frozenset()

    @initialize(strict=st.booleans(), count=st.sampled_from([1, 2]))
    def begin(self, strict: bool, count: int) -> None:  # as hypothesis calls it
        self.adopt = "strict" if strict else "lenient"
        self.daemon = Daemon(self.configure(count), (), self.clock)
        self.plug([frozenset([piece]) for piece in PIECES])

    def configure(self, count: int) -> list[Resource[Any]]:
        self.count = count
        made = [resource(name, replicas=count) for name in OURS]
        self.resources = [replace(it, spec=replace(it.spec, adopt=self.adopt)) for it in made]
        return self.resources

    def wait_for(self, work: Coroutine[Any, Any, object]) -> None:
        self.loop.run_until_complete(work)

    def devices(self) -> Mapping[str, tuple[Device, ...]]:
        """The second piece of a device may be in others at other times, as in bundles that are paired anew."""
        return {
            "unit": tuple(
                replace(
                    device(f"{self.scheme}{min(group)}", *self.takers, hardware=group, exclusive=group, unit="unit"),
                    nodes=tuple(Node(HostPath(f"/dev/{it}"), f"/dev/{it}", "rw") for it in sorted(group)),
                )
                for group in self.groups
            )
        }

    # --- what happens to the node ---

    @rule(groups=some_groups)
    def plug(self, groups: list[Group]) -> None:
        self.groups = groups
        self.daemon.inventory.update(KIND, self.devices())
        self.prepare_lists()

    @rule(piece=st.sampled_from(PIECES), health=st.sampled_from([HEALTHY, BROKEN]))
    def judge(self, piece: str, health: Health) -> None:
        self.daemon.inventory.set_health({piece: health})
        self.sick = self.sick - {piece} if health.offered else self.sick | {piece}

    @rule(count=st.sampled_from([1, 2]), scheme=st.sampled_from("nm"), takers=st.sampled_from([(A,), (B,), (A, B)]))
    def reload(self, count: int, scheme: str, takers: tuple[str, ...]) -> None:
        self.scheme, self.takers = scheme, takers
        resources = self.configure(count)
        reconfigure(self.daemon.inventory, resources, {KIND: Sharing(*resources)}, {KIND: self.devices()})
        self.prepare_lists()

    @rule(has_state=st.booleans())
    def restart(self, has_state: bool) -> None:
        kept = self.daemon.ledger.held() if has_state else ()
        for uid, it in self.kubelet.pods.items() if not has_state else ():
            behind = (self.daemon.inventory.slot(it.resource, device_id) for device_id in it.ids)
            there = frozenset[str]().union(*(slot.device.hardware for slot in behind if slot and slot.device))
            is_ours_of_parts = len(it.hardware) > len(it.ids) and not set(it.ids) & set(FOREIGN)
            if is_ours_of_parts and (there != it.hardware or not self.is_ours):
                self.kubelet.pods[uid] = replaced(it, is_known=False)
        self.daemon = Daemon(self.resources, kept, self.clock)
        self.daemon.inventory.set_health(dict.fromkeys(self.sick, BROKEN))
        self.daemon.inventory.update(KIND, self.devices())
        self.kubelet.lists = {} if self.is_ours else self.kubelet.lists
        self.send_lists()

    @rule()
    def switch(self) -> None:
        """Another plugin registers the resources, or ends and Fairlead does."""
        self.is_ours = not self.is_ours
        self.kubelet.lists = {}
        self.send_lists()

    @rule()
    def look(self) -> None:
        """Half a minute later: a claim whose pod has ended ends."""
        for _ in range(2):
            self.clock[0] += MIN_AGE
            self.wait_for(self.daemon.claims.ask())
            self.kubelet.write()

    def _listed(self, name: str) -> Set[str]:
        return self.daemon.inventory.slots(name).keys()

    def prepare_lists(self) -> None:
        """What happens at once when a list has changed; it is sent a moment later."""
        for name in self.daemon.inventory.names() if self.is_ours else ():
            self.wait_for(self.daemon.claims.confirm(name, partial(self._listed, name)))

    @rule()
    def send_lists(self) -> None:
        self.prepare_lists()
        for name in self.daemon.inventory.names() if self.is_ours else ():
            slots = self.daemon.inventory.slots(name)
            assert self.kubelet.held(name) <= slots.keys(), "no list lacks what a pod holds"
            self.kubelet.lists[name] = frozenset(i for i, slot in slots.items() if slot.health.offered)
            self.kubelet.write()

    # --- pods ---

    @precondition(lambda self: not self.is_ours)
    @rule(name=st.sampled_from((A, A, B)), ids=some_ids, hardware=some_hardware, is_told=st.booleans())
    def another_plugin_gives(self, name: str, ids: list[str], hardware: frozenset[str], is_told: bool) -> None:
        self.give(Pod(name, tuple(sorted(ids)), hardware, answer(hardware) if is_told else b"null", is_told))

    @rule(ids=some_ids, hardware=some_hardware)
    def a_plugin_of_another_resource_gives(self, ids: list[str], hardware: frozenset[str]) -> None:
        self.give(Pod(THEIRS, tuple(sorted(ids)), hardware, answer(hardware)))
        self.prepare_lists()  # else it is seen within a minute

    @precondition(lambda self: not self.is_ours)
    @rule(data=st.data())
    def another_plugin_gives_it_under_our_id(self, data: st.DataObject) -> None:
        known = [
            (name, slot.id, slot.device.hardware)
            for name in OURS
            for slot in self.daemon.inventory.slots(name).values()
            if slot.device and len(slot.device.hardware) == 1 and slot.id not in self.kubelet.held(name)
            if slot.id.startswith(self.scheme)
        ]
        if known:
            name, device_id, hardware = data.draw(st.sampled_from(known))
            self.give(Pod(name, (device_id,), hardware, answer(hardware)))

    def give(self, pod: Pod) -> None:
        """Another plugin may let pods share; what nobody can know it has given to one pod alone."""
        others = [it for it in self.kubelet.pods.values() if it.hardware & pod.hardware]
        if self.kubelet.held(pod.resource).isdisjoint(pod.ids) and all(it.is_told and pod.is_told for it in others):
            self.kubelet.admit(pod)

    @precondition(lambda self: any(self.gifts()))
    @rule(data=st.data())
    def a_pod_asks(self, data: st.DataObject) -> None:
        gifts = list(self.gifts())
        name = data.draw(st.sampled_from(sorted({claim.resource for claim in gifts})))
        ours = [claim for claim in gifts if claim.resource == name]
        claims = data.draw(st.lists(st.sampled_from(ours), min_size=1, max_size=2, unique=True))
        self.daemon.ledger.allocate(claims, self.clock[0])
        self.daemon.inventory.claim(claims)
        hardware = frozenset[str]().union(*(claim.hardware for claim in claims))
        self.kubelet.admit(Pod(name, tuple(sorted(claim.id for claim in claims)), hardware, answer(hardware)))

    def gifts(self) -> Iterator[Held]:
        """What the kubelet could ask for now, and would get."""
        for name in OURS:
            for device_id in self.kubelet.free(name) if self.is_ours else ():
                slot = self.daemon.inventory.slot(name, device_id)
                again = self.daemon.inventory.why_not_again((name, device_id))
                if slot is not None and slot.device is not None and slot.health.offered and again is None:
                    yield held(name, device_id, slot.device)

    @invariant()
    def nothing_can_be_given_once_too_often(self) -> None:
        for gift in self.gifts():
            for piece in gift.hardware:
                pods = [
                    it for it in self.kubelet.pods.values() if piece in it.hardware and self.counts(it, gift.resource)
                ]
                assert len(pods) < self.count, f"{piece} as {gift.id} of {gift.resource}"

    @invariant()
    def no_id_of_broken_hardware_is_healthy(self) -> None:
        for name in OURS:
            for slot in self.daemon.inventory.slots(name).values():
                assert slot.device is None or not slot.health.offered or self.sick.isdisjoint(slot.device.hardware)

    def counts(self, pod: Pod, name: str) -> bool:
        """Whether a resource must mind what that pod has."""
        if pod.resource == THEIRS:
            return pod.is_told and self.count == 1  # what several may have others share, too
        return pod.is_known and (pod.is_told or (self.adopt == "strict" and pod.resource == name))

    @precondition(lambda self: self.kubelet.pods)
    @rule(data=st.data())
    def a_pod_ends(self, data: st.DataObject) -> None:
        del self.kubelet.pods[data.draw(st.sampled_from(sorted(self.kubelet.pods)))]

    def teardown(self) -> None:
        try:
            self.daemon.inventory.set_health(dict.fromkeys(PIECES, HEALTHY))
            self.kubelet.pods.clear()
            self.look()
            self.look()  # what the first one learnt of is a minute old now
            assert self.daemon.ledger.held() == []
            for name in self.daemon.inventory.names():
                for slot in self.daemon.inventory.slots(name).values():
                    assert slot.device is not None
                    assert slot.health.offered, f"{slot.id} heals once no pod holds anything"
        finally:
            self.daemon.claims.close()
            self.loop.close()
            self.patches.close()


Switching.TestCase.settings = settings(
    max_examples=300, stateful_step_count=20, deadline=None, report_multiple_bugs=False
)
test_no_hardware_is_given_once_too_often_and_no_id_gets_lost = Switching.TestCase
