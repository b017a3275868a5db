"""Puts together all that is known of one device, the same from a daemon and from a look of our own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from agent.console import views
from agent.console.control import NoSuchDeviceError
from agent.discovery import backend_answers
from agent.discovery.backend_answers import ask
from agent.health import Statement
from agent.inventory import lookup
from agent.inventory.found_devices import Found
from agent.inventory.inventory import Inventory
from agent.kubelet.allocation import unfit
from agent.model import Slot, SlotKey
from agent.runtime.errors import FairleadError, shown
from backends.base import AllocationRefused, Backend, ContainerEdits, Device, Grant, Problem, Resource

_NAMED: Final = 8  # devices in one sentence


def _nobody(_slot: SlotKey) -> tuple[views.Holder, ...]:
    return ()


class Knowledge(Struct, frozen=True):
    """Where the answers are."""

    inventory: Inventory
    backends: Mapping[str, Backend[Any]]
    said_of: Callable[[str], Sequence[Statement]]
    """Everything that is said of a piece of hardware now."""
    problems_of: Callable[[str, str], Sequence[Problem]]
    """The problems of a backend's unit."""
    wall: Callable[[float], float]
    """Seconds since 1970 for seconds on the monotonic clock."""
    holders: Callable[[SlotKey], tuple[views.Holder, ...]] = _nobody
    """Who has a slot, as far as the kubelet has said."""
    adoption: Mapping[SlotKey, str] = field(default_factory=dict)
    """Why a slot's device could not be made ready."""
    selectable: Callable[[], Iterable[tuple[str, Device]]] = tuple
    """What a selector could mean, with its backend: also what no resource selects and is shown nowhere."""


def find(inventory: Inventory, name: str) -> frozenset[str]:
    """The hardware that a person calls so.

    Raises:
        NoSuchDeviceError: there is none, with the nearest name; or several, with what tells them apart.
    """
    try:
        return inventory.find(name)
    except FairleadError as error:
        why = _of_resource(inventory, name) if name in inventory.names() else error.sentence
        raise NoSuchDeviceError(why) from error


def _of_resource(inventory: Inventory, name: str) -> str:
    """What to ask about instead of a resource."""
    keys = list(dict.fromkeys(slot.device.key if slot.device else slot.id for slot in inventory.slots(name).values()))
    if not keys:
        return f"{name} is a resource, and it has no device; `fairlead doctor` says why"
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return f"{name} is a resource; name one of its devices: {', '.join(keys[:_NAMED])}{more}"


def explain(known: Knowledge, name: str) -> views.Explanation:
    """What is known of the device that a person calls so.

    Where several devices are made of the same hardware, it is about the one that is offered; what became of the others
    is among the decisions.

    Raises:
        NoSuchDeviceError: as `find`.
    """
    try:
        hardware = find(known.inventory, name)
    except NoSuchDeviceError:
        if (unselected := _selectable(known, name)) is None:
            raise
        return _unselected(known, *unselected)
    if owners := known.inventory.on(hardware):
        main = min(owners, key=lambda it: (not _is_called(it, name), it.placed is None, bool(it.device.unusable)))
        return _device(known, main, [it for it in owners if it is not main])
    if users := known.inventory.on(hardware, minding=True):
        return _shared(known, hardware, users)
    return _gone(known, hardware)


def _selectable(known: Knowledge, name: str) -> tuple[str, Device] | None:
    """What a person calls so and no resource selects, with its backend."""
    there = tuple(known.selectable())
    try:
        hardware = lookup.find(name, (lookup.Place(it.hardware, it.key, device=it) for _, it in there))
    except FairleadError:
        return None
    return next(((kind, it) for kind, it in there if hardware <= it.hardware), None)


def _is_called(found: Found, name: str) -> bool:
    ids = found.placed.ids if found.placed else ()
    return name == found.device.key or name.rpartition("/")[2] in ids or name in ids


