"""`fairlead status`: what the daemon offers, how it is, who has it."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
from msgspec.structs import replace

from agent.cli import connection, device_argument, device_history, options, output
from agent.cli.output import bold, echo, table, wrapped
from agent.console.client import Client
from agent.console.views import NAMES_NOTHING, Device, Resource, Status, Unclaimed

_REDRAWN_AT_MOST = 0.5  # seconds; a burst of events is drawn once
_UNNAMED = (
    "A pod that the kubelet does not name starts, or has ended; its device is free once the kubelet's checkpoint leaves it "
    "out, too."
)


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers, 2 there is no such device.")
@connection.config
@click.option("--watch", is_flag=True, help="Show it again whenever something happens.")
@click.option("--pods", is_flag=True, help="Show which container has which device.")
@click.option(
    "--history",
    "device",
    metavar="DEVICE",
    shell_complete=device_argument.complete,
    help="Show how one device was in the last 24 hours, and who had it; named as for explain.",
)
@options.as_json
def status(config: Path | None, watch: bool, pods: bool, device: str | None, as_json: bool) -> None:
    """Show every resource with its devices by state, and what is wrong.

    --json prints what agent/console/views.py describes as Status, with --history as History; with --watch, one such
    document a line. Without a terminal, --watch prints everything again after an empty line.
    """
    if device is not None:
        if watch or pods:
            raise click.UsageError("--history goes with neither --watch nor --pods")
        past = connection.ask(config, lambda client: client.history(device))
        output.echo_json(past) if as_json else echo("\n".join(device_history.lines(past)))
        return

    def show(shown: Status) -> None:
        if as_json:
            output.echo_json(shown)
        else:
            for line in _pods(shown) if pods else _lines(shown):
                echo(line)

    def show_again(shown: Status) -> None:
        click.clear() if sys.stdout.isatty() else echo()
        show(shown)

    async def question(client: Client) -> None:
        if watch:
            await _follow(client, show, show if as_json else show_again)
        else:
            show(await client.status())

    connection.ask(config, question)


async def _follow(client: Client, show: Callable[[Status], None], show_again: Callable[[Status], None]) -> None:
    """Show it, and again after every event, not more often than can be read."""
    changed = asyncio.Event()

    async def listen() -> None:
        async for _ in client.watch(1, follow=True):  # the newest comes at once: from now on none is missed
            changed.set()

    async def draw() -> None:
        showing = show
        while True:
            await changed.wait()
            changed.clear()
            showing(await client.status())
            showing = show_again
            await asyncio.sleep(_REDRAWN_AT_MOST)

    parts = [asyncio.create_task(listen()), asyncio.create_task(draw())]
    try:
        ended, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
        for part in ended:
            part.result()  # the daemon has ended; or why it cannot be asked any more
    finally:
        for part in parts:
            part.cancel()
        await asyncio.gather(*parts, return_exceptions=True)


def _lines(shown: Status) -> Iterator[str]:
    yield from _head(shown)
    if not shown.resources and not shown.templates:
        yield "The configuration has no [[resource]]: nothing is offered."
    elif shown.resources:
        yield ""
        headings = ("RESOURCE", "KUBELET", "OK", "DEGRADED", "BAD", "IN USE")
        yield from table(headings, map(_row, shown.resources), left=2)
    bad = [(resource, device) for resource in shown.resources for device in resource.devices if device.reason]
    complaints = [(resource.name, resource.complaint) for resource in shown.resources if resource.complaint]
    complaints += [
        (it.name, it.complaint or NAMES_NOTHING) for it in shown.templates if it.complaint or not it.resources
    ]
    if bad or complaints:
        yield ""
    for name, why in complaints:
        yield wrapped(f"{name}: {why}", 0, 2)
    for resource, device in _together(bad):
        yield from _complaint(resource, device)
    if shown.unclaimed:
        yield "\n" + bold("NOT OFFERED")
        yield from map(_unclaimed, shown.unclaimed)
    if shown.problems:
        yield "\n" + bold("PROBLEMS")
        yield from (wrapped(one.message, 0, 2) for one in shown.problems)


def _head(shown: Status) -> Iterator[str]:
    configuration = shown.configuration
    kubelet = "the kubelet is there" if shown.kubelet.present else f"no kubelet at {shown.kubelet.socket}"
    up = output.ago(shown.now - shown.started)
    yield wrapped(f"Fairlead {shown.version} on {shown.node}, up for {up}; {kubelet}", 0, 2)
    if shown.kubelet.waiting_for:
        yield wrapped(shown.kubelet.waiting_for[:1].upper() + shown.kubelet.waiting_for[1:], 0, 2)
    if shown.standby:
        yield wrapped(f"Process {' of Fairlead '.join(shown.standby.split())} stands by to take over", 0, 2)
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
    counted = Counter[str]()
    for device in resource.devices:
        counted[device.state] += len(device.ids)
    used = sum(len(device.held) for device in resource.devices)
    numbers = [(counted[name], output.state(name, str(counted[name]))) for name in ("Healthy", "Degraded", "Unhealthy")]
    word, state = resource.registration
    kubelet = word if state == "Healthy" else output.state(state, word)
    return (resource.name, kubelet, *(text if number else "0" for number, text in numbers), str(used))


def _together(bad: Iterable[tuple[Resource, Device]]) -> Iterator[tuple[Resource, Device]]:
    """Tombstones that differ in nothing but their IDs as one: a device of fifty tokens leaves fifty."""
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
    head = f"{device.ids[0] if device.ids else device.key}{more} of {resource.name}"
    yield output.state(device.state, device.state.lower()) + f" {head}"
    # of a device that went while Fairlead was down it is not known
    since = f" since {output.moment(device.since)}" if device.since else ""
    yield wrapped(f"{device.reason}{since}: {device.message}", 2, 2)


def _unclaimed(one: Unclaimed) -> str:
    if not one.resource:
        return wrapped(f"{one.device}: {one.why}", 0, 2)
    head = output.state("Degraded", one.reason) + f" {one.device} of {one.resource}"
    return wrapped(f"{head} since {output.moment(one.since)}: {one.why}", 0, 2)


def _pods(shown: Status) -> Iterator[str]:
    rows, unknown = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for resource in shown.resources:
        for held in (held for device in resource.devices for held in device.held):
            rows += [(who.name, who.container, resource.name, held.id) for who in held.holders]
            if not held.holders:
                unknown.append(("(not named)", "", resource.name, held.id))
    if not rows and not unknown:
        yield "No pod holds a device."
        return
    yield from table(("POD", "CONTAINER", "RESOURCE", "ID"), [*sorted(rows), *sorted(unknown)], left=4)
    if unknown:
        yield wrapped(_UNNAMED, 0, 2)
