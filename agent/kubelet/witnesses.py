"""Asks the kubelet who holds what, podresources first and then its checkpoint, and lets the ledger judge.

Asked after an Allocate, while a claim may be ending, else every `IDLE` seconds. A witness that cannot be
reached ends nothing (design, "claims").
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import anyio
import structlog

from agent.devices.claims import Ledger, SlotKey, names_of
from agent.devices.model import Held
from agent.devices.workers import NoWorkerError, Workers
from agent.kubelet.checkpoint import Checkpoint, CheckpointError
from agent.kubelet.checkpoint import read as read_checkpoint
from agent.kubelet.podresources import PodResourcesError, list_pods
from agent.kubelet.wire import PodDevices, PodList
from backends.base import Device

IDLE: Final = 60.0
"""Seconds between two questions while nothing happens."""

_AFTER_ALLOCATE: Final = 1.0  # seconds: the kubelet knows the pod by then
_WHILE_ENDING: Final = 2.0  # seconds between looks for the second witness
_LIST_DEADLINE: Final = 5.0  # seconds
_READ_DEADLINE: Final = 5.0  # seconds

log = structlog.get_logger()


class Witnesses:
    """Keeps the ledger true to what the kubelet says."""

    def __init__(
        self,
        ledger: Ledger,
        pod_resources: Path,
        plugin_dir: Path,
        *,
        served: Callable[[str], str | None],
        devices: Callable[[SlotKey], Device | None],
        began: Callable[[Sequence[Held]], None],
        ended: Callable[[Sequence[Held]], None],
        resend: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Prepare.

        Args:
            ledger: whom to tell.
            pod_resources: the podresources socket.
            plugin_dir: where the checkpoint lies.
            served: the backend of a resource, if it is ours.
            devices: the device behind a slot now.
            began: told of claims that only the kubelet remembered.
            ended: told of claims that both witnesses leave out.
            resend: makes the kubelet write its checkpoint, by sending this resource's list again.
            clock: monotonic seconds.
        """
        self._ledger = ledger
        self._socket, self._plugin_dir = pod_resources, plugin_dir
        self._served, self._devices = served, devices
        self._began, self._ended, self._resend = began, ended, resend
        self._clock = clock
        self._workers = Workers("witnesses", limit=2)
        self._allocated = asyncio.Event()
        self._complaints: dict[str, str] = {}
        self.holders: Mapping[SlotKey, tuple[PodDevices, ...]] = {}
        """Which containers have what, as the kubelet said last."""

    def know(self, slot: SlotKey) -> bool:
        """Has the kubelet said that a container has it?"""
        return slot in self.holders

    def allocated(self) -> None:
        """An Allocate was answered: ask soon."""
        self._allocated.set()

    async def run(self) -> None:
        """Ask for ever."""
        try:
            while True:
                self._allocated.clear()
                await self.ask()
                await self._wait()
        finally:
            self._workers.close()

    async def _wait(self) -> None:
        wait = _WHILE_ENDING if self._ledger.ending() else IDLE
        if (judgement := self._ledger.next_judgement(self._clock())) is not None:
            wait = min(wait, judgement + _AFTER_ALLOCATE)
        with anyio.move_on_after(wait):
            await self._allocated.wait()
            await asyncio.sleep(_AFTER_ALLOCATE)

    async def ask(self) -> None:
        """One round: List, then the checkpoint that lay there after it."""
        asked = self._clock()
        present = await self._ask_pod_resources()
        try:
            checkpoint = await self._read_checkpoint()
        except (CheckpointError, OSError, NoWorkerError) as error:
            # without knowing which checkpoint lay there, no later one can be told from it: judge nothing
            self._complain("checkpoint", str(error) or "reading it hangs")
            self._adopt(present or set())
        else:
            self._complain("checkpoint", "")
            self._judge(present, asked, checkpoint)
        for resource in self._ledger.awaiting_checkpoint(self._clock()):
            self._resend(resource)

    def _judge(self, present: set[SlotKey] | None, asked: float, checkpoint: Checkpoint | None) -> None:
        slots = _slots(checkpoint) if checkpoint else set()
        self._adopt(slots | (present or set()))  # a List leaves out init containers (A5)
        version = checkpoint.version if checkpoint else None
        if present is not None:
            self._ledger.listed(present, asked, self._clock(), version)
        if version is not None and (over := self._ledger.checkpoint(slots, version)):
            self._ended(over)

    def _adopt(self, present: set[SlotKey]) -> None:
        """Take in claims that we do not know: our own state was lost."""
        kinds = {name: self._served(name) for name in {name for name, _ in present}}
        seen = {slot: kind for slot in sorted(present) if (kind := kinds[slot[0]]) is not None}
        devices = {slot: device for slot in seen if (device := self._devices(slot)) is not None}
        if news := self._ledger.adopt(seen, devices, self._clock()):
            log.info("claims-adopted", count=len(news), slots=names_of(held.slot for held in news))
            self._began(news)

    async def _ask_pod_resources(self) -> set[SlotKey] | None:
        try:
            pods = await list_pods(self._socket, _LIST_DEADLINE)
        except PodResourcesError as error:
            self._complain("podresources", str(error))
            return None
        self._complain("podresources", "")
        self.holders = _holders(pods)
        return set(self.holders)

    async def _read_checkpoint(self) -> Checkpoint | None:
        with anyio.fail_after(_READ_DEADLINE):
            return await self._workers.start(partial(read_checkpoint, self._plugin_dir))

    def _complain(self, witness: str, complaint: str) -> None:
        """Say once that a witness is silent, and once that it is back."""
        if self._complaints.get(witness, "") == complaint:
            return
        self._complaints[witness] = complaint
        if complaint:
            log.info("witness-silent", witness=witness, reason=complaint, then="no claim ends until it answers")
        else:
            log.info("witness-answers", witness=witness)


def _holders(pods: PodList) -> dict[SlotKey, tuple[PodDevices, ...]]:
    holders: defaultdict[SlotKey, tuple[PodDevices, ...]] = defaultdict(tuple)
    for entry in pods.entries:
        for device_id in entry.ids:
            holders[entry.resource, device_id] += (entry,)
    return dict(holders)


def _slots(checkpoint: Checkpoint) -> set[SlotKey]:
    return {(entry.resource, device_id) for entry in checkpoint.entries for device_id in entry.ids}
