"""Ends the daemon: at once where no standby is there, else once the standby serves the node.

`replace` starts a successor of the installed version and hands the node to it: a package is updated without a gap.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import anyio
import structlog

from agent.console.control import RefusedError
from agent.console.views import HandedOver
from agent.daemon.serving import Serving
from agent.runtime.watchdog import Notifier
from backends.errors import reason_of

LEAVE: Final = 24.0
"""Seconds that an agent which was told to end waits for a standby that is there to take over; less than what ends it."""

_READY_WITHIN: Final = 30.0
"""Seconds in which it has looked at the hardware; a backend that is slow is waited for no longer at a start either."""

_STEP: Final = 0.05  # seconds between two looks whether it has ended
_REPLY: Final = 0.1  # seconds for the answer to leave

log = structlog.get_logger()


class Shutdown:
    """Decides when the running agent ends."""

    def __init__(self, serving: Serving, notifier: Notifier) -> None:
        self._serving, self._notifier = serving, notifier
        self._scope = anyio.CancelScope()
        self._leaving: asyncio.Future[None] | None = None
        self._parent = os.getppid()  # as we started: a successor's ends, and process 1 is its parent then
        self._replacing: asyncio.Future[HandedOver] | None = None

    @contextmanager
    def waited_for(self) -> Iterator[None]:
        """Cancel the body at SIGTERM or SIGINT, or when another agent serves."""
        with self._scope:
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self._stop, number)
            yield

    def _stop(self, number: int) -> None:
        log.info("stopping", signal=signal.Signals(number).name)
        if self._serving.standbys.any and self._leaving is None:
            self._leaving = asyncio.ensure_future(self._leave())
        else:
            self._end()

    def _end(self) -> None:
        self._notifier.stopping()
        self._scope.cancel()

    async def _leave(self) -> None:
        """End once a standby serves the node, or none is there any more."""
        with anyio.move_on_after(LEAVE):
            standbys = self._serving.standbys
            while await standbys.come() and not await self._serving.hand_over():
                if standbys.any and not standbys.ready():
                    await standbys.changed()
        self._end()

    async def replace(self) -> HandedOver:
        """Start a new process with our command line and environment, hand the node to it, and end.

        Raises:
            RefusedError: it cannot be, and this agent serves on; the sentence says why.
        """
        if self._replacing is None or self._replacing.done():  # else another command has asked for it
            self._replacing = asyncio.ensure_future(self._replace())
        return await asyncio.shield(self._replacing)  # who asked may be gone by then

    async def _replace(self) -> HandedOver:
        serving, notifier = self._serving, self._notifier
        # a child of process 1 is a container's main process, too, unless systemd is that
        if os.getpid() == 1 or (self._parent == 1 and notifier.address is None):
            raise RefusedError(
                "this Fairlead is its container's main process, which ends with it: update the DaemonSet, whose new pod takes "
                "over, or delete this pod"
            )
        if serving.is_standing_by or not serving.plugins:
            raise RefusedError("this Fairlead does not serve the node yet and has nothing to hand over")
        try:
            pid = _spawn()
        except OSError as error:
            raise RefusedError(
                f"{sys.executable} cannot be started: {reason_of(error)}; this Fairlead serves on"
            ) from error
        ended = _end_of(pid)
        try:
            who = await _ready(serving, pid, ended)
            if not await serving.hand_over(pid):
                raise RefusedError(f"process {pid} ended or hung before it had taken over; {_log_of(pid)}")
        except BaseException:
            if not ended.done():
                os.kill(pid, signal.SIGKILL)  # it hangs, perhaps so that it would never see another signal
            raise
        notifier.main_process(pid)
        asyncio.get_running_loop().call_later(_REPLY, self._scope.cancel)
        return HandedOver(who)


def _spawn() -> int:
    # systemd wants signs of life from whatever is the main process, not from us
    environment = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"}
    return os.posix_spawn(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _end_of(pid: int) -> asyncio.Future[int]:
    """The exit code of a child, once it has one; it leaves no zombie."""
    loop, process = asyncio.get_running_loop(), os.pidfd_open(pid)
    code: asyncio.Future[int] = loop.create_future()

    def reap() -> None:
        loop.remove_reader(process)
        os.close(process)
        code.set_result(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    loop.add_reader(process, reap)
    return code


async def _ready(serving: Serving, pid: int, ended: asyncio.Future[int]) -> str:
    """Wait until the new process stands by; returns its process ID and version."""
    try:
        with anyio.fail_after(_READY_WITHIN):
            while (standby := serving.standbys.ready(pid)) is None:
                if ended.done():
                    raise RefusedError(f"the new process ended with exit code {ended.result()}; {_log_of(pid)}")
                await asyncio.sleep(_STEP)
    except TimeoutError:
        raise RefusedError(f"process {pid} was not ready within {_READY_WITHIN:g} s; {_log_of(pid)}") from None
    return standby.who


def _log_of(pid: int) -> str:
    return f"the log says why (process {pid}), and this Fairlead serves on"
