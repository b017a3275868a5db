"""Tells systemd how the service is doing, as sd_notify(3) does; without systemd it does nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Self

from msgspec import Struct


class Notifier(Struct, frozen=True):
    """Speaks to one notification socket; it never raises and never waits."""

    address: str | None
    """A path, or a name in the abstract namespace after `@`; None: nobody listens."""
    watchdog: float | None = None
    """Seconds within which systemd wants to be told that we are alive (WatchdogSec=); None: it does not ask."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, pid: int | None = None) -> Self:
        """The one that systemd names in NOTIFY_SOCKET.

        WATCHDOG_USEC counts if WATCHDOG_PID is this process or missing (sd_watchdog_enabled(3)).
        """
        microseconds = environment.get("WATCHDOG_USEC", "")
        ours = environment.get("WATCHDOG_PID") in (None, "", str(os.getpid() if pid is None else pid))
        asked = ours and microseconds.isdecimal() and int(microseconds) > 0
        return cls(environment.get("NOTIFY_SOCKET") or None, int(microseconds) / 1e6 if asked else None)

    def ready(self, status: str) -> None:
        """The start, or a reload, is over."""
        self._send(f"READY=1\nSTATUS={_one_line(status)}")

    def status(self, status: str) -> None:
        """What the service is doing, for `systemctl status`."""
        self._send(f"STATUS={_one_line(status)}")

    def reloading(self) -> None:
        """A reload has begun; `ready` ends it."""
        microseconds = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000  # which Type=notify-reload wants
        self._send(f"RELOADING=1\nMONOTONIC_USEC={microseconds}\nSTATUS=reading the configuration again")

    def feed(self) -> None:
        """We are alive; nothing is said where systemd does not ask."""
        if self.watchdog is not None:
            self._send("WATCHDOG=1")

    def main_process(self, pid: int) -> None:
        """Another process is the service's main one from now on; it speaks for it."""
        self._send(f"MAINPID={pid}")

    def stopping(self) -> None:
        """The end has begun."""
        self._send("STOPPING=1\nSTATUS=stopping")

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
