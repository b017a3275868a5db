"""GetPreferredAllocation: which of the free devices the kubelet should give to a pod.

It runs in the kubelet's sync loop, and an error fails the pod's admission (A4): whatever goes wrong, there is an answer.
The kubelet takes of it what is free, and fills up with any devices where that is not enough.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Set
from typing import Any

import structlog
from anyio import to_thread

from agent.discovery.backend_answers import ask
from agent.inventory.inventory import Inventory
from agent.kubelet.wire import PreferredRequest
from agent.placement.admission import Admission
from agent.placement.affinity import Company
from agent.placement.choice import choose
from backends.base import Backend, Device

Prefer = Callable[[PreferredRequest], Awaitable[tuple[str, ...]]]
"""The IDs to give to a container, in valid form whatever the request is; raises nothing."""

log = structlog.get_logger()


def plain(request: PreferredRequest) -> tuple[str, ...]:
    """Those that must be included, then the first ones: for resources whose devices are all alike."""
    return choose({}, (), "spread", request.available, request.must_include, request.size)


class Preferences:
    """Chooses for all resources that have something to choose."""

    def __init__(
        self, inventory: Inventory, backends: Mapping[str, Backend[Any]], admission: Admission | None = None
    ) -> None:
        """Prepare; `backends` by their kinds, `admission` knows what the container under way has of other resources."""
        self._inventory = inventory
        self._backends = backends
        self._admission = admission or Admission()

    def of(self, name: str) -> Prefer | None:
        """How a resource chooses; None where it does not matter which devices a pod gets."""
        resource = self._inventory.resource(name)
        if resource is None:
            return None
        try:
            backend = self._backends[resource.spec.backend]
            matters = ask(lambda: bool(backend.prefers(resource)))
        except Exception:
            log.exception("backend-failed", backend=resource.spec.backend, call="prefers", resource=name)
            return None
        return (lambda request: self._choose(name, request)) if matters else None

    async def _choose(self, name: str, request: PreferredRequest) -> tuple[str, ...]:
        """Choose in a thread: 1,000 devices take up to 50 ms."""
        resource = self._inventory.resource(name)
        if resource is None:
            return plain(request)  # it retires
        slots, links = dict(self._inventory.slots(name)), self._inventory.links(resource.spec.backend)
        asked = resource.spec.placement, request.available, request.must_include, request.size
        company = self._company(name, self._backends[resource.spec.backend].company)
        try:
            # not asyncio's threads: their module is loaded with the first one, which takes a descriptor
            return await to_thread.run_sync(choose, slots, links, *asked, company)
        except Exception:
            log.exception("placement-failed", resource=name, size=request.size, then="giving the first ones")
            return plain(request)

    def _company(self, name: str, usual: Set[str]) -> list[Company]:
        """What the container has of other resources; and where it has none of the usual kinds, what is free of these."""
        given = self._admission.so_far(name)
        company = [Company(devices) for devices in given.values()]
        kinds = {other: self._inventory.kind(other) for other in self._inventory.names() if other != name}
        if usual and not any(kinds.get(other) in usual for other in given):
            free = [device for other, kind in kinds.items() if kind in usual for device in self._free(other)]
            company.append(Company(free, given=False))
        return company

    def _free(self, name: str) -> list[Device]:
        """The devices of which a pod could get a slot now."""
        held = self._inventory.claims(name)
        slots = (slot for device_id, slot in self._inventory.slots(name).items() if device_id not in held)
        free = {(it.unit, it.key): it for slot in slots if (it := slot.device) is not None and slot.health.offered}
        return list(free.values())
