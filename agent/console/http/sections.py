"""The sections of the page, one function each: status in, HTML out. Pure."""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct

from agent.console.advice import advice, of_device
from agent.console.http.html import Html, h, join, many, moment
from agent.console.http.tiles import advised, element, name, sign
from agent.console.http.topology import NOT_OFFERED, Machine, Node, Place, Tile, badness
from agent.console.views import NAMES_NOTHING, STATES, Event, Problem, Resource, Status, Template

_OPEN: Final = 4  # troubles; more of them are a line each, so that the devices below stay on the screen
_TILES_NAMED: Final = 8  # of those that have one trouble
_TILES_TOLD: Final = 3  # of those, with what each says
_SENTENCES: Final = 5
_ROWS: Final = 200  # of what is not offered: thousands would be a long step of the loop, and no reader wants them all
_SPARSE: Final = 8  # more devices of a resource in one place stand closer together, with its name above

_FRAMED: Final = "below one PCI bridge"

Fill = Callable[[Tile], Html]
"""Gives the inside of a tile; nothing where the tiles are sent by themselves."""


def verdict(status: Status, tiles: Sequence[Tile], found: Sequence[Trouble]) -> Html:
    """Whether all is well, in words and in numbers."""
    worst = found[0].state if found else "Healthy"
    configured = sum(bool(resource.backend) for resource in status.resources)
    used = sum(resource.in_use for resource in status.resources)
    return h(
        "div",
        sign(worst),
        h(
            "div",
            h("p", _in_a_word(status, tiles, worst), class_="word"),
            h("p", f"{many(len(tiles), 'device')} of {many(configured, 'resource')}, {many(used, 'ID')} in use"),
        ),
        class_=f"verdict {worst.lower()}",
    )


def _in_a_word(status: Status, tiles: Sequence[Tile], worst: str) -> str:
    """What pods cannot get; if they can get everything, whether something else is wrong."""
    number = Counter(tile.worst.condition for tile in tiles)
    bad, lacking, missing = number["Unhealthy"], number[NOT_OFFERED], len(status.unready())
    words = [] if status.kubelet.present else ["The kubelet is not there"]
    if bad:
        words.append(f"{bad:,} of {many(len(tiles), 'device')} {'is' if bad == 1 else 'are'} unhealthy")
    if lacking and bad:
        words.append(f"{lacking:,} not offered")
    elif lacking:
        words.append(f"{lacking:,} of {many(len(tiles), 'device')} {'is' if lacking == 1 else 'are'} not offered")
    if missing and status.kubelet.present:
        words.append(f"{many(missing, 'resource')} {'is' if missing == 1 else 'are'} not served")
    drained = f", {many(number['Drained'], 'device')} drained" if number["Drained"] else ""
    is_well = worst in ("Healthy", "Drained")  # a drain is no failure
    return (", ".join(words) or ("All is well" if is_well else "All is served, but not all is well")) + drained


def attention(found: Sequence[Trouble]) -> Html:
    """What is wrong, the worst first, with the devices it is about."""
    if not found:
        return h("p", "Nothing.", class_="nothing")
    few = len(found) <= _OPEN
    return h("ul", [_trouble(it, is_open=few) for it in found], class_="troubles" if few else "troubles many")


