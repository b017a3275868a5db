"""Keeps this Node's condition FairleadDevicesHealthy, and drains what its annotation fairlead.dev/drain names.

The condition says whether every device of every resource can be given to pods; what an operator has drained is no failure. It is
written when it changes, and every five minutes to show that Fairlead still looks (as the kubelet does with those of its own:
nodeStatusReportFrequency).

What the annotation names no more is undrained. A drain of ours says in its reason by which name it came about, and so is told from a person's, also after a restart: what
`fairlead drain` drained, or drained again, is left alone. What is named stays drained: `fairlead undrain` lasts until the
next look.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

import anyio
import msgspec
import structlog
from msgspec import Struct

from agent.health import HealthBook
from agent.health.drains import Drain
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Missing
from agent.kubernetes import events
from agent.kubernetes.api import STRATEGIC, WATCH, Api, ApiError, backoff, read
from agent.kubernetes.events import EXPECTED, Notice, timestamp
from agent.model import Slot
from agent.runtime.errors import FairleadError, brief, some
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Problems, Trouble
from agent.runtime.workers import Workers

TYPE: Final = "FairleadDevicesHealthy"

HEARTBEAT: Final = 300.0
"""Seconds after which it is written though it says the same."""

TOGETHER: Final = 2.0
"""Seconds for which changes are gathered."""

_LONGEST: Final = 1000  # characters of a message

Resources = Mapping[str, Mapping[str, Slot]]
"""The slots of every resource."""

ANNOTATION: Final = "fairlead.dev/drain"

MOST_NAMES: Final = 64
"""Devices that an annotation can name; each is searched for among all devices."""

_LOOK_AGAIN: Final = 60.0  # seconds after which what is drained is compared with what is named, though nothing happened
_DRAINS_TOGETHER: Final = 1.0  # seconds for which changes of devices are gathered
_PREFIX: Final = f"the node's annotation {ANNOTATION} names "
_ACCEPT: Final = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io, application/json"
"""A Node without its status, which is what is long in it."""

log = structlog.get_logger()


# --- the condition ---


class Condition(Struct, frozen=True):
    """What it says."""

    status: str
    """`True` or `False`."""
    reason: str
    message: str


def condition(resources: Resources, missing: Iterable[Missing]) -> Condition:
    """The condition for these slots, and these devices that are not offered."""
    sick: dict[str, str] = {}
    for resource, slots in resources.items():
        for slot in slots.values():
            if not slot.health.offered and slot.health.reason not in EXPECTED:
                device = slot.device.key if slot.device else slot.id
                sick.setdefault(f"{device} of {resource}", slot.health.reason)
    absent = {f"{it.device} of {it.resource}": it.reason for it in missing}
    if not (sick or absent):
        return Condition("True", "DevicesHealthy", "every device can be given to pods")
    told = [f"{device} ({reason})" for those in (sick, absent) for device, reason in sorted(those.items())]
    message = f"{len(sick)} unhealthy, {len(absent)} not offered: {some(told)}"
    return Condition("False", "DevicesUnhealthy" if sick else "DevicesNotOffered", brief(message, _LONGEST))


class _Known(msgspec.Struct, rename="camel"):
    """A condition that the Node has."""

    type: str
    status: str
    last_transition_time: str | None = None


class _Status(msgspec.Struct):
    conditions: list[_Known] = []


class _Node(msgspec.Struct):
    status: _Status = msgspec.field(default_factory=_Status)


class ConditionKeeper:
    """Writes the condition when it changes, and every five minutes."""

    def __init__(
        self,
        node: str,
        resources: Callable[[], Resources],
        missing: Callable[[], Iterable[Missing]],
        unwritten: Trouble,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`resources` has the slots of every resource, copies, which a thread reads; `missing` what is not offered."""
        self._path = f"/api/v1/nodes/{node}"
        self._resources, self._missing, self._unwritten = resources, missing, unwritten
        self._clock, self._wall = clock, wall
        self._since: str | None = None  # when the status that is written became so
        self._changed = Doorbell()

    def changed(self) -> None:
        """Something about devices has changed."""
        self._changed.set()

    async def run(self, api: Api, workers: Workers) -> None:
        """Write, until cancelled; decided in a thread of `workers`, since there may be 10,000 devices."""
        written, written_at, tries = None, 0.0, backoff()
        while True:
            now = await workers.start(partial(condition, self._resources(), list(self._missing())))
            if now != written or self._clock() - written_at >= HEARTBEAT:
                try:
                    await self._write(api, now, written)
                except ApiError as error:
                    if error.status:
                        self._unwritten.report_once(error.sentence)
                    await anyio.sleep(tries.next())
                    continue
                self._unwritten.healed()
                written, written_at = now, self._clock()
                tries.reset()
            await self._changed.rung(max(0.0, written_at + HEARTBEAT - self._clock()), gather=TOGETHER)

    async def _write(self, api: Api, now: Condition, before: Condition | None) -> None:
        """Write it; `before` is what we wrote last, if anything.

        Raises:
            ApiError: it cannot be written.
        """
        moment = timestamp(self._wall())
        if before is None:  # what an earlier run of ours wrote says since when it is so
            node = read(await api.call("GET", self._path), _Node)
            known = next((it for it in node.status.conditions if it.type == TYPE), None)
            is_same = known is not None and known.status == now.status
            self._since = known.last_transition_time if known and is_same else None
        elif before.status != now.status:
            self._since = moment
        self._since = self._since or moment
        told = {
            "type": TYPE,
            "status": now.status,
            "reason": now.reason,
            "message": now.message,
            "lastHeartbeatTime": moment,
            "lastTransitionTime": self._since,
        }
        await api.call("PATCH", f"{self._path}/status", {"status": {"conditions": [told]}}, STRATEGIC)


