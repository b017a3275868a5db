"""Reads the kubelet's checkpoint in a thread, once for all who ask at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from agent.kubelet.checkpoint import Checkpoint, CheckpointError, read
from agent.runtime import patience
from agent.runtime.workers import NoWorkerError, Workers

_DEADLINE: Final = 5.0  # seconds in which this process runs


class CheckpointReader:
    """The checkpoint in the kubelet's plugin directory."""

    def __init__(self, plugin_dir: Path) -> None:
        self._plugin_dir = plugin_dir
        self._workers = Workers("checkpoint", limit=2)
        self._reading = asyncio.Lock()
        self._begun = 0
        self._last: tuple[int, Checkpoint | None] = 0, None  # number of the reading, what it read
        self.under_way = 0
        """Readings that have not come to their end; of a disk that hangs, those that nobody waits for any more, too."""

    async def read(self) -> Checkpoint | None:
        """The checkpoint as it lies there after this call began; None if there is none.

        Raises:
            CheckpointError: it cannot be read, is damaged, or the reading hangs.
        """
        wanted = self._begun + 1  # the next to begin; the one under way may have seen the file before
        async with self._reading:
            number, found = self._last
            if number >= wanted:
                return found
            self._begun += 1
            number = self._begun
            try:
                async with patience.timeout(_DEADLINE):
                    found = await self._workers.start(self._read)
            except (TimeoutError, NoWorkerError):
                raise CheckpointError("reading it hangs") from None
            self._last = number, found
            return found

    def _read(self) -> Checkpoint | None:
        self.under_way += 1
        try:
            return read(self._plugin_dir)
        finally:
            self.under_way -= 1

    def close(self) -> None:
        """Let the threads end."""
        self._workers.close()