def _trouble(trouble: Trouble, *, is_open: bool) -> Html:
    more = len(trouble.sentences) - _SENTENCES
    each = () if trouble.sentences else trouble.tiles[:_TILES_TOLD]
    links = [_link(tile) for tile in trouble.tiles[len(each) : _TILES_NAMED]]
    rest = len(trouble.tiles) - _TILES_NAMED
    pods = Counter(
        who.name
        for tile in trouble.tiles for device in tile.views for held in device.held for who in held.holders
    )  # fmt: skip
    summary = h(
        "summary",
        sign(trouble.state),
        h("strong", trouble.title),
        h("span", trouble.tiles[0].worst.condition, class_="state") if trouble.tiles else None,
        h("span", _glance(trouble), class_="glance"),
        class_="title",
    )
    inside = (
        [h("p", sentence) for sentence in trouble.sentences[:_SENTENCES]],
        h("p", f"and {more:,} more") if more > 0 else None,
        [h("p", _link(tile), f" {tile.worst.message}", class_="which") for tile in each],
        h("p", [join(link, " ") for link in links], f"and {rest:,} more" if rest > 0 else None, class_="which")
        if links
        else None,
        h(
            "p",
            "Held by ",
            ", ".join(list(pods)[:_TILES_NAMED]),
            f" and {len(pods) - _TILES_NAMED:,} more" * (len(pods) > _TILES_NAMED),
        )
        if pods
        else None,
        _next_step(trouble),
        h("p", "Since ", moment(trouble.since), class_="since") if trouble.since else None,
    )
    shown = h("details", summary, *inside, open=is_open)
    return h("li", shown, id=element("t", trouble.cause), class_=trouble.state.lower())


def _glance(trouble: Trouble) -> str:
    """What a folded trouble is about."""
    names = [tile.worst.name or tile.key for tile in trouble.tiles[:_TILES_NAMED]]
    return ", ".join(names) or trouble.sentences[0]


def _next_step(trouble: Trouble) -> Html | None:
    """What the devices' reason means, what to do now, and what ends it."""
    found = advice(trouble.reason)
    if trouble.tiles:
        it = trouble.tiles[0].worst
        found = of_device(it, it.name)
    if found is None:
        return None
    return h("details", h("summary", "What to do", h("span", found.do, class_="glance")), advised(found))


def _link(tile: Tile) -> Html:
    return h("a", tile.title, href=f"#{name(tile)}")


def resources(every: Iterable[Resource], templates: Iterable[Template] = ()) -> Html:
    """One row for each resource, and for each template that has given none."""
    rows = [*map(_resource, every), *(_unused(template) for template in templates if not template.resources)]
    if not rows:
        return h("p", "The configuration has no [[resource]]: nothing is offered.", class_="nothing")
    heads = ("Resource", "Kubelet", *STATES, "In use")
    return h(
        "table",
        h("thead", h("tr", [h("th", text, scope="col") for text in heads])),
        h("tbody", rows),
    )


def _resource(resource: Resource) -> Html:
    number = resource.by_state
    word, state = resource.registration
    return h(
        "tr",
        h("th", resource.name, h("span", resource.backend or "no longer configured", class_="backend"), scope="row"),
        h("td", sign(state), f" {word}", data_head="Kubelet"),
        [
            h(
                "td",
                f"{ids:,}",
                data_head=state,
                class_=f"number {state.lower() if ids else 'zero'}",
            )
            for state, ids in ((it, number[it]) for it in STATES)
        ],
        h("td", f"{resource.in_use:,} of {number.total():,}", data_head="In use", class_="number"),
    )


def _unused(template: Template) -> Html:
    name = h("th", template.name, h("span", template.backend, class_="backend"), scope="row")
    return h("tr", name, h("td", NAMES_NOTHING, colspan="6", data_head="Kubelet"))


def devices(tiles: Sequence[Tile], fill: Fill) -> Iterator[str]:
    """The machine, with every device in its place, offered or not; in pieces, since there may be thousands."""
    where = Machine()
    for tile in tiles:
        where.put(tile)
        yield ""
    nodes = where.nodes()
    for node in nodes:
        title = _node_title(node)
        yield f'<section class="node" aria-label="{title}"><h3>{title}</h3>'
        yield from _inside(node.place, fill)
        yield "</section>"
    if any(node.place.below for node in nodes):
        yield h("p", f"Devices in one frame are {_FRAMED}.", class_="legend")
    if not tiles:
        yield h("p", "No device is offered.", class_="nothing")


