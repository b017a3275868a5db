"""Calls the kubelet in a task of its own, so that a failing call never counts as a cancellation of the caller.

Where the connection is lost or the time is up, grpclib cancels the task that waits, turns that into an error, and never
takes it back (`Task.uncancel`). Every scope that this task is in would take it for somebody's word from then on, and let
the next cancellation of its own pass as if it were not: that ended more than it was meant for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def apart(call: Coroutine[Any, Any, T]) -> T:
    """Make a call in a task of its own, which is cancelled with the one that waits for it.

    Raises:
        Exception: whatever the call raises.
    """
    return await asyncio.ensure_future(call)
