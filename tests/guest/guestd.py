"""The first process of the guest, or a service of its systemd: runs shell commands that come as JSON lines.

The lines come and go over a virtio-serial port. Only the standard library is imported: under emulation each import counts.

    → {"id": 1, "run": "cat"}   {"id": 1, "input": "aGk="}   {"id": 1, "input": null}   {"id": 1, "signal": 15}
    ← {"up": 2.9}               {"id": 1, "output": "aGk="}  {"id": 1, "exit": 0}
"""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

PORT = "fairlead.guest"
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}


class _Port:
    """The port to the host; lines may be sent by any thread."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR)
        self._lock = threading.Lock()
        self._rest = b""

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            while data:
                data = data[os.write(self._file, data) :]

    def receive(self) -> dict[str, Any]:
        while b"\n" not in self._rest:
            piece = os.read(self._file, 65536)
            if not piece:
                raise ConnectionError("the host has gone")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message


def _find_port() -> str:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 15) as uevents:  # NETLINK_KOBJECT_UEVENT
        uevents.bind((0, 1))
        while True:
            for name in Path("/sys/class/virtio-ports").glob("*/name"):
                if name.read_text().strip() == PORT:
                    return f"/dev/{name.parent.name}"
            uevents.recv(8192)


def _start(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=_ENVIRONMENT,
        start_new_session=True,
    )


def _follow(port: _Port, ident: int, child: subprocess.Popen[bytes]) -> None:
    """Send what a command says, and at last how it ended."""
    assert child.stdout is not None
    while piece := os.read(child.stdout.fileno(), 65536):
        port.send({"id": ident, "output": base64.b64encode(piece).decode()})
    port.send({"id": ident, "exit": child.wait()})


def _feed(child: subprocess.Popen[bytes], data: str | None) -> None:
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it may have ended
        if data is None:
            child.stdin.close()
        else:
            child.stdin.write(base64.b64decode(data))
            child.stdin.flush()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):  # it may have ended
        os.killpg(child.pid, number)


def main() -> None:
    """Serve until the machine is turned off."""
    port = _Port(_find_port())
    port.send({"up": float(Path("/proc/uptime").read_text().split()[0])})
    children: dict[int, subprocess.Popen[bytes]] = {}
    while True:
        message = port.receive()
        ident = message["id"]
        if "run" in message:
            children[ident] = _start(message["run"])
            threading.Thread(target=_follow, args=(port, ident, children[ident]), daemon=True).start()
        elif "signal" in message:
            _signal(children[ident], message["signal"])
        else:
            _feed(children[ident], message["input"])


if __name__ == "__main__":
    main()
