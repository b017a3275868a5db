"""The kubelet's clients of plugins, one for each registration, and how it confuses them.

This follows the order of the kubelet's own steps, so the dangers in the kubelet contract come by themselves. Until 1.36 one
client is remembered for each resource name, and looked up again when *a* stream of that name ends (A2): an old stream's
end disconnects the new client; a failed registration makes the kubelet forget a client. From 1.37 on clients are known by
resource and socket path (A12): a registration that fails makes the kubelet forget those of its path.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Literal

from agent.simulation.background_tasks import Background
from agent.simulation.clock import Clock
from agent.simulation.device_manager.manager import DeviceManager
from agent.simulation.plugin_client import Arrival, PluginClient
from agent.simulation.sockets import Version

Handler = Literal["all", "first", "dedup"]
"""What a kubelet of 1.37 does with a Register at a path that has a client (kubelet contract: A12). Copies of its sources differ:

`all` refuses it and forgets all clients of the path, `first` refuses it and forgets the first of them, `dedup` answers that
all is well and does nothing.
"""


class Clients:
    """Dials plugins, watches their streams, closes connections."""

    def __init__(
        self,
        manager: DeviceManager,
        background: Background,
        clock: Clock,
        disconnect_delay: float,
        version: Version,
        handler: Handler,
        before_list: Callable[[], Awaitable[None]],
    ) -> None:
        self._manager = manager
        self._background = background
        self._clock = clock
        self._delay = disconnect_delay
        self._goes_by_path = version == "1.37"
        self._handler = handler
        self._before_list = before_list
        self._remembered: dict[str, list[PluginClient]] = {}
        self._made: set[PluginClient] = set()
        self._connecting: Counter[str] = Counter()
        self._ends: dict[str, list[asyncio.TimerHandle]] = {}
        self._stopped = False
        self.streams: Counter[str] = Counter()

    async def connect(self, resource: str, path: Path) -> None:
        """What the kubelet does before it answers a Register (kubelet contract: A1).

        Raises:
            PluginError: the plugin cannot be reached, its options call failed, or its path is connected.
        """
        client = PluginClient(resource, path, self._clock)
        if self._goes_by_path and self._handler == "dedup" and self._first_like(client) is not None:
            return
        self._made.add(client)
        self._remember(client)
        if not self._goes_by_path:
            self._overtake(resource)
        self._connecting[resource] += 1
        try:
            await client.dial()
            if self._stopped:  # while it dialled: `stop` found no connection to close
                client.abort()
            self._manager.connected(client, await client.options())
        except BaseException:
            self._forget(client)  # an older one that is like it included; the connection is not closed (A2, A12)
            raise
        finally:
            self._connecting[resource] -= 1
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

        async def received(arrival: Arrival) -> None:
            await self._before_list()
            await self._manager.received(resource, arrival)

        try:
            reason = await client.watch(on_open, received)
        finally:
            self.streams[resource] -= was_open
            opened()
        if not self._stopped:  # grpclib may turn our task's cancellation into the stream's end
            self._manager.stream_ended(resource, reason)
            self._end_soon(client)

    def _remember(self, client: PluginClient) -> None:
        known = self._remembered.setdefault(client.resource, [])
        if not self._goes_by_path:
            known.clear()
        known.append(client)

    def _forget(self, client: PluginClient) -> None:
        known = self._remembered.get(client.resource, [])
        like = [one for one in known if self._is_like(one, client)]
        for one in like[:1] if self._handler == "first" else like:
            known.remove(one)

    def _first_like(self, client: PluginClient) -> PluginClient | None:
        """The client that the kubelet takes for this one."""
        return next((one for one in self._remembered.get(client.resource, ()) if self._is_like(one, client)), None)

    def _is_like(self, one: PluginClient, other: PluginClient) -> bool:
        return not self._goes_by_path or one.path == other.path

    def _end_soon(self, client: PluginClient) -> None:
        if self._connecting[client.resource] and not self._goes_by_path:
            self._end(client)  # a Register is under way: it has overtaken us
            return
        timer = asyncio.get_running_loop().call_later(self._delay, self._end_first, client)
        self._ends.setdefault(client.resource, []).append(timer)

    def _end_first(self, client: PluginClient) -> None:
        self._ends[client.resource].pop(0)
        self._end(client)

    def _overtake(self, resource: str) -> None:
        """A Register came before an ended stream was dealt with.

        The end is dealt with now, at the worst moment: it disconnects the new client, which has no connection
        yet and goes on to make one, is forgotten, and will not be missed when it dies (A2).
        """
        for timer in self._ends.pop(resource, ()):
            timer.cancel()
            if known := self._remembered[resource]:
                self._end(known[0])

    def _end(self, ended: PluginClient) -> None:
        client = self._first_like(ended)
        if client is None:
            return  # forgotten: its end changes nothing (A2, A12)
        self._forget(client)
        client.close()
        self._manager.disconnected(client)

    def stand_still(self) -> None:
        """Act on nothing more, with every connection open."""
        self._stopped = True
        for timer in (timer for timers in self._ends.values() for timer in timers):
            timer.cancel()

    def stop(self, *, kill: bool) -> None:
        """Close every connection, as the end of the process does."""
        self.stand_still()
        for client in self._made:
            client.abort() if kill else client.close()