# --- the annotation ---


def names(value: str) -> tuple[str, ...]:
    """The devices that an annotation names, each once; they are separated by commas or blanks."""
    return tuple(dict.fromkeys(brief(name) for name in re.split(r"[,\s]+", value) if name))


def reason(name: str) -> str:
    """The reason of a drain that came about by this name."""
    return f"{_PREFIX}{name}"


def named_by(drain: Drain) -> str | None:
    """The name by which a drain came about; None if it is a person's."""
    return drain.reason.removeprefix(_PREFIX) if drain.reason.startswith(_PREFIX) else None


class Plan(Struct, frozen=True):
    """What to drain and what to undrain."""

    drain: Mapping[str, frozenset[str]]
    """Name → the hardware that is not drained yet."""
    undrain: Mapping[str, frozenset[str]]
    """Name that is gone from the annotation → the hardware that it had drained."""


def plan(found: Mapping[str, frozenset[str]], named: Iterable[str], drains: Iterable[Drain]) -> Plan:
    """What leads from the drains that there are to those that the annotation asks for.

    Args:
        found: the names that are devices' → their hardware.
        named: all names; what is not there at the moment stays drained.
        drains: every drain.
    """
    drained = {it.hardware: named_by(it) for it in drains}
    wanted = frozenset[str]().union(*found.values())
    over: dict[str, frozenset[str]] = {}
    for hardware, name in drained.items():
        if name is not None and name not in named and hardware not in wanted:
            over[name] = over.get(name, frozenset()) | {hardware}
    todo = {name: hardware - drained.keys() for name, hardware in found.items()}
    return Plan({name: hardware for name, hardware in todo.items() if hardware}, over)


class _Metadata(Struct):
    annotations: dict[str, str] = {}


class _Object(Struct):
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)
    message: str = ""
    """Of an error."""


class _Change(Struct):
    """A line of a watch (meta/v1 WatchEvent)."""

    type: str
    object: _Object


class Devices(Protocol):
    """The devices of the node, which can be drained."""

    inventory: Inventory
    health: HealthBook

    async def find(self, name: str) -> frozenset[str]:
        """The hardware of this name.

        Raises:
            FairleadError: nothing is called that, or several devices are.
        """

    async def drain(self, hardware: Iterable[str], reason: str) -> None:
        """Drain hardware."""

    async def undrain(self, hardware: Iterable[str]) -> tuple[str, ...]:
        """End drains; the reasons that ended."""


