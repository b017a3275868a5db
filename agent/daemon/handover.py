"""Gives what this agent serves to a standby, one resource at a time, and says whether the standby has taken all of it.

The order is that of `agent.kubelet.handover`. Until the kubelet listens to the standby, what it asks of us is the standby's
to answer: only one of both gives devices, acts on hardware and writes the state, at any moment.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import anyio
import structlog

from agent.kubelet.handover import Relay, Standby
from agent.kubelet.plugin import Plugin
from agent.kubelet.registration import Registrar

_UNDER_WAY: Final = 5.0  # seconds for Allocates that had begun; one that takes longer is the pod's loss, as at any stop
_AT_MOST: Final = 15.0  # seconds in which a standby that lives has taken all

log = structlog.get_logger()


class Giver:
    """One hand-over, from its beginning to its end."""

    def __init__(
        self,
        registrars: dict[str, tuple[Registrar, anyio.CancelScope]],
        plugins: dict[str, Plugin],
        relay: Relay,
        stop_acting: Callable[[], Awaitable[None]],
        retire: Callable[[str], None],
    ) -> None:
        """Prepare.

        Args:
            registrars: of the resources that are served.
            plugins: of the same.
            relay: asks the standby what the kubelet asks us.
            stop_acting: ends what only one agent of a node may do, and lets another do it.
            retire: closes a resource's server.
        """
        self._registrars, self._plugins = registrars, plugins
        self._relay = relay
        self._stop_acting, self._retire = stop_acting, retire

    async def give(self, standby: Standby) -> bool:
        """Hand everything over; False if the standby was lost meanwhile.

        One that lives, but takes too long, has the lock, and all that we could do is wait for it.
        """
        log.info("handing-over", standby=standby.who, resources=sorted(self._registrars))
        for registrar, _ in self._registrars.values():
            registrar.give_up()
        for plugin in self._plugins.values():
            plugin.relay = self._relay
        try:
            await self._finish_calls()
            await self._stop_acting()
            standby.say("take")
            has_all = None
            with anyio.move_on_after(_AT_MOST):
                has_all = await self._answer(standby)
        finally:
            self._relay.close()
        if has_all is False:
            log.warning("standby-lost", standby=standby.who, then="serving on")
        else:
            log.info("handed-over", standby=standby.who)
        return has_all is not False

    async def _finish_calls(self) -> None:
        with anyio.move_on_after(_UNDER_WAY):
            for name, (registrar, _) in self._registrars.items():
                await registrar.answered(partial(self._relay.waiting.__getitem__, name))

    async def _answer(self, standby: Standby) -> bool:
        """Do as the standby says, until all is its."""
        word = "take"
        async with anyio.create_task_group() as tasks:
            while word not in ("done", ""):
                word, resource = await standby.words.get()
                if word == "end":
                    tasks.start_soon(self._end, standby, resource)
                elif word == "have":
                    self._retire(resource)
            tasks.cancel_scope.cancel()
        return word == "done"

    async def _end(self, standby: Standby, resource: str) -> None:
        self._relay.is_there(resource)
        if (served := self._registrars.get(resource)) is not None:
            await served[0].end_stream()
        standby.say("ended", resource)
