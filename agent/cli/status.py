"""`fairlead status`: what the daemon offers, how it is, who has it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click
from msgspec.structs import replace

from agent.cli import commands, connection, device_history, devices, output
from agent.cli.output import bold, echo, table, wrapped
from agent.cli.watch import Past, follow
from agent.console import advice
from agent.console.control import Client
from agent.console.views import NAMES_NOTHING, STATES, Device, Resource, Status, Unclaimed
from agent.runtime.errors import some

_TABLED: Final = 64
"""Devices; of more, the table has those that are not well, and the rest is counted."""
_TOLD: Final = 3
"""Devices of one reason that have a sentence each on a screen without room for all."""
_UNUSABLE: Final = "unusable"  # as `agent.inventory.shortfall` has it: its sentence says what to do
_WORST_FIRST: Final = ("Unhealthy", "Degraded", "Drained", "Healthy")
_UNNAMED = (
    "A pod that the kubelet does not name starts, or has ended; its device is free once the kubelet's checkpoint leaves it "
    "out, too."
)


@click.command(cls=connection.OfAll, epilog="Exit codes: 0 done, 1 no daemon answers, 2 there is no such device.")
@connection.config
@click.option("--watch", is_flag=True, help="Show it again whenever something happens.")
@click.option("--pods", is_flag=True, help="Show which container has which device.")
@click.option(
    "--history",
    "device",
    metavar="DEVICE",
    shell_complete=connection.complete,
    help="Show how one device was in the last 24 hours, and who had it; named as for explain.",
)
@commands.as_json
def status(config: Path | None, watch: bool, pods: bool, device: str | None, as_json: bool) -> None:
    """Show every resource with its devices by state, and what is wrong.

    --json prints all of it as one document, {"version", "started", "now", "kubelet", "configuration", "resources",
    "unclaimed", "problems", ...}, as /status.json serves it; with --history {"key", "resource", "periods", "notes"};
    with --watch, one such document a line. Without a terminal, --watch prints everything again after an empty line.
    """
    if device is not None:
        if watch or pods:
            raise click.UsageError("--history goes with neither --watch nor --pods")
        past = connection.ask(config, lambda client: client.history(device))
        output.echo_json(past) if as_json else echo("\n".join(device_history.lines(past)))
        return

    head, body = (_nothing, _pods) if pods else (_head, _body)
    if watch:
        follow(config, output.echo_json if as_json else None, head, body)
        return
    shown = connection.ask(config, Client.status)
    if as_json:
        output.echo_json(shown)
        return
    for line in (*head(shown), *body(shown, None, False)):
        echo(line)


def _body(shown: Status, past: Past | None, is_tight: bool) -> Iterator[str]:
    if is_tight:
        yield from _troubles(shown, is_tight)
    yield from _resources(shown)
    yield from _devices(shown, past, is_tight)
    if not is_tight:
        yield from _troubles(shown, is_tight)


def _resources(shown: Status) -> Iterator[str]:
    if not shown.resources and not shown.templates:
        yield "The configuration has no [[resource]]: nothing is offered."
    elif shown.resources:
        yield ""
        headings = ("RESOURCE", "KUBELET", "OK", "DEGRADED", "BAD", "DRAINED", "IN USE")
        yield from table(headings, map(_row, shown.resources), left=2)


def _troubles(shown: Status, is_tight: bool) -> Iterator[str]:
    bad = [(resource, device) for resource in shown.resources for device in resource.devices if device.reason]
    complaints = [(resource.name, resource.complaint) for resource in shown.resources if resource.complaint]
    complaints += [
        (it.name, it.complaint or NAMES_NOTHING) for it in shown.templates if it.complaint or not it.resources
    ]
    if bad or complaints:
        yield ""
    for name, why in complaints:
        yield wrapped(f"{name}: {why}", 0, 2)
    if any(resource.overtaken for resource in shown.resources):
        yield from _advised(advice.advice("overtaken", node=shown.node))
    for alike in _with_one_reason(_together(bad)):
        told = alike[:_TOLD] if is_tight else alike
        for resource, device in told:
            yield from _complaint(resource, device)
            yield from output.advised([("held", ", ".join(device.pods))] if device.pods else ())
        if more := [device.name or device.key for _, device in alike[len(told) :]]:
            yield wrapped(f"and {len(more)} more with {alike[0][1].reason}: {some(more, output.NAMED)}", 0, 2)
        yield from _advised(advice.of_device(alike[-1][1], alike[-1][1].name, shown.node))
    if lacking := [one for one in shown.unclaimed if one.resource or not is_tight]:
        yield "\n" + bold("NOT OFFERED")
        for one in lacking:
            yield _unclaimed(one)
            if one.resource:
                yield from _advised(
                    advice.advice(
                        one.reason, one.why, device=one.device, name=one.name, hardware=one.hardware, node=shown.node
                    )
                )
    if shown.problems:
        yield "\n" + bold("PROBLEMS")
        yield from (wrapped(one.message, 0, 2) for one in shown.problems)


def _devices(shown: Status, past: Past | None, is_tight: bool) -> Iterator[str]:
    """The table of `fairlead devices`; on a node of very many, of those that are not well."""
    every = devices.rows(shown)
    if not every:
        return
    yield ""
    if len(every) <= _TABLED:
        yield from devices.table(sorted(every, key=devices.is_well) if is_tight else every, past)
        return
    bad = [row for row in every if row.state != "healthy"]
    if bad:
        yield from devices.table(bad[:_TABLED], past)
    yield f"{len(every) - len(bad[:_TABLED])} more devices: `fairlead devices`"


def _with_one_reason(bad: Iterable[tuple[Resource, Device]]) -> Iterator[list[tuple[Resource, Device]]]:
    """Devices that have one reason, and so one advice, together."""
    alike: dict[tuple[str, ...], list[tuple[Resource, Device]]] = {}
    for resource, device in bad:
        told = device.message if device.reason == _UNUSABLE else ""
        alike.setdefault((device.reason, told, device.besides, device.until), []).append((resource, device))
    yield from sorted(alike.values(), key=lambda same: _WORST_FIRST.index(same[0][1].condition))


def _advised(it: advice.Advice | None) -> Iterator[str]:
    return output.advised(advice.told(it) if it is not None else ())


def _head(shown: Status) -> Iterator[str]:
    configuration = shown.configuration
    kubelet = "the kubelet is there" if shown.kubelet.present else f"no kubelet at {shown.kubelet.socket}"
    up = output.ago(shown.now - shown.started)
    yield wrapped(f"Fairlead {shown.version} on {shown.node}, up for {up}; {kubelet}", 0, 2)
    if shown.kubelet.waiting_for:
        yield wrapped(shown.kubelet.waiting_for[:1].upper() + shown.kubelet.waiting_for[1:], 0, 2)
    if shown.standby:
        yield wrapped(f"Process {' of Fairlead '.join(shown.standby.split())} stands by to take over", 0, 2)
    if every := devices.rows(shown):
        yield devices.summary(every)
    yield from (wrapped(line, 0, 2) for line in _witnesses(shown))
    if configuration.mistakes:
        first = f"{configuration.file} has mistakes and was not reloaded:"
        yield output.state("Unhealthy", wrapped(first, 0, 2))
        yield from (wrapped(mistake, 2, 4) for mistake in configuration.mistakes)
    if configuration.needs_restart:
        yield wrapped(f"A restart is needed for: {', '.join(configuration.needs_restart)}", 0, 2)


def _witnesses(shown: Status) -> Iterator[str]:
    """Who is heard of what the hardware keeps nowhere, and who should be and is not."""
    if heard := [it.name for it in shown.witnesses if it.heard]:
        yield f"Faults are told by {' and '.join(heard)}"
    for it in shown.witnesses:
        if it.needed and not it.heard:
            yield f"{it.name[:1].upper()}{it.name[1:]} is not heard: {it.why}"


def _row(resource: Resource) -> tuple[str, ...]:
    by_state = resource.by_state
    numbers = [output.state(name, str(number)) if (number := by_state[name]) else "0" for name in STATES]
    word, state = resource.registration
    kubelet = word if state == "Healthy" else output.state(state, word)
    return (resource.name, kubelet, *numbers, str(resource.in_use))


def _together(bad: Iterable[tuple[Resource, Device]]) -> Iterator[tuple[Resource, Device]]:
    """Tombstones that differ only in their IDs as one: a device of fifty tokens leaves fifty."""
    alike: dict[tuple[str, ...], list[tuple[Resource, Device]]] = {}
    for number, (resource, device) in enumerate(bad):
        is_tombstone = not device.hardware
        differs = (device.state, device.reason, device.message) if is_tombstone else (str(number),)
        alike.setdefault((resource.name, *differs), []).append((resource, device))
    for group in alike.values():
        (resource, first), *others = group
        yield resource, replace(first, ids=(*first.ids, *(i for _, it in others for i in it.ids)))


def _complaint(resource: Resource, device: Device) -> Iterator[str]:
    """One device that is not well, with the reason's name and sentence."""
    more = f" and {len(device.ids) - 1} more IDs" if len(device.ids) > 1 else ""
    key = device.ids[0] if device.ids else device.key
    state = output.state(device.condition, device.condition.lower())
    yield f"{_named(device.name, key)}{state} {key}{more} of {resource.name}"
    # of a device that went while Fairlead was down it is not known
    since = f" since {output.moment(device.since)}" if device.since else ""
    yield wrapped(f"{device.reason}{since}: {device.message}", 2, 2)


