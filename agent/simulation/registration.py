"""The kubelet's Registration service.

Kubelet contract: A1. Every refusal is UNKNOWN with a text.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from grpclib.const import Handler, Status
from grpclib.server import Stream

from agent.kubelet.api.v1beta1 import Empty, RegisterRequest, RegistrationBase
from agent.kubelet.server import refusal
from agent.simulation.background_tasks import Background
from agent.simulation.changes import Change, Feed, Kind
from agent.simulation.plugin_client import PluginError
from agent.simulation.sockets import Version

API_VERSION: Final = "v1beta1"
_QUOTA_PREFIX: Final = "requests."  # a name must also be valid with this before it
_DOMAIN_LIMIT: Final = 253
_NAME_LIMIT: Final = 63
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")


def join(directory: Path, endpoint: str) -> Path:
    """The endpoint's path as Go joins it: an absolute one lands below the directory, an empty one on it (A1)."""
    return Path(os.path.normpath(f"{directory}/{endpoint}"))


def is_extended_resource(name: str) -> bool:
    """Does the kubelet accept a device plugin for this name? (kubelet contract: A1).

    The agent has a check of its own: each is evidence for the other.
    """
    if "kubernetes.io/" in name or name.startswith(_QUOTA_PREFIX) or name.count("/") != 1:
        return False
    domain, local = (_QUOTA_PREFIX + name).split("/")
    return (
        len(domain) <= _DOMAIN_LIMIT
        and _DOMAIN.fullmatch(domain) is not None
        and len(local) <= _NAME_LIMIT
        and _NAME.fullmatch(local) is not None
    )


_REGISTER: Final = "/v1beta1.Registration/Register"

Gate = Callable[[RegisterRequest, float | None], Awaitable[None]]
"""Is awaited before a Register is looked at, with the seconds that its caller waits at most; a PluginError refuses it."""


async def open_gate(_request: RegisterRequest, _deadline: float | None) -> None:
    """Let every Register in."""


class Registration(RegistrationBase):
    """Answers a Register when the plugin has been dialled and its stream started."""

    def __init__(
        self,
        directory: Path,
        connect: Callable[[str, Path], Awaitable[None]],
        background: Background,
        feed: Feed,
        version: Version,
        gate: Gate = open_gate,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._background = background
        self._feed = feed
        self._version = version
        self._gate = gate

    def __mapping__(self) -> dict[str, Handler]:
        """As generated, but with the caller's deadline."""
        mapping: dict[str, Handler] = super().__mapping__()
        return mapping | {_REGISTER: mapping[_REGISTER]._replace(func=self._answer)}

    async def _answer(self, stream: Stream[RegisterRequest, Empty]) -> None:
        request = await stream.recv_message()
        if request is not None:
            deadline = stream.deadline.time_remaining() if stream.deadline else None
            await stream.send_message(await self.register(request, deadline))

    async def register(self, register_request: RegisterRequest, deadline: float | None = None) -> Empty:
        """Dial back, then answer.

        Raises:
            GRPCError: the kubelet refuses.
        """
        try:
            await self._gate(register_request, deadline)
            await self._register(register_request)
        except PluginError as error:
            self._feed.publish(Change(Kind.REFUSED, register_request.resource_name, str(error)))
            raise refusal(Status.UNKNOWN, str(error)) from None
        self._feed.publish(Change(Kind.REGISTERED, register_request.resource_name))
        return Empty()

    async def _register(self, request: RegisterRequest) -> None:
        if request.version != API_VERSION:
            raise PluginError(
                f'requested API version "{request.version}" is not supported by kubelet. '
                f'Supported version is ["{API_VERSION}"]'
            )
        if not is_extended_resource(request.resource_name):
            raise PluginError(f'the ResourceName "{request.resource_name}" is invalid')
        path = join(self._directory, request.endpoint)
        if self._version != "1.32":
            # grpclib cancels this handler at the caller's deadline, and the dial-back with it (A1).
            await self._connect(request.resource_name, path)
            return
        await self._detached(request.resource_name, path)

    async def _detached(self, resource: str, path: Path) -> None:
        """Dial back whether or not the caller still waits, as kubelets before 1.36 do."""
        outcome: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

        async def connect() -> None:
            try:
                await self._connect(resource, path)
                error = None
            except PluginError as failure:
                error = str(failure)
            if not outcome.done():
                outcome.set_result(error)

        self._background.spawn(connect())
        if (error := await outcome) is not None:
            raise PluginError(error)
