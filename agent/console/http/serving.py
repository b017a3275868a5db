"""Serves HTTP on the daemon's event loop, as one supervised part of it."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import structlog

from agent.console.control import Control
from agent.console.http.allowed_hosts import Hosts, OnlyFor, own_names
from agent.console.http.app import Face, Health
from agent.console.http.connections import Reception
from agent.console.http.sockets import listening
from agent.runtime.counts import Counts
from agent.runtime.supervision.problems import Problems
from agent.runtime.supervision.restarts import supervise

log = structlog.get_logger()


async def serve(
    control: Control,
    health: Health,
    counts: Counts,
    listen: str,
    hosts: Sequence[str] = (),
    problems: Problems | None = None,
) -> None:
    """Serve at "host:port" or "unix:/path" until cancelled; `hosts` are names of this node beside its own.

    Raises:
        OSError: one cannot listen there.
    """
    face = Face(control, health, counts)
    async with listening(listen) as sockets, anyio.create_task_group() as tasks:
        tasks.start_soon(supervise, "live page", face.viewers.run)
        log.info("http-served", listen=listen)
        await Reception(OnlyFor(face, Hosts(own_names(listen, hosts))), problems=problems).receive(sockets)
