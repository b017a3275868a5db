"""A client of QEMU's machine protocol (QMP): commands and events as JSON lines on a socket."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any


class QmpError(RuntimeError):
    """QEMU refused a command; the text is its own."""


class Qmp:
    """One connection to a machine; commands are sent one after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._answers: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._events: list[dict[str, Any]] = []
        self._news = asyncio.Condition()
        self._task = asyncio.create_task(self._read())

    async def negotiate(self) -> None:
        """Leave the mode in which QEMU greets, as its first command must.

        Raises:
            QmpError: QEMU is gone.
        """
        await self.execute("qmp_capabilities")

    async def _read(self) -> None:
        try:
            async for line in self._reader:
                message = json.loads(line)
                if "event" in message:
                    async with self._news:
                        self._events.append(message)
                        self._news.notify_all()
                elif "QMP" not in message:  # the greeting
                    self._answers.put_nowait(message)
        except ConnectionError:
            pass  # QEMU is off
        self._answers.put_nowait(None)

    async def execute(self, command: str, **arguments: object) -> Any:
        """What a command returns.

        Raises:
            QmpError: it failed, or QEMU is gone.
        """
        async with self._turn:
            self._writer.write(json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n")
            answer = await self._answers.get()
        if answer is None:
            raise QmpError(f"{command}: QEMU has gone away")
        if "error" in answer:
            raise QmpError(f"{command}: {answer['error']['desc']}")
        return answer["return"]

    async def event(self, name: str, **data: object) -> None:
        """Wait for an event with these data, and forget it."""

        def found() -> dict[str, Any] | None:
            return next((e for e in self._events if e["event"] == name and data.items() <= e["data"].items()), None)

        async with self._news:
            await self._news.wait_for(lambda: found() is not None)
            event = found()
            assert event is not None
            self._events.remove(event)

    async def close(self) -> None:
        """End the connection; nothing is asked of QEMU."""
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
