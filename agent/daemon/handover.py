"""Gives what this agent serves to a standby, and says whether the standby has taken it.

The order is that of `agent.kubelet.handover_socket`. This agent serves as ever until the standby has the lock, and its streams stay
open until the kubelet listens to the standby: from one that stalls or dies everything can be taken back. In between, what the
kubelet asks of us is the standby's to answer: only one of both gives devices, acts on hardware and writes the state.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import anyio
import structlog

from agent.kubelet.handover_socket import FIXED_PATHS, SPEAKS, TELLS_GIVEN, End, Relay, Standby
from agent.kubelet.lock import Lock
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar

_UNDER_WAY: Final = 5.0  # seconds for Allocates that had begun; a longer one fails its pod, as at any stop
_TAKES_WITHIN: Final = 2.0  # seconds in which one that lives has the lock; the kubelet's calls wait meanwhile
_MAY_TAKE: Final = 10.0  # seconds for the same where we serve meanwhile: its disk may be slow
_AT_MOST: Final = 15.0  # seconds in which it has taken all
_SILENT_AT_MOST: Final = 8.0  # seconds between two of its words: 2 for who holds what, and after 5 more it is `done`
_LINGER: Final = 0.3  # seconds for calls that the kubelet sent us before it knew of the standby

log = structlog.get_logger()


class Giver:
    """One hand-over of the node to a standby."""

    def __init__(
        self,
        registrars: Mapping[str, Registrar],
        plugins: Mapping[str, Plugin],
        relay: Relay,
        lock: Lock,
        stop_acting: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare.

        Args:
            registrars: of the resources that are served.
            plugins: of the same.
            relay: asks the standby what the kubelet asks us.
            lock: what the standby takes.
            stop_acting: ends what only one agent of a node may do.
        """
        self._registrars, self._plugins = dict(registrars), dict(plugins)
        self._relay, self._lock = relay, lock
        self._stop_acting = stop_acting

    async def give(self, standby: Standby) -> bool:
        """Hand everything over; False if the standby was lost meanwhile, or hangs. Then `take_back` is to be called.

        One that hangs goes on where it stopped, once it can: it stays connected until we have the lock again.
        """
        log.info("handing-over", standby=standby.who, resources=sorted(self._registrars))
        speaks = min(standby.speaks, SPEAKS)
        if speaks < TELLS_GIVEN:
            await self._stop()
        self._lock.release()
        standby.say("take", str(speaks))
        word, _ = await standby.says(_MAY_TAKE if speaks >= TELLS_GIVEN else _TAKES_WITHIN)
        if word and speaks >= TELLS_GIVEN:
            await self._stop()
            standby.say("given")
        given = bool(word) and await self._answer(standby)
        if given:
            self._relay.close()
            log.info("handed-over", standby=standby.who)
        else:
            log.warning("standby-lost", standby=standby.who, then="serving on")
        return given

    async def _stop(self) -> None:
        """Answer no call by ourselves, send no list, and do nothing that only one agent may do."""
        self._relay.on_wait = lambda name: self._plugins[name].on_call()
        for registrar in self._registrars.values():
            registrar.give_up()
        for plugin in self._plugins.values():
            plugin.relay = self._relay
        await self._finish_calls()
        await self._stop_acting()
        for plugin in self._plugins.values():
            plugin.silence(True)  # a kubelet of 1.37 would take our list for the standby's (A12)

    async def _finish_calls(self) -> None:
        with anyio.move_on_after(_UNDER_WAY):
            for name, registrar in self._registrars.items():
                await registrar.answered(partial(self._relay.waiting.__getitem__, name))

    def take_back(self) -> None:
        """Have the kubelet listen to us again, in milliseconds, whatever it has heard of the standby."""
        for registrar in self._registrars.values():
            registrar.take_back()

    def go_on(self) -> None:
        """Answer the kubelet's calls again, also those that waited for the standby, and send lists."""
        self._relay.close()
        for plugin in self._plugins.values():
            plugin.silence(False)

    async def _answer(self, standby: Standby) -> bool:
        """End the streams that the standby names, until it has all or the time is up; False if it is lost."""
        word = ""
        with anyio.move_on_after(_AT_MOST):
            async with anyio.create_task_group() as tasks:
                while word != "done":
                    word, what = await standby.says(_SILENT_AT_MOST)
                    if word == "end":
                        tasks.start_soon(self._end, standby, what)
                    elif word not in ("taking", "done"):
                        break
                tasks.cancel_scope.cancel()
        if word != "done":
            return False
        await standby.says(_LINGER)
        return not standby.is_gone

    async def _end(self, standby: Standby, what: str) -> None:
        resource, _, path = what.partition(" ")
        self._relay.is_there(resource, path)
        registrar, how = self._registrars.get(resource), End.CLOSED
        if standby.speaks == FIXED_PATHS:  # it has made the kubelet forget our client
            if registrar is not None:
                await registrar.end_stream()
            standby.say("ended", resource)
            return
        if registrar is not None:
            how = await registrar.retire()
        standby.say("ended", resource, how)