def _node_title(node: Node) -> str:
    if node.number is not None:
        return f"NUMA node {node.number}"
    return "On the bus, NUMA node unknown" if node.on_bus else "On no bus"


def _inside(place: Place, fill: Fill, label: str | None = None) -> Iterator[str]:
    groups = [(name, list(group)) for name, group in itertools.groupby(place.tiles, lambda tile: tile.resource)]
    yield from _list([tile for _, group in groups if len(group) <= _SPARSE for tile in group], fill, label)
    for resource, group in groups:
        if len(group) > _SPARSE:
            title = f"{resource}, {many(len(group), 'device')}"
            yield f'<div class="dense">{h("p", title)}'
            yield from _list(group, fill, title)
            yield "</div>"
    if place.below:
        yield '<ul class="places">'
        for inner in place.below:
            yield '<li class="place">'
            yield from _inside(inner, fill, _FRAMED)
            yield "</li>"
        yield "</ul>"


def _list(tiles: Sequence[Tile], fill: Fill, label: str | None) -> Iterator[str]:
    if tiles:
        yield '<ul class="tiles"' + (f' aria-label="{html.escape(label)}">' if label else ">")
        for tile in tiles:
            yield h("li", fill(tile), id=name(tile), class_="tile")
        yield "</ul>"


def unclaimed(status: Status) -> Html:
    """What no resource is meant to have, and why."""
    others = [one for one in status.unclaimed if not one.resource]
    rows = [
        h(
            "tr",
            h("th", one.device, scope="row"),
            h("td", one.backend, data_head="Backend"),
            h("td", one.why, data_head="Why"),
        )
        for one in others[:_ROWS]
    ]
    if not rows:
        return h("p", "None: every device that was found is a resource's.", class_="nothing")
    head = h("thead", h("tr", [h("th", text, scope="col") for text in ("Device", "Backend", "Why")]))
    rest = len(others) - _ROWS
    more = h("p", f"and {rest:,} more: ", h("code", "fairlead status")) if rest > 0 else None
    return h("details", h("summary", many(len(others), "device")), h("table", head, h("tbody", rows)), more)


def events(happened: Sequence[Event], names: Mapping[str, str]) -> Html:
    """What happened, the newest first; `names` has what the tiles call the devices."""
    if not happened:
        return h("p", "Nothing yet.", class_="nothing")
    return h("ol", [_event(event, names) for event in reversed(happened)], class_="events")


def _event(event: Event, names: Mapping[str, str]) -> Html:
    title = names.get(event.device) or ", ".join(names.get(it, it) for it in event.device.split(", "))
    return h(
        "li",
        moment(event.time),
        h("p",
          sign(event.condition) if event.state else None,
          h("strong", event.kind),
          [h("span", text, title=event.device if text == title != event.device else None)
           for text in (event.resource, title, event.condition, event.reason) if text]),
        h("p", event.message, class_="message") if event.message else None,
        id=f"e-{event.number}",
    )  # fmt: skip


def about(status: Status) -> Html:
    """Which Fairlead this is, and what it reads."""
    configuration, kubelet = status.configuration, status.kubelet
    rows = (
        ("Version", status.version),
        ("Started", moment(status.started)),
        (
            "Configuration",
            join(h("code", configuration.file or "none: KubeVirt's devices"), " read ", moment(configuration.loaded)),
        ),
        ("Kubelet", join(h("code", kubelet.socket), " is there" if kubelet.present else " is not there")),
    )
    return h("dl", [join(h("dt", term), h("dd", meaning)) for term, meaning in rows])


# --- what is wrong, the worst first, like things told together ---


class Trouble(Struct, frozen=True):
    """Something that needs attention."""

    state: str
    """How bad it is, as devices are: Unhealthy, Degraded; Drained, which is no failure."""
    title: str
    cause: str
    """Tells it from others as long as it lasts, whatever devices it comes to be about."""
    sentences: tuple[str, ...] = ()
    """Nothing where each of the devices says something else."""
    since: float = 0.0
    tiles: tuple[Tile, ...] = ()
    reason: str = ""
    """What the next step follows from; empty: the tiles' own, if there are any."""


