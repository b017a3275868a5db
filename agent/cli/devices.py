"""`fairlead devices`: every device of the node on a line, offered or not; `status` has the same table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import click
from msgspec import Struct
from msgspec.structs import replace

from agent.cli import commands, connection, output
from agent.cli.output import echo
from agent.cli.watch import Past, follow
from agent.console.control import Client
from agent.console.http.topology import Tile, in_order, missing, tiles
from agent.console.views import Device, Status, Unclaimed

HEADINGS: Final = ("NAME", "MODEL", "ADDRESS", "RESOURCE", "STATE", "REASON", "SINCE", "POD")
_CUT: Final = {0: ("right", 12), 1: ("right", 8), 3: ("left", 8), 5: ("right", 12), 7: ("left", 8)}
"""Columns that a terminal may be too narrow for, on which side, and what is left at least: the beginning of an ID stands for it, and of a
resource and a pod the end tells more."""
_GIVES_WAY: Final = (1, 3)
"""Columns that have no room beside the last hour on a terminal of less than `_ROOMY` columns."""
_ROOMY: Final = 100
_WENT: Final = "gone"  # `agent.inventory.shortfall.WENT`, which needs too much to start fast
_LAST: Final = len(HEADINGS) - 1
_COLORS: Final = {"gone": "Unhealthy", "not-offered": "Degraded"}
_UNNAMED: Final = "(not-named)"
"""A pod that the kubelet does not name: it starts, or has ended."""


class Row(Struct, frozen=True):
    """A device as the table shows it; what is not known is empty."""

    name: str
    """What its driver calls it; else its key."""
    model: str
    address: str
    resource: str
    state: str
    """`healthy`, `degraded`, `unhealthy`, `drained`; `gone`, `not-offered`: no pod can get it."""
    reason: str
    message: str
    since: float
    """Seconds since 1970; 0 if unknown."""
    pods: tuple[str, ...]
    key: str
    ids: tuple[str, ...]
    hardware: tuple[str, ...]


@click.command(cls=connection.OfAll, epilog="Exit codes: 0 done, 1 no daemon answers.")
@connection.config
@click.option("--watch", is_flag=True, help="Show it again whenever something happens; q ends it.")
@commands.as_json
def devices(config: Path | None, watch: bool, as_json: bool) -> None:
    """Show each device of this node on a line, also what is gone or not offered: names, resource, state, reason, pods.

    A device is named here as every command takes it. Off a terminal no line is folded or cut, so that it can be searched.
    With --json it prints {"devices": [{"name", "model", "address", "resource", "state", "reason", "message", "since", "pods",
    "key", "ids", "hardware"}]}; with --watch, one such document a line.
    """
    if watch:
        follow(config, (lambda it: output.echo_json({"devices": rows(it)})) if as_json else None, head, body)
        return
    shown = connection.ask(config, Client.status)
    if as_json:
        output.echo_json({"devices": rows(shown)})
        return
    for line in table(rows(shown)):
        echo(line)


def head(shown: Status) -> Iterator[str]:
    """What stays at the top of a screen that follows: the node, and how it is in a line."""
    yield f"Fairlead {shown.version} on {shown.node}, up for {output.ago(shown.now - shown.started)}"
    yield summary(rows(shown))


def body(shown: Status, past: Past | None, is_tight: bool) -> Iterator[str]:
    """What comes below it; where there is no room for all, first those that are not well."""
    every = rows(shown)
    yield from table(sorted(every, key=is_well) if is_tight else every, past)


def is_well(row: Row) -> bool:
    """Whether nothing is wrong with it: it is healthy, or no resource is meant to have it."""
    return row.state == "healthy" or not row.resource


def rows(shown: Status) -> list[Row]:
    """Every device, in the page's order; at the end what no resource is meant to have."""
    every = chain(*(tiles(it.name, it.devices) for it in shown.resources), missing(shown.unclaimed))
    alike: dict[tuple[str, ...], list[Row]] = {}
    for number, tile in enumerate(in_order(every)):
        row = _row(tile)
        differs = (row.state, row.reason, row.message) if not row.hardware else (str(number),)
        alike.setdefault((row.resource, *differs), []).append(row)
    found = [_together(same) for same in alike.values()]  # a device of fifty tokens leaves fifty tombstones
    return found + [_unclaimed(it) for it in shown.unclaimed if not it.resource]


