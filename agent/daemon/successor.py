"""Starts another Fairlead, of what is installed now, to take this one's place: how a package is updated without a gap."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from typing import Final

import anyio

from agent.console.control import RefusedError
from agent.daemon.serving import Serving
from agent.runtime.supervision.notify import Notifier
from backends.errors import reason_of

_READY_WITHIN: Final = 30.0
"""Seconds in which it has looked at the hardware; a backend that is slow is waited for no longer at a start either."""

_STEP: Final = 0.05  # seconds between two looks whether it has ended


async def replace(serving: Serving, notifier: Notifier) -> str:
    """Have a new process, with our command line and environment, serve the node; its process ID and version.

    Raises:
        RefusedError: it cannot be, and this agent serves on; the sentence says why.
    """
    if os.getpid() == 1 or (os.getppid() == 1 and notifier.address is None):  # but for systemd, that is a container's
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
    try:
        who = await _ready(serving, pid)
        if not await serving.hand_over(pid):
            raise RefusedError(f"process {pid} ended before it had taken over; {_log_of(pid)}")
    except BaseException:
        with suppress(ChildProcessError):  # it has ended, as was seen
            if os.waitpid(pid, os.WNOHANG) == (0, 0):  # noqa: ASYNC222
                os.kill(pid, signal.SIGTERM)
        raise
    notifier.main_process(pid)
    return who


def _spawn() -> int:
    # systemd wants signs of life from whatever is the main process, not from us
    environment = {name: value for name, value in os.environ.items() if name != "WATCHDOG_PID"}
    return os.posix_spawn(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


async def _ready(serving: Serving, pid: int) -> str:
    """Wait until it stands by; its process ID and version."""
    try:
        with anyio.fail_after(_READY_WITHIN):
            while (standby := serving.standbys.ready(pid)) is None:
                ended, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  # which does not wait
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    raise RefusedError(f"the new process ended with exit code {code}; {_log_of(pid)}")
                await asyncio.sleep(_STEP)
    except TimeoutError:
        raise RefusedError(f"process {pid} was not ready within {_READY_WITHIN:g} s; {_log_of(pid)}") from None
    return standby.who


def _log_of(pid: int) -> str:
    return f"the log says why (process {pid}), and this Fairlead serves on"
