"""Loads what CDI takes once a resource needs it: a node that hands out nothing by CDI has no module, thread or watch of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cdi import RECORD
from agent.inventory.inventory import Inventory
from agent.runtime.problems import Problems
from backends.base import Backend, ContainerEdits, Grant, Host, Resource

if TYPE_CHECKING:
    from agent.cdi.foreign_names import ForeignNames
    from agent.cdi.specifications import Specifications


class Cdi:
    """The door to CDI for the rest of the daemon."""

    def __init__(
        self,
        host: Host,
        state_dir: Path,
        inventory: Inventory,
        backends: Mapping[str, Backend[Any]],
        problems: Problems | None = None,
    ) -> None:
        """Prepare; `backends` are those in force now, by their kinds."""
        self._host, self._state_dir, self._inventory, self._backends = host, state_dir, inventory, backends
        self._problems = problems or Problems()
        self._is_needed = asyncio.Event()

    @cached_property
    def _specifications(self) -> Specifications:
        from agent.cdi.specifications import Specifications  # noqa: PLC0415

        return Specifications(self._host, self._state_dir, self._inventory, self._backends, self._problems)

    @cached_property
    def _foreign_names(self) -> ForeignNames:
        from agent.cdi.foreign_names import ForeignNames  # noqa: PLC0415

        return ForeignNames(self._host, self._problems)

    async def answer(self, resource: Resource[Any], grants: Sequence[Grant], edits: ContainerEdits) -> ContainerEdits:
        """The answer to the kubelet for a backend's edits, once all that it names is on disk.

        Raises:
            AllocationRefused: something cannot be written, or is defined nowhere.
            Exception: whatever the backend raises.
        """
        if edits.cdi_devices or edits.annotations:
            edits = await self._foreign_names.checked(resource, edits)
        if resource.spec.edits == "inline":
            return edits
        return await self._specifications.answer(resource, grants, edits)

    async def named(self, resource: Resource[Any], edits: ContainerEdits) -> frozenset[str]:
        """The devices that a backend's edits name by CDI, in either way, as far as they are defined.

        Raises:
            AllocationRefused: one of the pod's own is not.
        """
        if not (edits.cdi_devices or edits.annotations):
            return frozenset()
        from agent.cdi.foreign_names import named  # noqa: PLC0415

        return named(await self._foreign_names.checked(resource, edits))

    def changed(self, resources: Iterable[str]) -> None:
        """These resources have other devices, other claims, or another configuration."""
        if self._is_needed.is_set():
            self._specifications.changed(resources)
        elif any(it.spec.edits != "inline" for it in map(self._inventory.resource, resources) if it is not None):
            self._is_needed.set()

    async def run(self) -> None:
        """Keep specifications in step, for ever, once there is one or a resource needs one."""
        if (self._state_dir / RECORD).exists():
            self._is_needed.set()
        await self._is_needed.wait()
        await self._specifications.run()