def _row(tile: Tile) -> Row:
    worst = tile.worst
    state = ("gone" if worst.reason == _WENT else "not-offered") if tile.missing else worst.condition.lower()
    ids = tuple(i for view in tile.views for i in view.ids)
    pods = dict.fromkeys(
        pod
        for view in tile.views
        for held in view.held
        for pod in ([f"{who.namespace}/{who.pod}" if who.pod else _UNNAMED for who in held.holders] or [_UNNAMED])
    )
    return Row(
        called(worst, tile.key), worst.model, _address(worst.hardware), tile.resource, state, worst.reason, worst.message,
        worst.since if worst.reason else 0.0, tuple(pods), tile.key, ids, worst.hardware,
    )  # fmt: skip


def _unclaimed(it: Unclaimed) -> Row:
    name, address = called(it, it.device), _address(it.hardware)
    return Row(name, it.model, address, "", "not-offered", "", it.why, 0.0, (), it.device, (), it.hardware)


def _together(same: Sequence[Row]) -> Row:
    first = same[0]
    if len(same) == 1:
        return first
    pods = tuple(dict.fromkeys(pod for it in same for pod in it.pods))
    ids = tuple(i for it in same for i in it.ids)
    return replace(first, name=f"{first.name} and {len(same) - 1} more IDs", pods=pods, ids=ids)


def called(it: Device | Unclaimed, key: str) -> str:
    """What a person types for it: what its driver alone calls it, or else its key."""
    return it.name if it.name and ", " not in it.name else key


def _address(hardware: Iterable[str]) -> str:
    """Its PCI address; of other hardware what it goes by."""
    every = sorted(hardware, key=lambda it: (not it.startswith("pci:"), it))
    return every[0].partition(":")[2] if every else ""


def summary(every: Sequence[Row]) -> str:
    """How the node's devices are, in a line; drains are told apart, and are no failure."""
    number = Counter(row.state for row in every if row.resource)
    bad = [
        f"{number[it]} {it.replace('-', ' ')}" for it in ("unhealthy", "gone", "not-offered", "degraded") if number[it]
    ]
    total = f"{number.total()} device{'' if number.total() == 1 else 's'}"
    drained = output.state("Drained", f", {number['drained']} drained") if number["drained"] else ""
    if not bad:
        return output.state("Healthy", f"{total}, all well") + drained
    worst = "Degraded" if set(number) <= {"healthy", "drained", "degraded", "not-offered"} else "Unhealthy"
    return output.state(worst, f"{total}: {', '.join(bad)}") + drained


def table(every: Sequence[Row], past: Past | None = None) -> Iterator[str]:
    """The table; with `past`, by resource and key, how each device was in the last hour."""
    if not every:
        yield "No device is offered, and none could be: `fairlead discover --all` looks."
        return
    is_brief = output.is_terminal()
    headings = HEADINGS if past is None else (*HEADINGS[:-1], "LAST HOUR", HEADINGS[-1])
    cells = [_cells(row, past, is_brief=is_brief) for row in every]
    tight = past is not None and is_brief and output.columns() < _ROOMY
    kept = [n for n in range(len(headings)) if not (tight and n in _GIVES_WAY)]
    cut = {kept.index(at): side for n, side in _CUT.items() if (at := n + (past is not None and n == _LAST)) in kept}
    fits = ([row[n] for n in kept] for row in (headings, *cells))
    yield from output.table(next(fits), fits, left=len(kept), cut=cut if is_brief else None)


def _cells(row: Row, past: Past | None, *, is_brief: bool) -> tuple[str, ...]:
    since = output.since(row.since, is_brief=is_brief) if row.since else ""
    address = row.address.removeprefix("0000:").rpartition("/")[2] if is_brief else row.address
    state = output.state(_COLORS.get(row.state, row.state.title()), row.state)
    told = (row.name, row.model, address, row.resource, state, row.reason, since)
    history = () if past is None else (past.get((row.resource, row.key), ""),)
    return tuple(cell or "-" for cell in (*told, *history, ",".join(row.pods)))
