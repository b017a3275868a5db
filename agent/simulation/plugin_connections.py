"""The kubelet's clients of plugins, one for each registration, and how it confuses them.

This follows the order of the kubelet's own steps (one client remembered for each resource name, looked up
again when *a* stream of that name ends), so the dangers in the kubelet contract's A2 come by themselves:
an old stream's end disconnects the new client; a failed registration makes the kubelet forget a client.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from agent.simulation.background_tasks import Background
from agent.simulation.clock import Clock
from agent.simulation.device_manager.manager import DeviceManager
from agent.simulation.plugin_client import PluginClient


class Clients:
    """Dials plugins, watches their streams, closes connections."""

    def __init__(self, manager: DeviceManager, background: Background, clock: Clock, disconnect_delay: float) -> None:
        self._manager = manager
        self._background = background
        self._clock = clock
        self._delay = disconnect_delay
        self._remembered: dict[str, PluginClient] = {}
        self._made: set[PluginClient] = set()
        self._connecting: Counter[str] = Counter()
        self._ends: dict[str, list[asyncio.TimerHandle]] = {}
        self._stopped = False
        self.streams: Counter[str] = Counter()

    async def connect(self, resource: str, path: Path) -> None:
        """What the kubelet does before it answers a Register (kubelet contract: A1).

        Raises:
            PluginError: the plugin cannot be reached, or its options call failed.
        """
        client = PluginClient(resource, path, self._clock)
        self._made.add(client)
        self._remembered[resource] = client
        self._overtake(resource)
        self._connecting[resource] += 1
        try:
            await client.dial()
            if self._stopped:  # while it dialled: `stop` found no connection to close
                client.abort()
            options = await client.options()
        except BaseException:
            # Whatever client is remembered, an older one's included; the connection is not closed (A2).
            self._remembered.pop(resource, None)
            raise
        finally:
            self._connecting[resource] -= 1
        self._manager.connected(client, options)
        opened = asyncio.Event()
        self._background.spawn(self._watch(client, opened.set))
        await opened.wait()

    async def _watch(self, client: PluginClient, opened: Callable[[], None]) -> None:
        resource = client.resource
        was_open = False

        def on_open() -> None:
            nonlocal was_open
            was_open = True
            self.streams[resource] += 1
            self._manager.stream_opened(resource)
            opened()

        try:
            reason = await client.watch(on_open, lambda arrival: self._manager.received(resource, arrival))
        finally:
            self.streams[resource] -= was_open
            opened()
        if not self._stopped:  # grpclib may turn our task's cancellation into the stream's end
            self._manager.stream_ended(resource, reason)
            self._end_soon(resource)

    def _end_soon(self, resource: str) -> None:
        if self._connecting[resource]:
            self._end(resource)  # a Register is under way: it has overtaken us
            return
        timer = asyncio.get_running_loop().call_later(self._delay, self._end_first, resource)
        self._ends.setdefault(resource, []).append(timer)

    def _end_first(self, resource: str) -> None:
        self._ends[resource].pop(0)
        self._end(resource)

    def _overtake(self, resource: str) -> None:
        """A Register came before an ended stream was dealt with.

        The end is dealt with now, at the worst moment: it disconnects the new client, which has no connection
        yet and goes on to make one, is forgotten, and will not be missed when it dies (A2).
        """
        for timer in self._ends.pop(resource, ()):
            timer.cancel()
            self._end(resource)

    def _end(self, resource: str) -> None:
        client = self._remembered.pop(resource, None)
        if client is None:
            return  # forgotten: its end changes nothing (A2)
        client.close()
        self._manager.disconnected(resource)

    def stop(self, *, kill: bool) -> None:
        """Close every connection, as the end of the process does."""
        self._stopped = True
        for timer in (timer for timers in self._ends.values() for timer in timers):
            timer.cancel()
        for client in self._made:
            client.abort() if kill else client.close()
