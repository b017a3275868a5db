"""What binding a driver takes of the kernel: writes into sysfs, waiting for what comes of them, and a module."""

from __future__ import annotations

import os
import subprocess
from typing import Final

from backends.linux import kernel

MODULE: Final = "vfio-pci"
_MODPROBE_DEADLINE: Final = 5.0  # seconds, of the 10 that a claim has


class Kernel(kernel.Kernel):
    """The host's."""

    def load(self, module: str) -> None:
        """Load a kernel module from the host's /lib/modules.

        Raises:
            OSError: there is no modprobe, or it failed; with what it said.
        """
        command = ["modprobe", "--dirname", os.fspath(self._host.root), module]
        try:
            done = subprocess.run(  # noqa: S603  # nothing in it comes from outside
                command, capture_output=True, text=True, errors="replace", timeout=_MODPROBE_DEADLINE, check=False
            )
        except FileNotFoundError:
            raise OSError("there is no modprobe here") from None
        except subprocess.TimeoutExpired:
            raise OSError(f"modprobe {module} was not done within {_MODPROBE_DEADLINE:g} s") from None
        if done.returncode:
            raise OSError(done.stderr.strip() or f"modprobe {module} failed")
