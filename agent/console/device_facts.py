"""Collects all that is known of one device, for the daemon and for `fairlead explain` without one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from agent.console import views
from agent.console.control import NoSuchDeviceError
from agent.console.device_views import of_drain
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.health import Statement
from agent.inventory import lookup
from agent.inventory.inventory import Inventory
from agent.inventory.selection import Found
from agent.kubelet.allocation import unfit
from agent.model import Slot, SlotKey
from agent.runtime.errors import FairleadError, shown, some
from backends.base import AllocationRefused, Backend, ContainerEdits, Device, Grant, Problem, Resource

_NAMED: Final = 8  # devices in one sentence
_AGAIN: Final = " Create the pod again."


def _nobody(_slot: SlotKey) -> tuple[views.Holder, ...]:
    return ()


class Knowledge(Struct, frozen=True):
    """What an explanation is made from."""

    inventory: Inventory
    backends: Mapping[str, Backend[Any]]
    signals_of: Callable[[str], Sequence[Statement]]
    """The signals about a piece of hardware now."""
    problems_of: Callable[[str, str], Sequence[Problem]]
    """The problems of a backend's unit."""
    wall: Callable[[float], float]
    """Seconds since 1970 for seconds on the monotonic clock."""
    holders: Callable[[SlotKey], tuple[views.Holder, ...]] = _nobody
    """Who has a slot, as far as the kubelet has said."""
    adoption: Mapping[SlotKey, str] = field(default_factory=dict)
    """Why a slot's device could not be made ready."""
    selectable: Callable[[], Iterable[tuple[str, Device]]] = tuple
    """Every device that a selector can name, with its backend, also those that no resource selects."""
    former: Iterable[lookup.Place] = ()
    """What was offered and is not, as it was called then."""


async def find(known: Knowledge, name: str) -> frozenset[str]:
    """The hardware of this name.

    Raises:
        NoSuchDeviceError: there is none, with the nearest name; or several, with what tells them apart.
    """
    inventory = known.inventory
    try:
        return await lookup.find(name, inventory.places(), lookup.unselected(known.selectable()), known.former)
    except FairleadError as error:
        why = _of_resource(inventory, name) if name in inventory.names() else error.sentence
        raise NoSuchDeviceError(why) from error


def _of_resource(inventory: Inventory, name: str) -> str:
    """Which devices to ask about instead of a resource."""
    keys = list(dict.fromkeys(slot.device.key if slot.device else slot.id for slot in inventory.slots(name).values()))
    if not keys:
        return f"{name} is a resource, and it has no device; `fairlead doctor` says why"
    return f"{name} is a resource; name one of its devices: {some(keys, _NAMED)}"


def explain(known: Knowledge, hardware: frozenset[str], name: str) -> views.Explanation | None:
    """What is known of the device that has this hardware, which `find` found by this name; None: it is gone.

    Where several devices are made of the same hardware, it is about the one that is offered; what became of the others
    is among the decisions.
    """
    if owners := known.inventory.on(hardware):
        main = min(owners, key=lambda it: (not _is_called(it, name), it.placed is None, bool(it.device.unusable)))
        return _device(known, main, [it for it in owners if it is not main])
    if users := known.inventory.on(hardware, minding=True):
        return _shared(known, hardware, users)
    if known.inventory.is_held(hardware):
        return _gone(known, hardware)
    unselected = next(((kind, it) for kind, it in known.selectable() if not hardware.isdisjoint(it.hardware)), None)
    return None if unselected is None else _unselected(known, *unselected)


def _is_called(found: Found, name: str) -> bool:
    ids = found.placed.ids if found.placed else ()
    return name == found.device.key or name.rpartition("/")[2] in ids or name in ids


def _read(kind: str, device: Device) -> views.Explanation:
    """What a backend has read of a device."""
    return views.Explanation(
        device.key,
        kind,
        device.unit,
        identity=device.identity,
        hardware=tuple(sorted(device.hardware)),
        depends=tuple(sorted(device.depends)),
        numa_node=device.numa_node,
        ancestry=device.ancestry,
        attributes=dict(device.attributes),
    )