def troubles(status: Status, tiles: Sequence[Tile]) -> list[Trouble]:
    """Everything that is wrong, the worst first; what has one cause is one trouble: devices with one reason, complaints of one kind."""
    found = [
        *_kubelet(status), *_devices(tiles), *_complaints(status), *_configuration(status), *_problems(status),
    ]  # fmt: skip
    return sorted(found, key=lambda trouble: -badness(trouble.state))


def _kubelet(status: Status) -> Iterator[Trouble]:
    if not status.kubelet.present:
        why = f"Nothing is registered until {status.kubelet.socket} is there."
        yield Trouble("Unhealthy", "The kubelet is not there", "kubelet", (why,))
    elif missing := status.unready():
        title = "A resource is not served" if len(missing) == 1 else f"{len(missing):,} resources are not served"
        reason = "overtaken" if any(resource.overtaken for resource in status.resources) else ""
        yield Trouble("Unhealthy", title, "resources", tuple(missing), reason=reason)


def _devices(tiles: Sequence[Tile]) -> Iterator[Trouble]:
    groups: dict[tuple[str, ...], list[Tile]] = {}
    for tile in tiles:
        if (it := tile.worst).condition != "Healthy":
            groups.setdefault((it.condition, it.reason, it.besides, it.until), []).append(tile)
    for (state, reason, *drain), alike in groups.items():
        title = f"{_counted(tile.resource for tile in alike)}: {reason or state.lower()}"
        since = min(tile.worst.since for tile in alike)
        bad = "Degraded" if alike[0].missing else state
        told = {tile.worst.message for tile in alike}
        same = tuple(filter(None, told)) if len(told) == 1 else ()
        yield Trouble(bad, title, " ".join(filter(None, (state, reason, *drain))), same, since, tuple(alike))


def _counted(names: Iterable[str]) -> str:
    """Each name once, with how often it is there: `8 × nvidia.com/gpu, rdma/hca`."""
    return ", ".join(f"{number:,} × {name}" if number > 1 else name for name, number in Counter(names).items())


def _complaints(status: Status) -> Iterator[Trouble]:
    """What is wrong with resources that are served all the same."""
    named: dict[str, list[str]] = {}
    served: list[Resource | Template] = [one for one in status.resources if one.served]
    for it in [*served, *status.templates]:
        if it.complaint:
            named.setdefault(it.complaint, []).append(it.name)
    for complaint, names in named.items():
        yield Trouble("Degraded", ", ".join(names), complaint, (complaint,))


def _configuration(status: Status) -> Iterator[Trouble]:
    if mistakes := status.configuration.mistakes:
        title = f"{status.configuration.file} has mistakes and was not reloaded"
        yield Trouble("Degraded", title, "mistakes", tuple(mistakes))
    if changed := status.configuration.needs_restart:
        yield Trouble("Degraded", "A restart is needed", "restart", (f"The file has changed {', '.join(changed)}.",))


def _problems(status: Status) -> Iterator[Trouble]:
    """Those of a backend together, those of a part of Fairlead together."""
    parts: dict[tuple[str, str], list[Problem]] = {}
    for problem in status.problems:
        parts.setdefault((problem.backend, "" if problem.backend else problem.subject), []).append(problem)
    for (backend, part), alike in parts.items():
        subjects = tuple(dict.fromkeys(it.subject for it in alike))
        about = f"{backend} · {subjects[0]}" if len(subjects) == 1 else f"{len(subjects):,} × {backend}"
        title = backend if subjects == (backend,) else about if backend else f"Fairlead itself: {part}"
        yield Trouble("Degraded", title, f"problem {backend} {part}", tuple(it.message for it in alike))