class DrainAnnotation:
    """Follows the annotation and drains what it names."""

    def __init__(
        self, node: str, devices: Devices, tell: Callable[[Sequence[Notice]], None], problems: Problems
    ) -> None:
        """`node` is the Node's name; `tell` takes what is to become Events."""
        self._devices, self._tell, self._subject = devices, tell, events.about_node(node)
        self._path = f"/api/v1/nodes?fieldSelector=metadata.name%3D{node}&watch=true&timeoutSeconds={WATCH}"
        self._named: tuple[str, ...] | None = None  # None: the API server has not said
        self._found: Mapping[str, frozenset[str]] = {}
        self._found_at: tuple[tuple[str, ...], int] = (), -1
        self._unknown: frozenset[str] = frozenset()
        self._changed = Doorbell()
        self._name = node
        self._unread = problems.trouble(
            "kubernetes",
            f"the node's annotation {ANNOTATION} cannot be read",
            "kubernetes-annotation-unread",
            then="what it named last stays drained",
        )
        self._misnamed = problems.trouble(
            "kubernetes",
            f"the node's annotation {ANNOTATION} names what is no device of this node",
            "kubernetes-annotation-unknown",
            then="they are drained once they are there",
        )
        self._undone = problems.trouble(
            "kubernetes",
            f"what the node's annotation {ANNOTATION} names is not drained",
            "kubernetes-annotation-undone",
            then="trying again",
        )
        self.troubles = (self._unread, self._misnamed, self._undone)
        """What may not work."""

    def changed(self) -> None:
        """Devices came or went, or a drain has changed."""
        self._changed.set()

    # --- what the API server says ---

    async def watch(self, api: Api) -> None:
        """Follow the annotation, until cancelled."""
        tries, self._named = backoff(), None
        while True:
            try:
                # without a resourceVersion a watch begins with what is there: nothing has to be listed
                await api.watch(self._path, _ACCEPT, self._take)
                tries.reset()
                if self._named is None:
                    self._unread.report_once(f"there is no node {self._name!r}: the variable NODE_NAME must name it")
            except ApiError as error:
                if error.status:
                    self._unread.report_once(error.sentence)
            await anyio.sleep(tries.next())

    def _take(self, line: bytes) -> None:
        """A line of the watch.

        Raises:
            ApiError: it tells of an error.
        """
        change = read(line, _Change)
        if change.type == "ERROR":
            raise ApiError(f"the API server ends the watch: {change.object.message}", 500)
        self._unread.healed()
        if change.type not in ("ADDED", "MODIFIED"):  # a Node that is deleted asks for nothing
            return
        named = names(change.object.metadata.annotations.get(ANNOTATION, ""))
        if named != self._named:
            self._named = named
            self._changed.set()

    # --- what is done about it ---

    async def run(self) -> None:
        """Drain and undrain, until cancelled."""
        self._found_at = (), -1  # what is wrong with the names is told again
        while True:
            if self._named is not None:
                await self._follow(self._named)
            await self._changed.rung(_LOOK_AGAIN, gather=_DRAINS_TOGETHER)

    async def _follow(self, named: tuple[str, ...]) -> None:
        found = await self._find(named)
        todo = plan(found, named, self._devices.health.drains())
        try:
            for name, hardware in todo.drain.items():
                await self._devices.drain(hardware, reason(name))
                log.info("drained", device=name, hardware=sorted(hardware), reason=reason(name))
            for name, hardware in todo.undrain.items():
                ended = await self._devices.undrain(hardware)
                log.info("undrained", device=name, hardware=sorted(hardware), ended=list(ended) or "nothing")
        except FairleadError as error:
            self._undone.report_once(error.sentence)
        else:
            self._undone.healed()

    async def _find(self, named: tuple[str, ...]) -> Mapping[str, frozenset[str]]:
        """The names that are devices' → their hardware; searched for where other names or devices are there."""
        inventory = self._devices.inventory
        if (state := (named, inventory.revision)) == self._found_at:
            return self._found
        found: dict[str, frozenset[str]] = {}
        unknown: dict[str, str] = {}
        for name in named[:MOST_NAMES]:
            try:
                found[name] = await self._devices.find(name)
            except FairleadError as error:
                unknown[name] = error.sentence
        for name in named[MOST_NAMES:]:
            unknown[name] = f"{name!r} is one too many: an annotation can name {MOST_NAMES} devices"
        self._found_at, self._found = state, found
        self._tell_of(unknown)
        return found

    def _tell_of(self, unknown: Mapping[str, str]) -> None:
        if unknown:
            self._misnamed.report_once(some(list(unknown.values())))
        else:
            self._misnamed.healed()
        new, self._unknown = unknown.keys() - self._unknown, frozenset(unknown)
        self._tell([events.unknown_drain(self._subject, name, unknown[name]) for name in sorted(new)])
