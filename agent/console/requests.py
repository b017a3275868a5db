"""What is asked of the admin service: its requests, field by field the messages of proto/fairlead/admin/v1/admin.proto."""

from __future__ import annotations

from typing import Final, Self

import msgspec

from agent.console.messages import decode

SERVICE: Final = "/fairlead.admin.v1.Admin/"


class Request(msgspec.Struct, frozen=True):
    """A request that reads itself."""

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Read it.

        Raises:
            MalformedError: these bytes are no such request.
        """
        return decode(data, cls)


class EmptyRequest(Request, frozen=True):
    """A request that says nothing: Status, Reload, Handover."""


class DeviceRequest(Request, frozen=True):
    """A request about one device: Explain, History, Undrain."""

    device: str = ""


class WatchRequest(Request, frozen=True):
    """The newest `last` events; then, to follow, every one as it happens."""

    last: int = 0
    follow: bool = False


class DrainRequest(Request, frozen=True):
    """Offer a device to no new pod."""

    device: str = ""
    reason: str = ""
    until: float | None = None
