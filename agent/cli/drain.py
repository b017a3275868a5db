"""`fairlead drain` and `fairlead undrain`: take a device out of service, and put it back."""

from __future__ import annotations

import getpass
from contextlib import suppress
from datetime import datetime, time, timedelta
from pathlib import Path

import click

from agent.cli import commands, connection, output
from agent.runtime.errors import some
from backends.base import Seconds


class _Until(click.ParamType[float]):
    """A duration from now, a time of the day, which comes within 24 hours, or a date."""

    name = "TIME"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        if (until := _moment(text)) is None:
            wanted = "no duration as in '2h30m' and no time as in '18:00' or '2026-11-20T18:00'"
            self.fail(f"{text!r} is {wanted}", param, ctx)
        if until <= output.now():
            self.fail(f"{text!r} is past; a drain without --until lasts until undrain", param, ctx)
        return until


def _moment(text: str) -> float | None:
    """Seconds since 1970; None if this is no time."""
    for read in (_after, _at, _on):
        with suppress(ValueError):
            return read(text)
    return None


def _after(text: str) -> float:
    return output.now() + Seconds.parse(text)


def _at(text: str) -> float:
    """The next time that this node's clocks show it."""
    if ":" not in text:
        raise ValueError("a bare number is a slip")
    now = datetime.fromtimestamp(output.now()).astimezone().replace(tzinfo=None)
    when = datetime.combine(now, time.fromisoformat(text))
    return (when if when > now else when + timedelta(days=1)).astimezone().timestamp()


def _on(text: str) -> float:
    return datetime.fromisoformat(text).astimezone().timestamp()


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers or it refused, 2 there is no such device.")
@connection.device
@connection.config
@click.option("--reason", "-r", help="Why, for the next person who looks; by default who drained it.")
@click.option(
    "--until",
    type=_Until(),
    help="When it is back by itself: '2h30m', '18:00', '2026-11-20T18:00' (by this machine's clock), '2026-11-20T18:00Z'.",
)
@commands.as_json
def drain(device: str, config: Path | None, reason: str | None, until: float | None, as_json: bool) -> None:
    """Offer DEVICE to no new pod: an ID, a key, a PCI address, or what else `explain` finds it by.

    Pods that have it keep it. It is kept over restarts, until the time is up or `fairlead undrain`. With --json it
    prints {"ids", "held", "problem", "replaced", "name", "pods", "besides"}.
    """
    why = reason or f"{getpass.getuser()} gave no reason"
    drained = connection.ask(config, lambda client: client.drain(device, why, until))
    if as_json:
        output.echo_json(drained)
        return
    when = f" until {output.moment(until)}" if until is not None else ""
    later = "nothing that is offered now; it stays drained once it is back"
    output.echo(f"Drained{when}: {output.with_ids(drained.name, drained.ids) or later}.")
    if drained.held:
        how = "keeps it" if drained.ids else "it is gone or cannot be used"
        who = some(drained.pods, output.NAMED) or "A pod that the kubelet does not name"
        have, how = ("have", how.replace("keeps", "keep")) if len(drained.pods) > 1 else ("has", how)
        what = drained.name or some(drained.held, output.NAMED)
        output.echo(f"{who} {have} {what}{' and' if drained.ids else ';'} {how}.")
    if drained.besides:
        them = "that" if len(drained.besides) == 1 else "them"
        output.echo(f"It also has {some(drained.besides, output.NAMED)}; `undrain` will end {them}, too.")
    for before in drained.replaced:
        output.note(f"This takes the place of what was there: {before}.")
    if drained.problem:
        output.note(f"It will not last: {drained.problem}.")


@click.command(epilog="Exit codes: 0 done, 1 no daemon answers, 2 there is no such device.")
@connection.device
@connection.config
@commands.as_json
def undrain(device: str, config: Path | None, as_json: bool) -> None:
    """Offer DEVICE again: ends its drain, its quarantine, and what waits for an operator, such as an XID.

    What is wrong with it now keeps it Unhealthy all the same. With --json it prints {"ids", "ended", "name"}.
    """
    back = connection.ask(config, lambda client: client.undrain(device))
    ids = output.with_ids(back.name, back.ids or (device,))
    if as_json:
        output.echo_json(back)
    elif back.ended:
        output.echo(f"Back in service: {ids} (ended: {some(back.ended, output.NAMED)}).")
    else:
        output.echo(
            f"Nothing has ended: no drain, and nothing else that an operator can end, keeps {ids} out of service."
        )
