"""Restores what must outlive a restart into its owners, and has it written whenever it changes.

What a dead agent wrote is read before anything is listed, so that what was drained, latched or quarantined is not Healthy
for a moment. Nothing is written while another agent may still be running: the file is its.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import anyio

from agent.claims.ledger import Ledger
from agent.daemon.state_file import StateFile
from agent.hardware.releases import Releaser
from agent.health import HealthBook
from agent.history.recorder import Recorder
from agent.inventory.inventory import Inventory
from agent.inventory.shortfall import Shortfall
from agent.model import Health
from agent.runtime.errors import FairleadError
from agent.runtime.pacing import SYSTEM, Clock, Doorbell
from agent.runtime.workers import in_batches
from backends.base import Clears

_PATIENCE: Final = 3.0
"""Seconds that the disk may take for what an operator decided, before he is told that it is not kept."""

_AT_THE_END: Final = 1.0  # seconds that a process which was told to end gives the disk

_LATEST: Final = 32503680000.0  # the year 3000, in seconds since the epoch: no later day can be written down everywhere


class NotYetError(FairleadError):
    """Another agent may still be running, and the state is its."""


class StateKeeper:
    """Between the state file and those who own what is in it."""

    def __init__(
        self,
        state: StateFile,
        ledger: Ledger,
        releaser: Releaser,
        inventory: Inventory,
        health: HealthBook,
        shortfall: Shortfall,
        history: Recorder,
        *,
        clock: Clock = SYSTEM,
    ) -> None:
        self._state = state
        self._ledger, self._releaser = ledger, releaser
        self._inventory, self._health, self._shortfall = inventory, health, shortfall
        self._history = history
        self._clock, self._wall = clock.now, clock.wall
        self._is_alone = False
        self._claims_changed = False
        self._written, self._written_offered = health.revision, shortfall.revision
        self._late = False
        self._wanted, self._wants_claims = Doorbell(), False

    async def run(self) -> None:
        """Write whatever is to be written soon, until cancelled; what comes while it is being written is written once."""
        while True:
            await self._wanted.rung()
            if self._wants_claims:
                self._wants_claims = False
                await self.write_claims()
            await self.write_health()

    def write_soon(self, *, claims: bool = False) -> None:
        """Have health written if it changed, and the claims, if they did."""
        self._wants_claims |= claims
        self._wanted.set()

    async def restore(self) -> None:
        """Take in what the file says; where it says nothing, all stays as it is (reading it blocks)."""
        kept, now = self._state.read(), self._clock()
        rebooted = kept.health is not None and kept.health.boot != self._health.boot
        async for batch in in_batches(kept.claims or ()):
            self._inventory.claim(self._ledger.restore(batch, now, rebooted=rebooted))
        if kept.releasing is not None:
            self._releaser.add(kept.releasing)
        if kept.offered is not None:
            self._shortfall.restore(kept.offered, another_boot=rebooted or kept.health is None)
        if kept.history is not None:
            self._history.restore(kept.history)
        if kept.health is not None:
            unchanged = self._health.revision == self._written
            self._inventory.set_health(self._health.restore(kept.health, now, self._wall()))
            if unchanged:
                self._written = self._health.revision

    async def begin(self) -> None:
        """No other agent runs: write from now on, and first what has changed before."""
        self._is_alone = True
        if self._claims_changed:
            await self.write_claims()
        await self.write_health()
        await self.write_offered()
        if self._state.damage:  # so that the damaged file is moved aside now
            await self._state.write(health=self._health.kept())

    async def end(self) -> None:
        """Have what changed last written, though the process is ending; from now on another agent may write the file."""
        with anyio.CancelScope(shield=True):
            health = self._health.kept() if self._health.revision != self._written else None
            await self._state.write(health=health, history=self._history.record(), patience=_AT_THE_END)
        self._is_alone = False

    async def write_claims(self) -> None:
        """Have the claims, and what is to be undone of ended ones, written; returns when they are, or the disk takes too long."""
        self._claims_changed = True
        if self._is_alone:
            await self._state.write(claims=self._ledger.held_now(), releasing=self._releaser.pending())

    async def write_health(self) -> None:
        """Have what is kept of health written, if it changed; returns when it is, or the disk takes too long."""
        if self._is_alone and self._health.revision != self._written:
            self._written = self._health.revision
            self._late = not await self._state.write(health=self._health.kept(), patience=_PATIENCE)

    async def write_offered(self) -> None:
        """Have what was offered written, if it changed, so that the next run knows what is gone; returns as the others."""
        if self._is_alone and self._shortfall.revision != self._written_offered:
            self._written_offered = self._shortfall.revision
            await self._state.write(offered=self._shortfall.offered)

    async def write_history(self) -> None:
        """Have what was noted of devices written, and that the daemon lives; returns as the others."""
        if self._is_alone:
            await self._state.write(history=self._history.record())

    def unkept(self) -> str:
        """Why a restart would forget what is kept here, one sentence; empty if it would not."""
        if self._state.complaint:
            return f"{self._state.path} cannot be written: {self._state.complaint}; a restart would forget drains"
        self._late = self._late and self._state.is_behind
        if self._late:
            return f"{self._state.path} could not be written within {_PATIENCE:g} s; a restart might forget drains"
        return ""

    def damage(self) -> str:
        """What was wrong with the state file at the start, one sentence; empty if nothing was."""
        return self._state.damage

    def _check_alone(self) -> None:
        """Refuse what would be forgotten: another agent's state is not ours to change.

        Raises:
            NotYetError: another agent may be running.
        """
        if not self._is_alone:
            raise NotYetError("this Fairlead does not serve the node now and would forget it")

    def drain(self, hardware: Iterable[str], reason: str, until: float | None) -> dict[str, Health]:
        """An operator takes this hardware out of service; the hardware whose health changed.

        Raises:
            FairleadError: the time is past, or none.
            NotYetError: another agent may be running.
        """
        wall = self._wall()
        if until is not None and not wall < until < _LATEST:
            raise FairleadError(
                "a drain must end later than now, in this millennium; without an end it lasts until undrain"
            )
        self._check_alone()
        return self._health.drain(hardware, reason, until, self._clock(), wall)

    def undrain(self, hardware: Iterable[str]) -> tuple[dict[str, Health], tuple[str, ...]]:
        """An operator puts this hardware back into service; the hardware whose health changed, the reasons that ended.

        Raises:
            NotYetError: another agent may be running.
        """
        self._check_alone()
        names, now = sorted(set(hardware)), self._clock()
        said = [it for name in names for it in self._health.signals_of(name, now)]
        ended = dict.fromkeys(it.reason for it in said if Clears.OPERATOR in it.waits_for)
        return self._health.undrain(names, now), tuple(ended)
