"""The admin socket's protocol: gRPC whose messages are JSON. Its requests are here, its answers are those of `views`.

Commands and daemon may be of different versions: fields that are not known are left out, those that are missing have
their defaults.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

import msgspec
from grpclib.encoding.base import CodecBase

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
