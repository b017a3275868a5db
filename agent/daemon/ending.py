"""Ends the daemon: at once where nobody else is there, else once a standby or a successor serves the node in its place."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import structlog

from agent.console.views import HandedOver
from agent.daemon import successor
from agent.daemon.node import Node
from agent.daemon.serving import Serving
from agent.runtime.supervision.notify import Notifier

LEAVE: Final = 20.0
"""Seconds that an agent which was told to end waits for a standby that is there to take over; less than what ends it."""

_REPLY: Final = 0.1  # seconds in which the answer to who asked has left

log = structlog.get_logger()


class Ending:
    """The end of the running agent."""

    def __init__(self, node: Node, serving: Serving, notifier: Notifier) -> None:
        self._node, self._serving, self._notifier = node, serving, notifier
        self._scope, self._is_leaving = anyio.CancelScope(), False

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Cut the body off at SIGTERM or SIGINT, or when another agent serves."""
        with self._scope:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
            yield

    def _stop(self, number: int) -> None:
        log.info("stopping", signal=signal.Signals(number).name)
        if self._serving.standbys.any and not self._is_leaving:
            self._is_leaving = True
            self._node.tasks.start_soon(self._leave)
        else:
            self._end()

    def _end(self) -> None:
        self._notifier.stopping()
        self._scope.cancel()

    async def _leave(self) -> None:
        """End once a standby serves in our place, or none is there any more."""
        with anyio.move_on_after(LEAVE):
            standbys = self._serving.standbys
            while await standbys.come() and not await self._serving.hand_over():
                if standbys.any and not standbys.ready():
                    await standbys.changed()
        self._end()

    async def replace(self) -> HandedOver:
        """Have a new process serve the node, and end.

        Raises:
            RefusedError: it cannot be, and this agent serves on.
        """
        return await asyncio.shield(asyncio.ensure_future(self._hand_to_successor()))  # who asked may be gone by then

    async def _hand_to_successor(self) -> HandedOver:
        who = await successor.replace(self._serving, self._notifier)
        asyncio.get_running_loop().call_later(_REPLY, self._scope.cancel)
        return HandedOver(who)
