"""Follows the daemon on a screen, as top does: the head stays, what has no room below it is counted, and `q` ends it.

It outlives the daemon: where none answers it says since when it waits, and goes on with the next one.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import click

from agent.cli import connection, output
from agent.cli.device_history import LEGEND, spark
from agent.console.control import Client, NoDaemonError
from agent.console.views import Histories, Status
from agent.runtime.errors import FairleadError
from agent.runtime.pacing import Doorbell

Head = Callable[[Status], Iterator[str]]
Past = Mapping[tuple[str, str], str]
"""Resource and key of a device → how it was in the last hour, drawn."""
Body = Callable[[Status, Past | None, bool], Iterator[str]]
"""With True what matters most comes first: the screen has no room for all of it."""

_REDRAWN_AT_MOST: Final = 0.5  # seconds; a burst of events is drawn once
_REDRAWN_AT_LEAST: Final = 10.0  # ages and the last hour go on, though nothing happens
_AGAIN: Final = 1.0  # seconds between two looks for a daemon
_ALTERNATE, _BACK = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # xterm's alternate screen, without a cursor
_HOME, _TO_LINE_END, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


def follow(config: Path | None, show_json: Callable[[Status], None] | None, head: Head, body: Body) -> None:
    """Show the daemon's status again whenever something happens, until Ctrl-C or `q`.

    Without a terminal, or with `show_json`, each is printed below the one before.

    Raises:
        FairleadError: no daemon answers at the start.
    """
    connection.ask(config, Client.status)  # else the reason is said, and that is all
    socket = connection.admin_socket(config)
    try:
        if show_json is None and output.is_terminal():
            with _raw():
                asyncio.run(_followed(socket, _Screen(head, body)))
        else:
            asyncio.run(_show(socket, _Printed(show_json, head, body)))
    except KeyboardInterrupt:
        raise click.exceptions.Exit(130) from None


async def _followed(socket: Path, screen: _Screen) -> None:
    """Show it until `q` is typed."""
    ended = asyncio.Event()

    def read() -> None:
        if sys.stdin.read(1) in ("q", "Q", ""):
            ended.set()

    if sys.stdin.isatty():
        asyncio.get_running_loop().add_reader(sys.stdin, read)
    await _first_of(_show(socket, screen), ended.wait())


async def _show(socket: Path, view: _Screen | _Printed) -> None:
    """Show what one daemon after the other says."""
    while True:
        client = Client(socket)
        try:
            with suppress(NoDaemonError):
                await _one(client, view)
        finally:
            client.close()
        view.wait()
        await asyncio.sleep(_AGAIN)


async def _one(client: Client, view: _Screen | _Printed) -> None:
    """Show what one daemon says until it ends."""
    changed = Doorbell()

    async def listen() -> None:
        async for _ in client.watch(1, follow=True):  # the newest comes at once: from now on none is missed
            changed.set()

    async def draw() -> None:
        while True:
            past = await _past(client) if isinstance(view, _Screen) else None
            view.show(await client.status(), past)
            await asyncio.sleep(_REDRAWN_AT_MOST)
            await changed.rung(_REDRAWN_AT_LEAST if isinstance(view, _Screen) else math.inf)

    await _first_of(listen(), draw())


async def _first_of(*parts: Coroutine[Any, Any, object]) -> None:
    """Run these side by side until one ends or raises."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _past(client: Client) -> Histories | None:
    try:
        return await client.histories()
    except NoDaemonError:
        raise
    except FairleadError:  # a daemon of an earlier version does not tell them
        return None


class _Printed:
    """What follows is printed below."""

    def __init__(self, show_json: Callable[[Status], None] | None, head: Head, body: Body) -> None:
        self._show_json, self._head, self._body = show_json, head, body
        self._is_first, self._waits = True, False

    def show(self, shown: Status, _: Histories | None) -> None:
        """Print it after an empty line."""
        if self._show_json is not None:
            self._show_json(shown)
        else:
            for line in (*([] if self._is_first else [""]), *self._head(shown), *self._body(shown, None, False)):
                output.echo(line)
        self._is_first, self._waits = False, False

    def wait(self) -> None:
        """No daemon answers."""
        if not self._waits:
            output.note(f"waiting for Fairlead since {output.moment(output.now())}")
        self._waits = True


class _Screen:
    """A terminal's screen: the head stays, and what has no room is counted in the last line."""

    def __init__(self, head: Head, body: Body) -> None:
        self._head, self._body = head, body
        self._last: tuple[Sequence[str], Sequence[str]] = (), ()
        self._lost = 0.0

    def show(self, shown: Status, past: Histories | None) -> None:
        """Draw it."""
        drawn = None if past is None else _drawn(shown, past)
        head, body = _lines(self._head(shown)), _lines(self._body(shown, drawn, False))
        if len(head) + len(body) >= shutil.get_terminal_size((80, 24)).lines:
            body = _lines(self._body(shown, drawn, True))
        self._last = head, body
        self._lost = 0.0
        self._draw(*self._last)

    def wait(self) -> None:
        """Say above what was seen last that no daemon answers, and since when."""
        self._lost = self._lost or output.now()
        head, body = self._last
        waiting = f"waiting for Fairlead since {output.moment(self._lost)}; this is how it was:"
        self._draw([output.state("Unhealthy", waiting), *head], body)

    @staticmethod
    def _draw(above: Sequence[str], below: Sequence[str]) -> None:
        columns, rows = shutil.get_terminal_size((80, 24))
        room = max(rows - len(above) - 1, 1)  # the last line of the screen says how it ends
        more = len(below) - room
        foot = f"{more} more; " if more > 0 else ""
        shown = [*above, *below[:room]][: rows - 1]
        shown.append(output.dim(f"{foot}{output.moment(output.now())}, q ends; {LEGEND}"))
        text = (_TO_LINE_END + "\n").join(output.clipped(line, columns) for line in shown)
        output.draw(_HOME + text + _TO_LINE_END + _BELOW)


def _lines(texts: Iterator[str]) -> list[str]:
    return [line for text in texts for line in text.split("\n")]


def _drawn(shown: Status, past: Histories) -> dict[tuple[str, str], str]:
    others = {(it.resource, it.key): it.periods for it in past.others}
    devices = ((it.name, device.key) for it in shown.resources for device in it.devices)
    drawn = {it: spark(others.get(it, past.plain), shown.now) for it in devices}
    gone = ((it.resource, it.device) for it in shown.unclaimed if it.resource)
    return drawn | {it: spark(others.get(it, ()), shown.now) for it in gone}


@contextmanager
def _raw() -> Iterator[None]:
    """The terminal with a screen of its own, and keys without Enter; as it was, after."""
    before = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
    output.draw(_ALTERNATE)
    try:
        if before is not None:
            tty.setcbreak(sys.stdin)
        yield
    finally:
        if before is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        output.draw(_BACK)