def _device(known: Knowledge, found: Found, others: Iterable[Found]) -> views.Explanation:
    device, kind = found.device, found.backend
    resource, ids = (found.placed.resource, found.placed.ids) if found.placed else _listed(known, device.hardware)
    slot = known.inventory.slot(resource, ids[0]) if ids else None
    gift, refusal = _gift(known, resource, ids) if ids else (None, "")
    decisions = [*_decisions(found)]
    for other in others:
        decisions += _decisions(other, is_about_another=(kind, device.key) != (other.backend, other.device.key))
    return replace(
        _read(kind, device),
        resource=resource,
        decisions=tuple(decisions),
        ids=ids,
        held=(*(held(known, resource, ids) if ids else ()), *_held_otherwise(known, device.hardware, resource, ids)),
        **_health(known, slot),
        signals=_signals(known, device.hardware | device.depends),
        **of_drain(_said(known, device.hardware | device.depends), known.wall),
        problems=tuple(_problems(known, found)),
        gift=gift,
        refusal=_without_a_pod(refusal),
    )


def _listed(known: Knowledge, hardware: frozenset[str]) -> tuple[str, tuple[str, ...]]:
    """The IDs under which hardware is listed, Unhealthy, while a pod has it and it can be offered to none; with their resource."""
    names = ((name, known.inventory.claims(name)) for name in known.inventory.names())
    gone = [it for name, claims in names for it in claims.values() if known.inventory.device((name, it.id)) is None]
    claims = [it for it in gone if not hardware.isdisjoint(it.hardware)]
    resource = claims[0].resource if claims else ""
    return resource, tuple(it.id for it in claims if it.resource == resource)


def _unselected(known: Knowledge, kind: str, device: Device) -> views.Explanation:
    """A device that no resource selects."""
    resources = [it for name in known.inventory.names() if (it := known.inventory.resource(name))]
    decisions = (
        views.Decision(it.name, False, f"does not take it: {why}")
        for it in resources
        if it.spec.backend == kind and (why := it.refuses(device)) is not None
    )
    return replace(_read(kind, device), decisions=tuple(decisions))


def _health(known: Knowledge, slot: Slot | None) -> dict[str, Any]:
    """How a slot is; nothing of one that is not there."""
    if slot is None:
        return {}
    it = slot.health
    since = known.wall(it.since) if it.since else 0.0
    return {"state": it.state.value, "reason": it.reason, "message": it.message, "since": since}


def _shared(known: Knowledge, hardware: frozenset[str], users: Sequence[Found]) -> views.Explanation:
    """Hardware that is no device itself, such as a GPU that is cut into instances."""
    name = ", ".join(sorted(hardware))
    decisions = tuple(
        views.Decision(it.placed.resource if it.placed else "", it.placed is not None, f"{it.device.key} depends on it")
        for it in users
    )
    said = _signals(known, hardware)
    return views.Explanation(name, users[0].backend, "", hardware=tuple(hardware), decisions=decisions, signals=said)


def _gone(known: Knowledge, hardware: frozenset[str]) -> views.Explanation:
    """Hardware that is gone, and that a pod still holds."""
    claims = [
        claim
        for name in known.inventory.names()
        for claim in known.inventory.claims(name).values()
        if not hardware.isdisjoint(claim.hardware)
    ]
    first = claims[0]
    ids = tuple(claim.id for claim in claims if claim.resource == first.resource)
    slot = known.inventory.slot(*first.slot)
    return views.Explanation(
        first.id,
        first.backend,
        "",
        identity=first.identity,
        hardware=tuple(sorted(first.hardware)),
        resource=first.resource,
        ids=ids,
        held=held(known, first.resource, ids),
        **_health(known, slot),
        signals=_signals(known, hardware),
        refusal=_without_a_pod(unfit(first.resource, slot)) if slot else "",
    )


def held(known: Knowledge, resource: str, ids: Iterable[str]) -> tuple[views.Held, ...]:
    """The IDs of a resource that pods hold, with the pods."""
    claims = known.inventory.claims(resource)
    return tuple(views.Held(i, known.holders((resource, i))) for i in ids if i in claims) if claims else ()


def _held_otherwise(
    known: Knowledge, hardware: frozenset[str], resource: str, ids: Collection[str]
) -> Iterator[views.Held]:
    """What pods hold of a device's hardware under IDs that it does not have: those of before, or of an earlier plugin."""
    for name in known.inventory.names():
        for claim in known.inventory.claims(name).values():
            if not hardware.isdisjoint(claim.hardware) and not (name == resource and claim.id in ids):
                yield views.Held(f"{name}/{claim.id}", known.holders(claim.slot))
    for device_id, claim in known.inventory.held_elsewhere(resource) if resource else ():
        if device_id in ids:
            yield views.Held(f"{claim.resource}/{claim.id}", known.holders(claim.slot))


