"""Checks what a look at the hardware finds: resources that offer nothing, devices that are not well, nodes that pods may lose."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Final

from msgspec import Struct

from agent.console import views
from agent.console.advice import Advice, advice, of_device
from agent.console.doctor import Finding, failure, fine, warning
from agent.console.doctor.host import node_paths
from agent.console.views import NAMES_NOTHING, Status
from agent.inventory.inventory import Inventory
from agent.inventory.lookup import name_of
from agent.inventory.shortfall import found_missing
from agent.inventory.survey import Survey
from agent.model import FORGOTTEN, State
from agent.runtime.errors import some
from backends.base import Device, Host, HostPath, Problem
from backends.linux.globs import Glob, is_glob
from backends.linux.nodes import DeviceNode, NoNodeError, device_node

_LEFT_SHOWN: Final = 3
_PODS_ALONE: Final = (FORGOTTEN, "held", "not-seen", "retired", "two-pods", "unmapped", "withheld")
"""Reasons that say who has a device, or that it was not looked at, and not that hardware fails below a pod."""
_MEND: Final = "Ask `fairlead explain DEVICE` about one of them, and `fairlead discover` about all."


def hardware(found: Survey, said: Status | None = None) -> Iterator[Finding]:
    """One finding for each resource, and one for each problem that a backend has.

    How its devices are, a daemon knows better than a look: it remembers drains, and what the kernel said.
    """
    known = {resource.name: resource for resource in said.resources} if said else {}
    inventory = found.inventory
    if not inventory.selection.written:
        yield failure("The configuration has no [[resource]]: nothing is offered.", "See config.example.toml.")
    names = inventory.names()
    served, missing = set[str](), _missed(found, said)
    named = (name for it in (said.templates if said else ()) for name in it.resources)
    for name in (*names, *(name for name in named if name not in names and known[name].devices)):
        resource = known.get(name)
        if resource and resource.devices:  # what an operator drained is not amiss
            ids = resource.by_state.total()
            lame = [_lame(it) for it in resource.devices if it.condition == State.UNHEALTHY.value]
        else:
            ids, lame = _counted_by_look(inventory, name)
        if not ids:
            yield _nothing(found, name, _mends(missing.get(name, ()), said))
        elif lame:
            first, bad = lame[0], sum(it.ids for it in lame)
            held = [it.view for it in lame if it.view is not None and it.view.held and it.reason not in _PODS_ALONE]
            why = f"{first.message.rstrip('.')} ({first.reason}){_held(it.view for it in lame if it.view)}"
            found_bad = failure if held else warning
            yield found_bad(f"{name}: {bad} of {ids} IDs are Unhealthy; {why}.", _mends(lame, said))
        else:
            yield fine(f"{name} offers {ids}.")
        if drained := [it for it in (resource.devices if resource else ()) if it.condition == "Drained"]:
            covering = [it for it in drained if it.besides]
            why = (covering or drained)[0].message.rstrip(".") + _held(covering or drained)
            sentence = f"{name}: {sum(len(it.ids) for it in drained)} of {ids} IDs are drained; {why}."
            yield warning(sentence, _mends(map(_lame, covering), said)) if covering else fine(sentence)
        served |= {name} if ids else set()
    yield from _missing(missing, said, served | {it for it, given in inventory.selection.given().items() if given})
    for template, given in inventory.selection.given().items():
        if not given and not _left(found, template):
            yield fine(f"{template} offers nothing: {NAMES_NOTHING}.")
        elif not given:
            yield _nothing(found, template, _mends(missing.get(template, ()), said))
    empty = {name for name in (*names, *inventory.selection.given()) if name not in served and not _left(found, name)}
    told = empty | {it.subject for name in names if not inventory.slots(name) for it in problems_of(found, name)}
    for kind, problem in found.problems:
        if problem.subject in told:
            continue  # it has been said of the resource
        yield warning(f"{kind}: {problem.sentence.rstrip('.')}.", "Mend what it names.")


def _missed(found: Survey, said: Status | None) -> Mapping[str, list[_Lame]]:
    """What each resource is meant to have, and no pod can get."""
    every: dict[str, list[_Lame]] = {}
    for one in said.unclaimed if said else ():
        it = _Lame(one.device, one.reason, one.why, 0, one.name, one.hardware)
        every.setdefault(one.resource, []).append(it)
    for left in () if said else found_missing(found.inventory):
        it = _Lame(left.device, left.reason, left.message, 0, *_known(left.seen))
        every.setdefault(left.resource, []).append(it)
    return every


def _missing(every: Mapping[str, list[_Lame]], said: Status | None, served: Set[str]) -> Iterator[Finding]:
    """What resources that have others should have, too."""
    for name in sorted(every.keys() & served):
        are = "is" if len(every[name]) == 1 else "are"
        whys = [f"{it.key}: {it.message.rstrip('.')}" for it in every[name]]
        yield warning(f"{name}: {len(every[name])} more {are} not offered: {_first(whys)}.", _mends(every[name], said))


class _Lame(Struct, frozen=True):
    """A device that is missed, or an ID that is Unhealthy, and why."""

    key: str
    reason: str
    message: str
    ids: int = 0
    name: str = ""
    hardware: tuple[str, ...] = ()
    view: views.Device | None = None
    """As the daemon shows it."""


def _lame(it: views.Device) -> _Lame:
    return _Lame(it.key, it.reason, it.message, len(it.ids), it.name, it.hardware, it)


def _held(devices: Iterable[views.Device]) -> str:
    """Which pods have these devices, as the end of a sentence; empty if none has."""
    having = [f"{', '.join(it.pods)} has {it.name or it.key}" for it in devices if it.pods]
    return f"; {_first(having)}" if having else ""


def _counted_by_look(inventory: Inventory, name: str) -> tuple[int, list[_Lame]]:
    """How many IDs a look found, and those that are Unhealthy."""
    slots = inventory.slots(name).values()
    lame = [
        _Lame(slot.id, slot.health.reason, slot.health.message, 1, *_known(slot.device))
        for slot in slots
        if not slot.health.offered
    ]
    return len(slots), lame


def _known(device: Device | None) -> tuple[str, tuple[str, ...]]:
    return (name_of(device.attributes), tuple(sorted(device.hardware))) if device is not None else ("", ())


def _mends(lame: Iterable[_Lame], status: Status | None) -> str:
    """What to do about the first device of each reason."""
    first: dict[tuple[str, str], _Lame] = {}
    for it in lame:
        first.setdefault((it.reason, it.view.besides if it.view else ""), it)
    told = [(it, found) for it in first.values() if (found := _advice(it, status.node if status else "")) is not None]
    said = [
        f"{it.name or it.key} ({it.reason}): {found.do}" + (f" `{found.command}`" if found.command else "")
        for it, found in told[:_LEFT_SHOWN]
    ]
    return (
        " ".join((*said, "`fairlead status` has the next step for each."))
        if len(told) > _LEFT_SHOWN
        else (" ".join(said) or _MEND)
    )


def _advice(it: _Lame, node: str) -> Advice | None:
    if it.view is not None:
        return of_device(it.view, it.name, node)
    return advice(it.reason, it.message, device=it.key, name=it.name, hardware=it.hardware, node=node)


def _left(found: Survey, name: str) -> list[tuple[str, str]]:
    """The devices that the resource or template could have had and does not have, each with why; none that it excludes."""
    kind, resource = found.inventory.kind(name) or "", found.inventory.selection.written.get(name)
    every = [
        it
        for it in found.inventory.unclaimed()
        if it.backend == kind
        and it.device.resource in (None, name)
        and (resource is None or resource.might_take(it.device))
    ]
    return [*((it.device.key, it.why) for it in every), *_elsewhere(found.inventory, kind, name)]


def _nothing(found: Survey, name: str, mends: str) -> Finding:
    """A resource without a device: what there is that could have been its own, why it is not, and what to do."""
    if not (left := _left(found, name)):
        paths = ", ".join(sorted(_paths_of(found.inventory, name)))
        kind = found.inventory.kind(name)
        missing = _first([it.sentence.removeprefix(f"{name}: ").rstrip(".") for it in problems_of(found, name)]) or (
            f"no device node is at {paths}" if paths else f"the backend {kind} finds no such hardware on this node"
        )
        return warning(
            f"{name} offers nothing: {missing}.",
            "Look whether its driver is loaded, its nodes are there, and its selectors are meant so: `fairlead discover`.",
        )
    whys = [f"{device}: {why.rstrip('.')}" for device, why in left]
    return warning(f"{name} offers nothing: {_first(whys)}.", mends)


def _first(reasons: Sequence[str]) -> str:
    more = [f"and {len(reasons) - _LEFT_SHOWN} more"] if len(reasons) > _LEFT_SHOWN else []
    return "; ".join((*reasons[:_LEFT_SHOWN], *more))


def _paths_of(inventory: Inventory, name: str) -> Iterator[str]:
    resource = inventory.resource(name)
    return node_paths(resource.spec.options) if resource is not None else iter(())


def problems_of(found: Survey, name: str) -> list[Problem]:
    """What is wrong with a resource itself, with what is at its paths, or with hardware that it would have."""
    return (
        [it for _, it in found.problems if it.subject == name]
        or _problems_of_paths(found, name)
        or [it for _, it in found.problems if it.resource == name]
    )


def _problems_of_paths(found: Survey, name: str) -> list[Problem]:
    """What is wrong with what is at the paths of a resource, or at those that its globs take."""
    paths = {*_paths_of(found.inventory, name)}
    globs = [Glob(path) for path in paths if is_glob(path)]
    kind = found.inventory.kind(name)
    return [
        problem
        for of, problem in found.problems
        if of == kind and (problem.subject in paths or any(glob.takes(problem.subject) for glob in globs))
    ]


def _elsewhere(inventory: Inventory, kind: str, name: str) -> Iterator[tuple[str, str]]:
    """What a resource selects, or a template would name, and another has."""
    for device in inventory.devices(kind):
        for found in inventory.on(device.hardware):
            for candidate in found.candidates if found.device is device and found.placed else ():
                giver = inventory.selection.giver(candidate.resource)
                if name in (candidate.resource, giver and giver.name):
                    yield device.key, f"{candidate.resource} {found.why_not(candidate.resource)}"


# --- nodes that a daemon-reload takes from pods ---
#
# Where systemd manages the pods' cgroups, runc tells it each node as /dev/char/MAJOR:MINOR, and leaves out one that is
# neither there nor below /sys (its `cgroups/devices/systemd.go`). Of nodes that the kernel made there are both; NVIDIA's
# are made by a program.


_SLICES: Final = ("fs/cgroup", "fs/cgroup/systemd", "fs/cgroup/devices")  # cgroup v2, and two hierarchies of v1
_NVIDIA: Final = "195"  # NVIDIA's major number (Documentation/admin-guide/devices.txt)


def node_links(host: Host, inventory: Inventory) -> Iterator[Finding]:
    """Warns of nodes that running pods would lose at `systemctl daemon-reload`: links to them are missing."""
    if not any((host.sys / place / "kubepods.slice").is_dir() for place in _SLICES):
        yield fine("systemd manages no pods' cgroups here, as far as can be seen.")
        return
    lost = [node for node in _nodes(host, inventory) if not _is_found(host, node)]
    if not lost:
        yield fine("systemd finds every node that pods may have.")
        return
    nvidia = any(_link(node).name.startswith(f"{_NVIDIA}:") for node in lost)
    tool = "for NVIDIA's nodes, `nvidia-ctk system create-dev-char-symlinks --create-all` does it; " if nvidia else ""
    yield warning(
        f"{_link(lost[0])} is missing: the next `systemctl daemon-reload` takes {some([str(it.path) for it in lost])} "
        "from the pods that have it, for systemd manages their cgroups and finds nodes by these links.",
        f"At each boot, before pods start, link them: {tool}by hand it is `ln -s {lost[0].path} {_link(lost[0])}`.",
    )


def _nodes(host: Host, inventory: Inventory) -> Iterator[DeviceNode]:
    devices = (slot.device for name in inventory.names() for slot in inventory.slots(name).values())
    for path in dict.fromkeys(node.path for device in devices if device is not None for node in device.nodes):
        try:
            yield device_node(host, path)
        except NoNodeError:  # what that means is told of the device
            continue


def _is_found(host: Host, node: DeviceNode) -> bool:
    link = _link(node)
    return any(os.path.lexists(host.local(place)) for place in (link, HostPath(f"/sys{link}")))


def _link(node: DeviceNode) -> HostPath:
    kind = "block" if node.block else "char"
    return HostPath(f"/dev/{kind}/{node.major}:{node.minor}")
