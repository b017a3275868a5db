"""Says what has happened to devices as Kubernetes' Events do, about a Node or a Pod, and sends them one after the other.

Events are those of core/v1, which `kubectl describe` shows of both kinds. It asks for a Node's by its name in the place of
its UID (kubectl's describe.go), as the kubelet writes them, and for a Pod's by its UID. The same again raises the count of the
Event that is there.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final

import anyio
from msgspec import Struct

from agent.health.book import DRAINED
from agent.inventory.shortfall import Missing
from agent.kubernetes.api import STRATEGIC, Api, ApiError, backoff
from agent.model import Transition
from agent.runtime.errors import brief
from agent.runtime.pacing import Doorbell
from agent.runtime.problems import Trouble

COMPONENT: Final = "fairlead"
"""Who reports, as `kubectl describe` has it under "From"."""

EXPECTED: Final = (DRAINED, "held")
"""Reasons for which a device is Unhealthy that no person needs to be warned of."""

_LONGEST: Final = 900  # characters of a message: events.k8s.io/v1 takes 1024 bytes

_REMEMBERED: Final = 1000  # Events of ours; client-go remembers 4096
_LONGEST_NAME: Final = 200  # characters of a Node's or Pod's in that of an Event, which has 253 at most
_LIFETIME: Final = 3000.0  # seconds for which an Event is taken to be there: API servers forget them after an hour


# --- what is said ---


class Subject(Struct, frozen=True):
    """What an Event is about."""

    kind: str
    name: str
    uid: str
    """Empty if it is not known."""
    namespace: str = ""


class Notice(Struct, frozen=True):
    """One thing that an Event says."""

    subject: Subject
    reason: str
    """A word for machines: `DeviceUnhealthy`."""
    device: str
    """Its key, or the resource whose devices it is about; notices that differ in nothing else are one Event."""
    message: str
    is_warning: bool


def about_node(name: str) -> Subject:
    """The Node of this name."""
    return Subject("Node", name, name)


def changed(subject: Subject, it: Transition) -> Notice:
    """A device came, went, or is in another state."""
    is_expected = it.reason in EXPECTED
    held = ", which the pod holds," if subject.kind == "Pod" else ""
    why = "".join((f" ({it.reason})" if it.reason else "", f": {it.message}" if it.message else ""))
    message = f"{it.device} of {it.resource}{held} is {it.state}{why}"
    reason = "DeviceDrained" if it.reason == DRAINED else f"Device{it.state}"
    return Notice(subject, reason, it.device, message, is_warning=it.state != "Healthy" and not is_expected)


def not_offered(subject: Subject, it: Missing) -> Notice:
    """A resource is meant to have this device, and no pod can get it."""
    message = f"{it.device} of {it.resource} is not offered ({it.reason}): {it.message}"
    return Notice(subject, "DeviceNotOffered", it.device, message, is_warning=True)


def offered_again(subject: Subject, it: Missing) -> Notice:
    """A device that was not offered is offered again."""
    message = f"{it.device} of {it.resource} is offered again"
    return Notice(subject, "DeviceOffered", it.device, message, is_warning=False)


def many(subject: Subject, resource: str, count: int) -> Notice:
    """More devices of a resource changed at the same moment."""
    message = f"{count} more devices of {resource} changed at the same moment; `fairlead status` names them"
    return Notice(subject, "DevicesChanged", resource, message, is_warning=True)


def omitted(subject: Subject, count: int) -> Notice:
    """Notices were not sent, because there were too many."""
    message = f"{count} more changes of devices are told in Fairlead's log alone: there are too many for events"
    return Notice(subject, "EventsOmitted", "", message, is_warning=True)


def unknown_drain(subject: Subject, name: str, sentence: str) -> Notice:
    """The Node's annotation names something that is no device."""
    return Notice(subject, "DrainUnknown", name, sentence, is_warning=True)


def event(notice: Notice, name: str, first: float, last: float, count: int, host: str) -> dict[str, Any]:
    """The Event (core/v1) of this name: said first and last at these seconds since 1970, by the Node `host`."""
    about = notice.subject
    involved = {"apiVersion": "v1", "kind": about.kind, "name": about.name, "namespace": about.namespace}
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": about.namespace or "default"},
        "involvedObject": {key: it for key, it in (involved | {"uid": about.uid}).items() if it},
        "reason": notice.reason,
        "type": "Warning" if notice.is_warning else "Normal",
        "source": {"component": COMPONENT, "host": host},
        "reportingComponent": COMPONENT,
        "reportingInstance": host,
        "firstTimestamp": timestamp(first),
        **again(notice, last, count),
    }


def again(notice: Notice, last: float, count: int) -> dict[str, Any]:
    """What of an Event is another when it happens once more."""
    return {"message": brief(notice.message, _LONGEST), "lastTimestamp": timestamp(last), "count": count}


def timestamp(wall: float) -> str:
    """A moment as Kubernetes writes it (meta/v1 Time: RFC 3339 in seconds)."""
    return datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


# --- sending it ---


class _Sent(Struct, frozen=True):
    """An Event that the API server has."""

    path: str
    count: int
    at: float
    """Monotonic seconds."""


