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


class StatusRequest(Request, frozen=True):
    """Everything there is to see, now."""


class WatchRequest(Request, frozen=True):
    """The newest `last` events; then, to follow, every one as it happens."""

    last: int = 0
    follow: bool = False


class ExplainRequest(Request, frozen=True):
    """All that is known of one device."""

    device: str = ""


class HistoryRequest(Request, frozen=True):
    """How one device was."""

    device: str = ""


class DrainRequest(Request, frozen=True):
    """Offer a device to no new pod."""

    device: str = ""
    reason: str = ""
    until: float | None = None


class UndrainRequest(Request, frozen=True):
    """Back into service."""

    device: str = ""


class HandoverRequest(Request, frozen=True):
    """Have another process serve the node, and end."""


class ReloadRequest(Request, frozen=True):
    """Read the configuration again."""
