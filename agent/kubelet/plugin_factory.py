"""Makes the device plugin service of a resource."""

from __future__ import annotations

from collections.abc import Callable, Container

from msgspec import Struct

from agent.kubelet.allocation import Allocator
from agent.kubelet.lock import Lock
from agent.kubelet.lost_resources import LostResources
from agent.kubelet.plugin import Plugin, PreStart
from agent.kubelet.pods.pod_claims import PodClaims
from agent.kubelet.preference import Prefer, Preferences
from agent.kubelet.prestart import Starter
from agent.runtime.counts import Counts


class PluginFactory(Struct, frozen=True):
    """The parts that answer for all resources."""

    allocator: Allocator
    preferences: Preferences
    starter: Starter
    pod_claims: PodClaims
    lost_resources: LostResources
    counts: Counts
    record: Callable[[], object]
    """Identifies the last writing of the kubelet's record."""

    def plugin(self, name: str, lock: Lock) -> Plugin:
        """The service of this resource; it gives nothing once another agent has put its lock into the place of ours."""
        give, hooks = self.allocator.allocate, self.hooks(name)
        return Plugin(name, give, *hooks, confirm=self._confirm, counts=self.counts, record=self.record, lock=lock)

    def hooks(self, name: str) -> tuple[Prefer | None, PreStart | None]:
        """What answers the calls that a resource may ask the kubelet for, as it is configured now."""
        return self.preferences.of(name), self.starter.of(name)

    async def _confirm(self, resource: str, listed: Callable[[], Container[str]]) -> None:
        """Find out before a list is sent whether the name is still ours, and what pods hold."""
        await self.lost_resources.before_list(resource)
        if strangers := await self.pod_claims.confirm(resource, listed):
            self.lost_resources.suspect(resource, strangers)