class EventSender:
    """Sends notices as Events, one after the other."""

    def __init__(
        self,
        node: str,
        refused: Trouble,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`node` is the Node's name; `refused` is told when the API server refuses an Event."""
        self._node, self._refused, self._clock, self._wall = node, refused, clock, wall
        self._queue = EventQueue(about_node(node))
        self._bucket = Bucket()
        self._come = Doorbell()
        self._sent: OrderedDict[object, _Sent] = OrderedDict()
        self._number = 0

    def tell(self, those: Iterable[Notice]) -> None:
        """Queue notices to be sent."""
        wall = self._wall()
        for notice in those:
            self._queue.put(notice, wall)
        self._come.set()

    async def run(self, api: Api) -> None:
        """Send, until cancelled."""
        tries = backoff()
        while True:
            if (wait := self._bucket.wait(self._clock())) > 0:
                await anyio.sleep(wait)
                continue
            if (waiting := self._queue.take()) is None:
                await self._come.rung()
                continue
            self._bucket.take()
            if await self._send(api, waiting):
                tries.reset()
            else:
                await anyio.sleep(tries.next())

    async def _send(self, api: Api, waiting: Waiting) -> bool:
        """Send one; False where it has to be sent again."""
        try:
            await self._write(api, waiting)
        except ApiError as error:
            if error.status:
                self._refused.report_once(error.sentence)
            if error.is_final:  # as of a namespace that is being removed: it must not keep the others waiting
                return True
            self._queue.put_back(waiting)
            return False
        except BaseException:
            self._queue.put_back(waiting)  # a reload goes on with it
            raise
        self._refused.healed()
        return True

    async def _write(self, api: Api, waiting: Waiting) -> None:
        key, now = key_of(waiting.notice), self._clock()
        before = self._sent.pop(key, None)
        if before is not None and now - before.at < _LIFETIME:
            count = before.count + waiting.count
            try:
                await api.call("PATCH", before.path, again(waiting.notice, waiting.last, count), STRATEGIC)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:  # the Event was removed
                    self._sent[key] = before
                    raise
            else:
                self._remember(key, _Sent(before.path, count, now))
                return
        about = waiting.notice.subject
        self._number += 1
        moment = int(waiting.first * 1e9) + self._number
        name = f"{about.name[:_LONGEST_NAME].rstrip('-.')}.{moment:x}"  # as client-go names them
        path = f"/api/v1/namespaces/{about.namespace or 'default'}/events"
        said = event(waiting.notice, name, waiting.first, waiting.last, waiting.count, self._node)
        await api.call("POST", path, said)
        self._remember(key, _Sent(f"{path}/{name}", waiting.count, now))

    def _remember(self, key: object, sent: _Sent) -> None:
        self._sent[key] = sent
        if len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)


# --- the notices that are to become Events: few, merged where they say the same, and let out slowly ---
#
# A flapping device, or 10,000 that fail at once, must not flood the API server. Pure: `now` is monotonic seconds.

BURST: Final = 25
"""Events that may go out at once (client-go's events_cache.go: defaultSpamBurst)."""

REFILL: Final = 5.0
"""Seconds for each one more: 720 of a node in an hour at most. client-go has 300 s, but for each object by itself."""

WAITING: Final = 100
"""Notices that wait; more are counted and told as one. The last of them goes out after 8 minutes."""

_Key = tuple[Subject, str, str]


def key_of(notice: Notice) -> _Key:
    """What notices have in common that are one Event."""
    return notice.subject, notice.reason, notice.device


class Waiting(Struct, frozen=True):
    """A notice that waits."""

    notice: Notice
    first: float
    """When it came first, in seconds since 1970."""
    last: float
    count: int = 1


class Bucket:
    """A token bucket: so many at once, then one for each span of time."""

    def __init__(self, burst: int = BURST, refill: float = REFILL) -> None:
        self._burst, self._refill = burst, refill
        self._tokens, self._filled = float(burst), 0.0

    def wait(self, now: float) -> float:
        """Seconds until there is a token; 0 if there is one."""
        self._tokens = min(float(self._burst), self._tokens + (now - self._filled) / self._refill)
        self._filled = now
        return max(0.0, (1.0 - self._tokens) * self._refill)

    def take(self) -> None:
        """Take one."""
        self._tokens -= 1.0


class EventQueue:
    """The notices that wait, the oldest first."""

    def __init__(self, node: Subject) -> None:
        """`node` is the subject of the notice that says how many were left out."""
        self._node = node
        self._waiting: OrderedDict[_Key, Waiting] = OrderedDict()
        self._omitted = 0
        self._omitted_at = 0.0

    def put(self, notice: Notice, wall: float) -> None:
        """Add a notice; `wall` is seconds since 1970."""
        key = key_of(notice)
        if (before := self._waiting.get(key)) is not None:
            self._waiting[key] = Waiting(notice, before.first, wall, before.count + 1)
            self._waiting.move_to_end(key)  # what is so now is told last
        elif len(self._waiting) < WAITING:
            self._waiting[key] = Waiting(notice, wall, wall)
        else:
            self._omitted, self._omitted_at = self._omitted + 1, wall

    def take(self) -> Waiting | None:
        """Take the next one out; after the last, one that says how many were left out."""
        if self._waiting:
            return self._waiting.popitem(last=False)[1]
        if not self._omitted:
            return None
        count, self._omitted = self._omitted, 0
        return Waiting(omitted(self._node, count), self._omitted_at, self._omitted_at)

    def put_back(self, it: Waiting) -> None:
        """Put a notice that could not be sent at the front, with what came meanwhile."""
        key = key_of(it.notice)
        later = self._waiting.pop(key, None)
        if later is not None:
            it = Waiting(later.notice, it.first, later.last, it.count + later.count)
        self._waiting[key] = it
        self._waiting.move_to_end(key, last=False)
