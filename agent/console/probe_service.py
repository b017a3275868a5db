"""Answers the kubelet's probes on a unix socket that is root's alone: no other user can keep them waiting, or answer them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Protocol

import anyio

from agent.console.control import Control
from agent.console.sockets import PROBES, WELL, probe_socket
from agent.console.views import Status
from agent.kubelet.client import listens
from agent.kubelet.lock import identity
from agent.kubelet.server import listen

_LOOK_AGAIN: Final = 2.0  # seconds between two looks whether the socket is still there
_ASKS_WITHIN: Final = 2.0  # seconds


class Health(Protocol):
    """Whether the daemon itself is well; of devices it says nothing."""

    def alive(self) -> str:
        """Empty while its loop turns and its watchdog is fed, else why not, in one sentence."""


async def verdict(what: str, look: Callable[[], Awaitable[Status]], health: Health) -> tuple[bool, str]:
    """Does this probe succeed? And the sentences that say it."""
    if what == "live":
        ailment = health.alive()
        return not ailment, ailment or "ok"
    status = await look()
    missing = status.unready()
    return not missing, "\n".join(missing) or ("standby" if status.standing_by else "ready")


async def serve(control: Control, health: Health, admin_socket: Path) -> None:
    """Answer for ever; a socket that is removed, perhaps with all of /run, is made again.

    Raises:
        OSError: no socket can be made there.
    """

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with anyio.move_on_after(_ASKS_WITHIN):
                what = (await reader.readline()).decode(errors="replace").strip()
                if what in PROBES:
                    is_well, sentences = await verdict(what, control.status, health)
                    writer.write(f"{WELL if is_well else 'ill'}\n{sentences}\n".encode(errors="replace"))
        finally:  # also where the daemon ends meanwhile
            writer.close()

    path = probe_socket(admin_socket)
    while True:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        for left in path.parent.glob("probe-*.sock"):  # by containers that were killed
            if not listens(left):
                left.unlink(missing_ok=True)
        server = await asyncio.start_unix_server(meet, sock=listen(path), start_serving=False)
        made = identity(path)
        try:
            await server.start_serving()  # which may be cancelled
            while identity(path) == made:  # noqa: ASYNC110  # the file system sets no event of ours
                await asyncio.sleep(_LOOK_AGAIN)
        finally:
            if identity(path) == made:
                path.unlink(missing_ok=True)
            server.close()
        while listens(path):  # noqa: ASYNC110  # an agent that was started beside us in this namespace has it, until it ends
            await asyncio.sleep(_LOOK_AGAIN)
