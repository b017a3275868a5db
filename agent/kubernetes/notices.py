"""Says what has happened to devices as Kubernetes' Events do: about a Node or a Pod, with a reason and a sentence.

Events are those of core/v1, which `kubectl describe` shows of both kinds. It asks for a Node's by its name in the place of
its UID (kubectl's describe.go), as the kubelet writes them, and for a Pod's by its UID.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct

from agent.health.book import DRAINED
from agent.inventory.shortfall import Missing
from agent.model import Transition
from agent.runtime.errors import brief

COMPONENT: Final = "fairlead"
"""Who reports, as `kubectl describe` has it under "From"."""

EXPECTED: Final = (DRAINED, "held")
"""Reasons for which a device is Unhealthy that nobody needs to be warned of."""

_LONGEST: Final = 900  # characters of a message: events.k8s.io/v1 takes 1024 bytes


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


def node(name: str) -> Subject:
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
