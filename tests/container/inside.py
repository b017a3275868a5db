"""Becomes a pod's container: mounts what a runtime mounts, gives up what it gives up, and runs the image's command.

Run by `pod.py` in new mount, PID and network namespaces, with a JSON document: {"root", "mounts": [[source, target,
writable]], "privileged", "environment", "command"}. Not done as a runtime would: cgroups (mounts are nodev in place of the
device cgroup), seccomp and SELinux.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

_SIOCSIFFLAGS: Final = 0x8914  # linux/sockios.h
_IFF_UP: Final = 1

NO_RIGHTS: Final = ("setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs")
"""What gives up what `capabilities: drop: [ALL]` and `allowPrivilegeEscalation: false` take; in every Debian."""


def main() -> None:
    """Never returns."""
    pod: dict[str, Any] = json.loads(sys.argv[1])
    root, privileged = Path(pod["root"]), pod["privileged"]
    _loopback()
    targets = [(source, root / target.lstrip("/"), writable) for source, target, writable in pod["mounts"]]
    for source, target, _ in targets:
        _mount_point(Path(source), target)
    _mount("--bind", root, root)
    _mount("-t", "proc", "proc", root / "proc")
    if "/sys" not in {target for _, target, _ in pod["mounts"]}:
        _mount("-t", "sysfs", "-o", "rw" if privileged else "ro", "sysfs", root / "sys")
    if "/dev" not in {target for _, target, _ in pod["mounts"]}:
        _mount("-t", "tmpfs", "tmpfs", root / "dev")
        os.mknod(root / "dev/null", 0o20666, os.makedev(1, 3))
    for source, target, writable in targets:
        _mount("--rbind", source, target)
        _mount("-o", _options(writable=writable, privileged=privileged), target)
    _mount("-o", "remount,bind,ro", root)
    os.chroot(root)
    os.chdir("/")
    command = pod["command"] if privileged else [*NO_RIGHTS, *pod["command"]]
    os.execvpe(command[0], command, pod["environment"])


def _options(*, writable: bool, privileged: bool) -> str:
    return ",".join(["remount", "bind", "rw" if writable else "ro"] + ([] if privileged else ["nodev"]))


def _mount_point(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.touch()


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _loopback() -> None:
    """Bring `lo` up; a new network namespace has it down."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", _IFF_UP))


if __name__ == "__main__":
    main()
