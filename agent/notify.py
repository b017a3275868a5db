"""Tells systemd how the service is doing, as sd_notify(3) does; without systemd it does nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Notifier:
    """Speaks to one notification socket; it never raises and never waits."""

    address: str | None
    """A path, or a name in the abstract namespace after `@`; None: nobody listens."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """The one that systemd names in NOTIFY_SOCKET."""
        return cls(environment.get("NOTIFY_SOCKET") or None)

    def ready(self, status: str) -> None:
        """The start is over."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """What the service is doing, for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1")

    def _send(self, message: str) -> None:
        if self.address is None:
            return
        name = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(message.encode(errors="replace"), name)
        except (OSError, ValueError):
            pass  # systemd is gone or busy; the service goes on without it


def _one_line(text: str) -> str:
    return " ".join(text.split())
