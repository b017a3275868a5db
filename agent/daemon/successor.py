"""Starts another Fairlead, of what is installed now, to take this one's place: how a package is updated without a gap."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Final

import anyio

from agent.console.control import RefusedError
from agent.daemon.serving import Serving
from agent.runtime.notify import Notifier
from agent.runtime.workers import Workers

_READY_WITHIN: Final = 30.0
"""Seconds in which it has looked at the hardware; a backend that is slow is waited for no longer at a start either."""

_STEP: Final = 0.05  # seconds between two looks whether it has ended


async def replace(serving: Serving, notifier: Notifier) -> str:
    """Have a new process, with our command line and environment, serve the node; its process ID and version.

    Raises:
        RefusedError: it cannot be, and this agent serves on; the sentence says why.
    """
    if os.getpid() == 1:
        raise RefusedError(
            "this Fairlead is its container's only process, which ends with it: update the DaemonSet, whose new pod takes "
            "over, or delete this pod"
        )
    if serving.is_standing_by or not serving.plugins:
        raise RefusedError("this Fairlead does not serve the node yet and has nothing to hand over")
    pid = await Workers("successor").start(_spawn)
    who = await _ready(serving, pid)
    if not await serving.hand_over():
        raise RefusedError(f"process {pid} ended before it had taken over; {_log_of(pid)}")
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
            while not (standby := serving.standbys.ready) or standby.who.split()[0] != str(pid):
                ended, status = os.waitpid(pid, os.WNOHANG)  # noqa: ASYNC222  # which does not wait
                if ended:
                    code = os.waitstatus_to_exitcode(status)
                    raise RefusedError(f"the new process ended with exit code {code}; {_log_of(pid)}")
                await asyncio.sleep(_STEP)
    except TimeoutError:
        os.kill(pid, signal.SIGTERM)
        raise RefusedError(f"process {pid} was not ready within {_READY_WITHIN:g} s; {_log_of(pid)}") from None
    return standby.who


def _log_of(pid: int) -> str:
    return f"the log says why (process {pid}), and this Fairlead serves on"
