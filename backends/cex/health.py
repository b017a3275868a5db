"""Checks the health of a queue and its card: configured, not check-stopped, online."""

from __future__ import annotations

from collections.abc import Iterator

from backends.base import Host, HostPath, Signal, Verdict
from backends.cex import ap_bus, devices
from backends.linux import sysfs


def signals(host: Host, card: str, queue: str) -> Iterator[Signal]:
    """What is wrong now. A missing file means nothing: `config` came with Linux 5.13, `chkstop` with 5.17."""
    for name, path in ((card, ap_bus.DEVICES / card), (queue, ap_bus.DEVICES / card / queue)):
        yield from _signals(host, name, path)


def _signals(host: Host, name: str, path: HostPath) -> Iterator[Signal]:
    hardware = devices.hardware(name)
    if sysfs.attribute(host, path / "config") == "0":
        yield Signal(
            hardware, "deconfigured", Verdict.NOW, f"{name} is deconfigured: the machine's operator took it away"
        )
    if sysfs.attribute(host, path / "chkstop") == "1":
        yield Signal(hardware, "checkstop", Verdict.NOW, f"{name} is in checkstop state: its hardware has failed")
    online = sysfs.attribute(host, path / "online")
    if online is not None and not online.startswith("1"):
        yield Signal(hardware, "offline", Verdict.NOW, f"{name} is offline: write 1 into {path}/online")
