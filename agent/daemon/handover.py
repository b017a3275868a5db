"""Gives what this agent serves to a standby, and says whether the standby has taken it.

The order is that of `agent.kubelet.handover`. Until the kubelet listens to the standby, what it asks of us is the standby's
to answer: only one of both gives devices, acts on hardware and writes the state, at any moment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

import anyio
import structlog

from agent.kubelet.handover import SPEAKS, End, Relay, Standby
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar

_UNDER_WAY: Final = 5.0  # seconds for Allocates that had begun; a longer one fails its pod, as at any stop
_TAKES_WITHIN: Final = 2.0  # seconds in which one that lives has the lock
_AT_MOST: Final = 15.0  # seconds in which it has taken all
_LINGER: Final = 0.3  # seconds for calls that the kubelet sent us before it knew of the standby

log = structlog.get_logger()


class Giver:
    """One hand-over of the node to a standby."""

    def __init__(
        self,
        registrars: Mapping[str, Registrar],
        plugins: Mapping[str, Plugin],
        relay: Relay,
        stop_acting: Callable[[], Awaitable[None]],
    ) -> None:
        """Prepare.

        Args:
            registrars: of the resources that are served.
            plugins: of the same.
            relay: asks the standby what the kubelet asks us.
            stop_acting: ends what only one agent of a node may do, and lets another do it.
        """
        self._registrars, self._plugins = dict(registrars), dict(plugins)
        self._relay = relay
        self._stop_acting = stop_acting

    async def give(self, standby: Standby) -> bool:
        """Hand everything over; False if the standby was lost meanwhile, or hangs.

        A standby that has the lock may take long with the rest: without the lock we could not serve on.
        """
        log.info("handing-over", standby=standby.who, resources=sorted(self._registrars))
        self._relay.on_wait = lambda name: self._plugins[name].on_call()
        for registrar in self._registrars.values():
            registrar.give_up()
        for plugin in self._plugins.values():
            plugin.relay = self._relay
        try:
            await self._finish_calls()
            await self._stop_acting()
            for plugin in self._plugins.values():
                plugin.silence(True)  # a kubelet of 1.37 would take our list for the standby's (A12)
            standby.say("take", SPEAKS)
            given = await self._answer(standby)
            if given:
                await anyio.sleep(_LINGER)
        finally:
            self._relay.close()
        if given:
            log.info("handed-over", standby=standby.who)
        else:
            log.warning("standby-lost", standby=standby.who, then="serving on")
            standby.writer.close()
        return given

    async def _finish_calls(self) -> None:
        with anyio.move_on_after(_UNDER_WAY):
            for name, registrar in self._registrars.items():
                await registrar.answered(partial(self._relay.waiting.__getitem__, name))

    async def _answer(self, standby: Standby) -> bool:
        """End the streams that the standby names, until it has all or the time is up; False if it is lost."""
        word, resource = "", ""
        with anyio.move_on_after(_TAKES_WITHIN):
            word, resource = await standby.words.get()
        with anyio.move_on_after(_AT_MOST):
            async with anyio.create_task_group() as tasks:
                while word not in ("done", ""):
                    if word == "end":
                        tasks.start_soon(self._end, standby, resource)
                    word, resource = await standby.words.get()
                tasks.cancel_scope.cancel()
        return bool(word)

    async def _end(self, standby: Standby, what: str) -> None:
        resource, _, path = what.partition(" ")
        self._relay.is_there(resource, path)
        registrar, how = self._registrars.get(resource), End.CLOSED
        if not standby.speaks:  # it has made the kubelet forget our client
            if registrar is not None:
                await registrar.end_stream()
            standby.say("ended", resource)
            return
        if registrar is not None:
            how = await registrar.retire()
        standby.say("ended", resource, how)