def _named(name: str, key: str) -> str:
    """What its driver calls it, before what else it is called."""
    return "" if not name or key.endswith(name) else f"{bold(name)}: "


def _unclaimed(one: Unclaimed) -> str:
    if not one.resource:
        return wrapped(f"{one.device}: {one.why}", 0, 2)
    name = _named(one.name, one.device)
    head = f"{name}{output.state('Degraded', one.reason)} {one.device} of {one.resource}"
    return wrapped(f"{head} since {output.moment(one.since)}: {one.why}", 0, 2)


def _nothing(_shown: Status) -> Iterator[str]:
    yield from ()


def _pods(shown: Status, _past: Past | None, _is_tight: bool) -> Iterator[str]:
    rows, unknown = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for resource in shown.resources:
        for device, held in ((it, held) for it in resource.devices for held in it.held):
            what = devices.called(device, device.key), resource.name, held.id
            rows += [(who.name, who.container, *what) for who in held.holders]
            if not held.holders:
                unknown.append(("(not named)", "", *what))
    if not rows and not unknown:
        yield "No pod holds a device."
        return
    cut = {0: ("left", 12), 1: ("right", 9), 2: ("right", 12), 3: ("left", 8), 4: ("right", 12)}
    headings = ("POD", "CONTAINER", "NAME", "RESOURCE", "ID")
    yield from table(headings, [*sorted(rows), *sorted(unknown)], left=5, cut=cut if output.is_terminal() else None)
    if unknown:
        yield wrapped(_UNNAMED, 0, 2)
