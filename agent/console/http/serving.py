"""Serves HTTP on the daemon's event loop, as one supervised part of it."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import anyio
import structlog

from agent.console.control import Control
from agent.console.http.allowed_hosts import Hosts, OnlyFor, own_names
from agent.console.http.app import Face
from agent.console.http.connections import Reception
from agent.console.http.sockets import listening
from agent.console.probe_service import Health
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
    listeners: list[socket.socket] | None = None,
    given: Sequence[socket.socket] = (),
) -> None:
    """Serve at "host:port" or "unix:/path" until cancelled.

    Args:
        control: is asked.
        health: of the daemon itself.
        counts: are shown.
        listen: where.
        hosts: names of this node beside its own.
        problems: is told what does not work.
        listeners: has the sockets meanwhile that another agent may go on listening at.
        given: such sockets of the agent before us.

    Raises:
        OSError: one cannot listen there.
    """
    face = Face(control, health, counts)
    async with listening(listen, given) as sockets, anyio.create_task_group() as tasks:
        tasks.start_soon(supervise, "live page", face.viewers.run)
        log.info("http-served", listen=listen)
        shared = [it for it in sockets if it.family != socket.AF_UNIX]  # a path is another's by itself
        listeners = [] if listeners is None else listeners
        listeners[:] = shared
        try:
            await Reception(OnlyFor(face, Hosts(own_names(listen, hosts))), problems=problems).receive(sockets)
        finally:
            listeners.clear()
