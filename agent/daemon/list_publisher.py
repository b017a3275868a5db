"""Hands changed lists to their plugins; tells adoption, CDI, the log and Kubernetes once the kubelet has been told."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Mapping, Set
from typing import Final

import structlog

from agent.daemon.node import Node
from agent.daemon.reporting.device_log import LOGGED_AT_MOST, of_id, tell
from agent.daemon.reporting.list_warnings import ListWarnings
from agent.daemon.reporting.nfd_file import FeatureFile
from agent.daemon.serving import Serving
from agent.hardware.adoption import Adopter
from agent.inventory.shortfall import WENT, departure
from agent.kubernetes.notices import Subject
from agent.kubernetes.runner import KubernetesParts
from agent.model import Slot, Snapshot, Transition
from agent.runtime.chunked_work import in_slices
from agent.runtime.counts import Counts
from backends.base import Device

_TELL_AFTER: Final = 0.002  # seconds from a list to all that follows from it: the kubelet is told first

log = structlog.get_logger()


class Publisher:
    """What follows from a change of the inventory."""

    def __init__(
        self,
        node: Node,
        serving: Serving,
        adopter: Adopter,
        list_warnings: ListWarnings,
        features: FeatureFile | None,
        counts: Counts,
        kubernetes: KubernetesParts,
    ) -> None:
        """Prepare; these are told of the node's changes, and `counts` counts them."""
        self._node, self._inventory, self.serving = node, node.inventory, serving
        self._adopter, self._list_warnings = adopter, list_warnings
        self._features, self._counts, self._kubernetes = features, counts, kubernetes
        self._untold: deque[tuple[Snapshot | None, Snapshot]] = deque()
        self._telling: asyncio.Task[None] | None = None
        self._in_force: Set[str] = frozenset()
        self._revision = self._names_revision = -1

    def publish(self, now: float, since: float | None = None) -> None:
        """Publish what has changed, at this monotonic time; `since` is when the event came that was the cause, if one was."""
        for snapshot in self._inventory.take(now):
            before = self.serving.publish(snapshot, since)
            self._node.dra.changed([snapshot.resource])
            # after the streams have sent it, which takes them two turns of the loop
            asyncio.get_running_loop().call_later(_TELL_AFTER, self._listed, before, snapshot)
        if self._inventory.revision != self._revision:
            self._revision = self._inventory.revision
            asyncio.get_running_loop().call_later(_TELL_AFTER, self._list_warnings.devices_changed)
        if self._inventory.names_revision != self._names_revision:
            self._names_revision = self._inventory.names_revision
            self.follow()
            known, in_force = self._in_force, self._inventory.selection.in_force()
            self._in_force = {it.name for it in in_force}
            if given := [it for it in in_force if it.template and it.name not in known]:
                for it in given:
                    log.info("resource-named", resource=it.name, backend=it.spec.backend, template=it.template)
                self._node.tasks.start_soon(self._adopter.adopt_what_is_new)

    def follow(self) -> None:
        """Have those resources served by device plugin that are to be; they may be others than before."""
        names = self._inventory.names()
        self.serving.follow(self._node.dra.by_plugin(names), names)

    def _listed(self, before: Snapshot | None, snapshot: Snapshot) -> None:
        """Tell everybody but the kubelet of a list that the kubelet has."""
        self._adopter.listed(snapshot)
        self._node.cdi.changed([snapshot.resource])
        self._list_warnings.tell_of_length(snapshot)
        if self._features is not None:
            self._features.changed()
        self._kubernetes.lists_changed()
        self._untold.append((before, snapshot))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Tell the log of each list, one after the other; of thousands of devices that takes several steps of the loop."""
        while self._untold:
            before, snapshot = self._untold.popleft()
            slots = before.slots if before else None
            happened = await tell(slots, snapshot, self._counts, self._why_it_left)
            if happened and slots is not None and self._kubernetes.tells_events:
                first, more = happened.first(LOGGED_AT_MOST), len(happened) - LOGGED_AT_MOST
                self._kubernetes.changed(
                    snapshot.resource, first, more, dict.fromkeys(await in_slices(self._held(slots, snapshot)))
                )
            await self._node.history.listed(slots, snapshot)

    def _why_it_left(self, device: Device) -> tuple[str, str]:
        reason, sentence = departure(self._inventory, device)
        return reason, sentence + self._node.last_word(device.hardware) if reason == WENT else sentence

    def _held(self, before: Mapping[str, Slot], after: Snapshot) -> Iterator[tuple[Subject, Transition]]:
        """What changed of a pod's devices, with the pod."""
        resource, pod_claims = after.resource, self._node.pod_claims
        holders = pod_claims.holders
        held = [it for it in after.changed_since(before) if (resource, it) in holders]
        uids = pod_claims.uids(resource) if held else {}
        for device_id in held:
            if changed := of_id(
                resource, device_id, before.get(device_id), after.slots.get(device_id), self._why_it_left
            ):
                for it in holders[resource, device_id]:
                    yield Subject("Pod", it.pod, uids.get((it.container, device_id), ""), it.namespace), changed
