"""The kubelet's own sockets: how they appear, how they stay behind, and what a starting kubelet removes.

Kubelet contract: A6.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from agent.kubelet.server import SocketServer
from agent.simulation.device_manager import checkpoint

if TYPE_CHECKING:
    from grpclib._typing import IServable

Version = Literal["1.32", "1.36", "1.37"]
"""Which kubelet: those between behave as the one before."""

_BACKLOG: Final = 128


async def at_once() -> None:
    """Listen in the next turn of the event loop."""
    await asyncio.sleep(0)


def wipe(directory: Path, version: Version) -> None:
    """Remove what a starting kubelet of that version removes from its plugin directory."""
    for path in directory.iterdir():
        spared = path.is_dir() or path.name == checkpoint.NAME
        if not spared if version == "1.32" else path.is_socket():
            path.unlink()


class KubeletSocket(SocketServer):
    """A server whose socket can be seen before it listens, and stays behind when the kubelet ends."""

    def __init__(
        self, handlers: Collection[IServable], path: Path, before_listening: Callable[[], Awaitable[None]] = at_once
    ) -> None:
        super().__init__(handlers, path)
        self._before_listening = before_listening

    async def open(self) -> None:
        """Bind in place, wait, and listen: in between, connecting is refused.

        Raises:
            OSError: the directory is missing or not writable, or the path is longer than 107 bytes.
        """
        self.path.unlink(missing_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.bind(str(self.path))
            await self._before_listening()
            sock.listen(_BACKLOG)
            await self.start(sock=sock)
        except BaseException:
            sock.close()
            raise

    def is_reachable(self) -> bool:
        """Never ours to remove: a kubelet's socket stays behind when it ends."""
        return False
