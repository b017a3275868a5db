"""The sections of the page, one function each: status in, HTML out. Pure."""

from __future__ import annotations

import html
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from agent.console.advice import advice, of_device
from agent.console.http.page.html import Html, h, join, many, moment
from agent.console.http.page.tiles import advised, element, name, sign
from agent.console.http.page.topology import NOT_OFFERED, Machine, Node, Place, Tile
from agent.console.http.page.troubles import Trouble
from agent.console.views import NAMES_NOTHING, STATES, Event, Resource, Status, Template

_OPEN: Final = 4  # troubles; more of them are a line each, so that the devices below stay on the screen
_TILES_NAMED: Final = 8  # of those that have one trouble
_TILES_TOLD: Final = 3  # of those, with what each says
_SENTENCES: Final = 5
_ROWS: Final = 200  # of what is not offered: thousands would be a long step of the loop, and nobody reads them
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
