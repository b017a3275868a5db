"""Puts another configuration into force: all of it at one moment, and nothing that it does not concern."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from agent.config import Difference
from agent.devices.adoption import Adopter
from agent.devices.inventory import Inventory
from agent.devices.news import News
from agent.devices.oddities import Oddities
from agent.kubelet.preference import Preferences
from agent.kubelet.prestart import Starter
from agent.reloading import Change
from agent.serving import Serving
from agent.watching import Outlook, Watching

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Applier:
    """The parts of the daemon that have to know."""

    watching: Watching
    inventory: Inventory
    serving: Serving
    preferences: Preferences
    starter: Starter
    adopter: Adopter
    oddities: Oddities
    learn: Callable[[News], None]
    """Makes known what is found; the lists follow with `flush`."""
    flush: Callable[[], None]
    """Hands the lists that changed to their plugins."""

    async def look_ahead(self, change: Change, patience: float) -> list[Outlook]:
        """Look at what is asked for, which costs the configuration in force nothing.

        Args:
            change: from the configuration in force.
            patience: seconds that new instances of backends may take; then what is known so far is listed.
        """
        outlooks = await self.watching.look_ahead(change.backends, patience)
        for slow in (it.discoverer.kind for it in outlooks if it.found is None):
            log.warning("backend-slow", backend=slow, waited=patience, then="listing what is known so far")
        return outlooks

    def apply(self, change: Change, outlooks: Sequence[Outlook]) -> None:
        """Go over to it; nothing waits meanwhile, so that whoever asks sees one configuration or the other."""
        difference, config = change.difference, change.difference.config
        news = self.watching.exchange(outlooks, difference.kinds - change.backends.keys())
        if difference.settings:
            self.watching.set_timers(config.agent)
        units = {it.backend: it.units for it in news}
        self.inventory.configure(config.resources, self.watching.backends, units)
        for it in news:
            self.learn(it)
        for outlook in outlooks:
            self.inventory.ready(outlook.discoverer.kind)
        self.flush()
        self._tell_kubelet(difference)
        self.oddities.tell_of_failures()
        self.oddities.tell_of_selectors(it for it in config.resources if it.name in difference.new)
        resources = self.inventory.configured.in_force()
        self.adopter.configure((it for it in resources if it.configured not in difference.new), self.inventory.slots)

    def _tell_kubelet(self, difference: Difference) -> None:
        """Where it is to ask for something else from now on."""
        for resource in self.inventory.configured.in_force():
            plugin = self.serving.plugins.get(resource.name) if resource.configured in difference.new else None
            if plugin is not None and plugin.ask(self.preferences.of(resource.name), self.starter.of(resource.name)):
                self.serving.renew(resource.name)
