"""The kubelet's Registration service.

Kubelet contract: A1. Every refusal is UNKNOWN with a text.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from grpclib.const import Status

from agent.kubelet.api.v1beta1 import Empty, RegisterRequest, RegistrationBase
from agent.kubelet.transport.server import refusal
from agent.simulation.background import Background
from agent.simulation.changes import Change, Feed, Kind
from agent.simulation.device_manager.naming import is_extended_resource
from agent.simulation.endpoint import PluginError
from agent.simulation.sockets import Version

API_VERSION: Final = "v1beta1"


def join(directory: Path, endpoint: str) -> Path:
    """The endpoint's path as Go joins it: an absolute one lands below the directory, an empty one on it (A1)."""
    return Path(os.path.normpath(f"{directory}/{endpoint}"))


class Registration(RegistrationBase):
    """Answers a Register when the plugin has been dialled and its stream started."""

    def __init__(
        self,
        directory: Path,
        connect: Callable[[str, Path], Awaitable[None]],
        background: Background,
        feed: Feed,
        version: Version,
    ) -> None:
        self._directory = directory
        self._connect = connect
        self._background = background
        self._feed = feed
        self._version = version

    async def register(self, register_request: RegisterRequest) -> Empty:
        """Dial back, then answer.

        Raises:
            GRPCError: the kubelet refuses.
        """
        try:
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
        if self._version == "1.36":
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
