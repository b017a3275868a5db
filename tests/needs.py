"""What a test needs of the machine; where that is missing, the test is skipped with one short reason.

`@pytest.mark.needs("loop devices")` says so. Each thing is really tried, once a session, when the first test needs it:
root in a container may do less than root, and a user sometimes more than expected.
"""

from __future__ import annotations

import errno
import functools
import importlib.util
import os
import random
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from agent.simulation.demo_stage import LoopDevice
from tests.nodes import can_make_nodes

CHROMIUM: Final = Path("/usr/bin/chromium")  # Debian's
_REPOSITORY: Final = Path(__file__).parents[1]
CORPUS: Final = _REPOSITORY.parent / "shared/corpus"
"""Recordings of other people's machines (its README.md). Their licences are others': none of them is in this repository."""
RECORDINGS: Final = "recordings"


def skip_without(*things: str) -> None:
    """Skip the running test if this machine lacks one of these."""
    for thing in things:
        if not has(thing):
            pytest.skip(f"needs {thing}")


@functools.cache
def has(thing: str) -> bool:
    """Whether this machine has it: a key of `_TRIES`."""
    return _TRIES[thing]()


def _root() -> bool:
    return os.geteuid() == 0


def _dev_kmsg() -> bool:
    try:
        log = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return stat.S_ISCHR(os.fstat(log).st_mode) and os.read(log, 8192) != b""
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EPIPE)  # all is read; what was to come is overwritten
    finally:
        os.close(log)


def _loop_devices() -> bool:
    device = LoopDevice(random.SystemRandom().randrange(10_000, 1 << 20))
    with suppress(OSError):
        device.add()
        try:
            return Path("/dev", device.name).exists()
        finally:
            device.remove()
    return False


def _namespaces() -> bool:
    """As tests.e2e.hermetic makes them: not in a chroot, nor where a container forbids it."""
    command = [sys.executable, "-m", "tests.e2e.hermetic", "builtins:len", '[""]']
    return subprocess.run(command, cwd=_REPOSITORY, capture_output=True, check=False).returncode == 0


def _kustomize() -> bool:
    from tests.deploy.manifests import kustomize

    return kustomize() is not None


def _helm() -> bool:
    from tests.deploy.manifests import helm

    return helm() is not None


def _promtool() -> bool:
    from tests.deploy.observability.promtool import promtool

    return promtool() is not None


def _mounts() -> bool:
    with tempfile.TemporaryDirectory() as place:
        command = ["unshare", "--mount", "mount", "--bind", place, place]
        return (
            shutil.which("unshare") is not None
            and not subprocess.run(command, capture_output=True, check=False).returncode
        )


def _openssl() -> bool:
    """One that signs certificates with a line (`req -CA`)."""
    if shutil.which("openssl") is None:
        return False
    return " 3." in subprocess.run(["openssl", "version"], capture_output=True, text=True, check=False).stdout


def _system_python() -> bool:
    code = "import sys, venv; sys.exit(sys.version_info < (3, 11))"
    return (
        Path("/usr/bin/python3").exists()
        and not subprocess.run(["/usr/bin/python3", "-c", code], capture_output=True, check=False).returncode
    )


_TRIES: Final[Mapping[str, Callable[[], bool]]] = {
    "root": _root,
    "device nodes": can_make_nodes,
    "namespaces": _namespaces,
    "mounts": _mounts,
    "loop devices": _loop_devices,
    "/dev/loop0": lambda: Path("/dev/loop0").exists(),
    "/sys": Path("/sys/dev/char/1:3").exists,
    "/dev/net/tun": lambda: os.access("/dev/net/tun", os.R_OK | os.W_OK),
    "/dev/stdin": lambda: os.path.lexists("/dev/stdin"),
    "/dev/kmsg": _dev_kmsg,
    "setpriv": lambda: shutil.which("setpriv") is not None,
    "systemd": lambda: shutil.which("systemd-analyze") is not None,
    "kustomize 5 (make build/kustomize/.ready)": _kustomize,
    "helm (make build/helm/.ready)": _helm,
    "promtool (make build/promtool/.ready)": _promtool,
    "openssl 3": _openssl,
    "Debian's Python 3.11 or newer": _system_python,
    "gcc": lambda: shutil.which("gcc") is not None,
    "nvidia-ml-py": lambda: importlib.util.find_spec("pynvml") is not None,
    "groff": lambda: shutil.which("groff") is not None,
    "chromium": CHROMIUM.exists,
    RECORDINGS: (CORPUS / "build.py").exists,
}
