"""Says what commands and HTTP may ask of the daemon, and how the admin socket carries it; `agent/daemon/control.py` answers.

Commands and daemon may be of different versions: fields that are not known are left out, those that are missing have
their defaults.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, Final, Protocol, TypeVar

import msgspec
from grpclib.encoding.base import CodecBase

from agent.console.views import Drained, Event, Explanation, HandedOver, Histories, History, Reloaded, Status, Undrained


class NoSuchDeviceError(LookupError):
    """No device has that name; the sentence says which one has a similar one."""


class RefusedError(Exception):
    """The daemon cannot do that as things are; the sentence says why."""


class Control(Protocol):
    """The daemon, for a person; every method is called on its event loop."""

    async def status(self) -> Status:
        """Everything there is to see."""

    def watch(self, last: int, *, follow: bool) -> AsyncGenerator[Event, None]:
        """The newest `last` events kept, then, to follow, every one as it happens; who does not keep up misses some."""

    async def explain(self, device: str) -> Explanation:
        """All that is known of a device, named by ID, key, address or hardware.

        Raises:
            NoSuchDeviceError: there is none.
        """

    async def history(self, device: str) -> History:
        """How a device was in the last 24 hours, named as to `explain`, or by the key that it had.

        Raises:
            NoSuchDeviceError: there is none.
        """

    async def histories(self) -> Histories:
        """How all devices were."""

    async def drain(self, device: str, reason: str, until: float | None) -> Drained:
        """Offer it to no new pod, until then (seconds since 1970) or until it is undrained; kept over restarts.

        Raises:
            NoSuchDeviceError: there is none.
            RefusedError: the time is past, or a restart would forget it.
        """

    async def undrain(self, device: str) -> Undrained:
        """Back into service: ends its drain, its quarantine, and what waits for an operator.

        Raises:
            NoSuchDeviceError: there is none.
            RefusedError: a restart would forget it.
        """

    async def reload(self) -> Reloaded:
        """Read the configuration again and apply what changed.

        Raises:
            RefusedError: it has mistakes, all of them in the sentence; nothing has changed.
        """

    async def hand_over(self) -> HandedOver:
        """Have another process, of what is installed now, serve the node, and end.

        Raises:
            RefusedError: it cannot, and this one serves on.
        """


# --- the admin socket's protocol: gRPC whose messages are JSON; the answers are those of `views` ---


SERVICE: Final = "/fairlead.admin.v1.Admin/"

_Message = TypeVar("_Message")


class Codec(CodecBase):
    """Has grpclib send and receive structs."""

    __content_subtype__ = "json"

    def encode(self, message: Any, message_type: type[Any]) -> bytes:  # noqa: ARG002  # grpclib's signature
        """The bytes of a message; a status takes 3 ms where it has 10,000 devices."""
        try:
            return msgspec.json.encode(message)
        except UnicodeEncodeError:  # of a file name that is no text
            return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")

    def decode(self, data: bytes, message_type: type[_Message]) -> _Message:
        """The message in these bytes.

        Raises:
            msgspec.DecodeError: they are no such message.
        """
        return msgspec.json.decode(data, type=message_type)


class EmptyRequest(msgspec.Struct, frozen=True):
    """A request that says nothing: Status, Reload, Handover."""


class DeviceRequest(msgspec.Struct, frozen=True):
    """A request about one device: Explain, History, Undrain."""

    device: str = ""


class WatchRequest(msgspec.Struct, frozen=True):
    """The newest `last` events; then, to follow, every one as it happens."""

    last: int = 0
    follow: bool = False


class DrainRequest(msgspec.Struct, frozen=True):
    """Offer a device to no new pod."""

    device: str = ""
    reason: str = ""
    until: float | None = None