def _device(known: Knowledge, found: Found, others: Iterable[Found]) -> views.Explanation:
    device, kind = found.device, found.backend
    resource, ids = (found.placed.resource, found.placed.ids) if found.placed else ("", ())
    slot = known.inventory.slot(resource, ids[0]) if ids else None
    gift, refusal = _gift(known, resource, ids) if ids else (None, "")
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
        resource=resource,
        decisions=(
            *_decisions(found),
            *(it for other in others for it in _decisions(other, beside=_differ(found, other))),
        ),
        ids=ids,
        held=(*(held(known, resource, ids) if ids else ()), *_held_otherwise(known, device.hardware, resource, ids)),
        state=slot.health.state.value if slot else "",
        reason=slot.health.reason if slot else "",
        message=slot.health.message if slot else "",
        signals=_signals(known, device.hardware | device.depends),
        problems=tuple(_problems(known, found)),
        gift=gift,
        refusal=refusal,
        since=_since(known, slot),
    )


def _unselected(known: Knowledge, kind: str, device: Device) -> views.Explanation:
    """What no resource wants."""
    resources = [it for name in known.inventory.names() if (it := known.inventory.resource(name))]
    return views.Explanation(
        device.key,
        kind,
        device.unit,
        identity=device.identity,
        hardware=tuple(sorted(device.hardware)),
        attributes=dict(device.attributes),
        decisions=tuple(
            views.Decision(it.name, False, f"does not take it: {why}")
            for it in resources
            if it.spec.backend == kind and (why := it.refuses(device)) is not None
        ),
    )


def _since(known: Knowledge, slot: Slot | None) -> float:
    return known.wall(slot.health.since) if slot and slot.health.since else 0.0


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
    """What a pod holds and is not there any more."""
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
        state=slot.health.state.value if slot else "",
        reason=slot.health.reason if slot else "",
        message=slot.health.message if slot else "",
        signals=_signals(known, hardware),
        refusal=unfit(first.resource, slot) if slot else "",
        since=_since(known, slot),
    )


def held(known: Knowledge, resource: str, ids: Iterable[str]) -> tuple[views.Held, ...]:
    """Those of a resource's IDs that pods hold, and who."""
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


def _decisions(found: Found, *, beside: bool = False) -> Iterator[views.Decision]:
    """What became of a device in each resource that may have it; of another device on the same hardware, with its name."""
    about = f"; that is about {found.device.key} of the backend {found.backend}" if beside else ""
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


def _differ(found: Found, other: Found) -> bool:
    return (found.backend, found.device.key) != (other.backend, other.device.key)


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
        for it in known.said_of(name)
    )


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
    if slot is None or slot.device is None or resource is None:
        return None, f"{name} is no longer configured"
    gift, refusal = _edits(known.backends[resource.spec.backend], resource, Grant(slot.id, slot.device))
    return gift, refusal if slot.health.offered else unfit(name, slot)


def _edits(backend: Backend[Any], resource: Resource[Any], grant: Grant) -> tuple[views.Gift | None, str]:
    try:
        edits = backend_answers.edits(ask(lambda: backend.edits(resource, [grant])))
        return _wrapped(edits) if resource.spec.edits == "inline" else _by_cdi(backend, resource, grant, edits), ""
    except AllocationRefused as refusal:
        return None, refusal.sentence
    except Exception as error:  # noqa: BLE001  # a backend may raise anything, and Allocate would refuse
        return None, f"the backend {resource.spec.backend} failed: {shown(error)}"


def _by_cdi(backend: Backend[Any], resource: Resource[Any], grant: Grant, edits: ContainerEdits) -> views.Gift:
    """The same with names; nodes and mounts are a container's, whoever makes them."""
    from agent.cdi import answers, names  # noqa: PLC0415  # which most nodes can do without

    if (found := answers.named(backend, resource, [grant], edits)) is None:
        return _wrapped(edits)
    told = replace(found.edits, nodes=edits.nodes, mounts=edits.mounts)
    return _wrapped(told, names.file(resource.name).text if resource.spec.edits == "cdi" else "")


def _wrapped(edits: ContainerEdits, cdi_spec: str = "") -> views.Gift:
    return views.Gift(
        dict(edits.env),
        tuple(views.GivenMount(it.path.text, it.container_path, it.read_only) for it in edits.mounts),
        tuple(views.GivenNode(it.path.text, it.container_path, it.permissions) for it in edits.nodes),
        dict(edits.annotations),
        edits.cdi_devices,
        cdi_spec,
    )
