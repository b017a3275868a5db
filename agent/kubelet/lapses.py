"""Finds resources that the kubelet has lost though their streams are open, and has them registered once more.

Another plugin that registers the same name takes the kubelet's client from us; when it goes, the kubelet marks every
device unhealthy and listens to nobody, while our own stream stays open as if all were well (kubelet contract: A2). A vendor's
plugin that is removed once Fairlead runs does just that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from agent.kubelet.podresources import PodResourcesError, list_allocatable
from agent.kubelet.registration import Registrar

INTERVAL: Final = 60.0
"""Seconds between two looks."""

SETTLED: Final = 5.0
"""Seconds after a list for which the kubelet may not have taken it in: it waits for its disk meanwhile (A3)."""

_LONGEST: Final = 3600.0  # seconds between two registrations of a resource that the kubelet goes on losing
_DEADLINE: Final = 5.0  # seconds for an answer
_WHY: Final = "the kubelet offers none of its devices, as if another plugin had registered this name and were gone"

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Tried:
    """A resource was registered once more, and the kubelet has none of it so far."""

    delay: float
    again: float
    """Monotonic seconds."""


class Lapses:
    """Asks the kubelet what it would give to pods, and compares."""

    def __init__(
        self,
        pod_resources: Path,
        registrars: Callable[[], Iterable[Registrar]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            pod_resources: the podresources socket.
            registrars: of the resources that are served.
            clock: monotonic seconds.
        """
        self._socket, self._registrars, self._clock = pod_resources, registrars, clock
        self._tried: dict[str, _Tried] = {}

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(INTERVAL)
            await self.look()

    async def look(self) -> None:
        """Have registered once more what the kubelet should offer and does not."""
        asked = self._offering()
        if not asked:
            return
        try:
            allocatable = await list_allocatable(self._socket, _DEADLINE)
        except PodResourcesError:
            return  # the witnesses ask there too, and say so; and kubelets before 1.23 do not know the call
        still = self._offering()
        lost = {name for name, sent_at in asked.items() if still.get(name) == sent_at} - allocatable.resources
        self._tried = {name: tried for name, tried in self._tried.items() if name not in allocatable.resources}
        for registrar in self._registrars():
            if registrar.plugin.resource in lost:
                self._renew(registrar)

    def _offering(self) -> Mapping[str, float]:
        """The resources that the kubelet should offer, with when their lists were sent."""
        now = self._clock()
        plugins = [registrar.plugin for registrar in self._registrars() if registrar.registered]
        return {it.resource: it.sent_at for it in plugins if now - it.sent_at >= SETTLED and it.offers}

    def _renew(self, registrar: Registrar) -> None:
        name, now = registrar.plugin.resource, self._clock()
        before = self._tried.get(name)
        if before is not None and now < before.again:
            return
        delay = INTERVAL if before is None else min(before.delay * 2, _LONGEST)
        self._tried[name] = _Tried(delay, now + delay)
        log.warning("registration-lost", resource=name, reason=_WHY, then="registering once more")
        registrar.renew()