# --- what was decided ---


def _decisions(found: Found, *, is_about_another: bool = False) -> Iterator[views.Decision]:
    """What became of a device in each resource that may have it; of another device on the same hardware, with its name."""
    about = f"; that is about {found.device.key} of the backend {found.backend}" if is_about_another else ""
    if found.device.unusable:
        yield views.Decision("", False, found.device.unusable + about)
    for refusal in found.refused[bool(found.device.unusable) :]:
        resource, _, why = refusal.partition(" ")
        yield views.Decision(resource, False, why + about)
    taken = found.placed.resource if found.placed else ""
    for candidate in found.candidates:
        name = candidate.resource
        if name == taken:
            yield views.Decision(name, True, f"takes it{about}")
        else:
            yield views.Decision(name, False, found.why_not(name) + about)


# --- how it is ---


def _signals(known: Knowledge, hardware: Iterable[str]) -> tuple[views.Signal, ...]:
    return tuple(
        views.Signal(
            name,
            it.reason,
            it.verdict.value,
            it.message,
            known.wall(it.since),
            it.counts,
            tuple(sorted(clears.value for clears in it.waits_for)),
            it.source,
            None if it.changes is None else known.wall(it.changes),
            it.unless_held,
        )
        for name in sorted(hardware)
        for it in known.signals_of(name)
    )


def _said(known: Knowledge, hardware: Iterable[str]) -> Iterator[Statement]:
    return (it for name in sorted(hardware) for it in known.signals_of(name))


def _problems(known: Knowledge, found: Found) -> Iterator[views.Problem]:
    kind = found.backend
    for problem in known.problems_of(kind, found.device.unit):
        yield views.Problem(kind, problem.subject, problem.sentence)
    for device_id in found.placed.ids if found.placed else ():
        if found.placed and (why := known.adoption.get((found.placed.resource, device_id))):
            yield views.Problem(kind, device_id, f"it could not be made ready: {why}")


# --- what a pod would get ---


def _gift(known: Knowledge, name: str, ids: Sequence[str]) -> tuple[views.Gift | None, str]:
    """What a container with the first of these IDs would get, and why it would not."""
    slot, resource = known.inventory.slot(name, ids[0]), known.inventory.resource(name)
    if slot is None or resource is None:
        return None, f"{name} is no longer configured"
    if slot.device is None:
        return None, unfit(name, slot)
    gift, refusal = _edits(known.backends[resource.spec.backend], resource, Grant(slot.id, slot.device))
    return gift, refusal if slot.health.offered else unfit(name, slot)


def _without_a_pod(refusal: str) -> str:
    """A refusal without what it asks of the pod's owner: a person asks here about a device, and there may be no pod."""
    return refusal.replace(" Create the pod again; if it happens again, ", " If it stays so, ").replace(_AGAIN, "")


def _edits(backend: Backend[Any], resource: Resource[Any], grant: Grant) -> tuple[views.Gift | None, str]:
    try:
        edits = backend_answers.edits(ask(lambda: backend.edits(resource, [grant])))
        return _wrapped(edits) if resource.spec.edits == "inline" else _by_cdi(backend, resource, grant, edits), ""
    except AllocationRefused as refusal:
        return None, refusal.sentence
    except Exception as error:  # noqa: BLE001  # a backend may raise anything, and Allocate would refuse
        return None, f"the backend {resource.spec.backend} failed: {shown(error)}"


def _by_cdi(backend: Backend[Any], resource: Resource[Any], grant: Grant, edits: ContainerEdits) -> views.Gift:
    """The same by CDI names, with the nodes and mounts that the container runtime then makes."""
    from agent.cdi import spec, specifications  # noqa: PLC0415  # which most nodes can do without

    if (found := specifications.named(backend, resource, [grant], edits)) is None:
        return _wrapped(edits)
    told = replace(found.edits, nodes=edits.nodes, mounts=edits.mounts)
    return _wrapped(told, spec.file(resource.name).text if resource.spec.edits == "cdi" else "")


def _wrapped(edits: ContainerEdits, cdi_spec: str = "") -> views.Gift:
    return views.Gift(
        dict(edits.env),
        tuple(views.GivenMount(it.path.text, it.container_path, it.read_only) for it in edits.mounts),
        tuple(views.GivenNode(it.path.text, it.container_path, it.permissions) for it in edits.nodes),
        dict(edits.annotations),
        edits.cdi_devices,
        cdi_spec,
    )
