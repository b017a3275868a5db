"""A real libnvidia-ml.so.1 for tests, built of `nvml_library.c`: pynvml loads it, and it does what a test orders."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from backends.gpu import nvml
from tests.backends.gpu.fake_nvml import forget
from tests.wait import PATIENCE

_SOURCE = Path(__file__).with_name("nvml_library.c")


class NvmlLibrary:
    """Where it is, and what it is told."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "libnvidia-ml.so.1"
        self.log = directory / "calls"
        self._orders = directory / "orders"
        os.mkfifo(self._orders)
        self._fifo = os.open(self._orders, os.O_RDWR | os.O_NONBLOCK)
        options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,{self.path.name}"]
        command = ["gcc", *options, "-o", os.fspath(self.path), os.fspath(_SOURCE)]
        subprocess.run(command, check=True, timeout=PATIENCE)

    def environment(self, *addresses: str) -> dict[str, str]:
        """What a process that loads it must have."""
        return {
            "FAKE_NVML_EVENTS": str(self._orders),
            "FAKE_NVML_LOG": str(self.log),
            "FAKE_NVML_GPUS": " ".join(addresses),
        }

    def order(self, line: str) -> None:
        """Have it do this, the next time that events are waited for."""
        os.write(self._fifo, f"{line}\n".encode())

    def calls(self) -> list[str]:
        """What was asked of it."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def close(self) -> None:
        """End it."""
        os.close(self._fifo)


def install(monkeypatch: pytest.MonkeyPatch, directory: Path, *addresses: str) -> NvmlLibrary:
    """Put it in place for one test."""
    directory.mkdir()
    library = NvmlLibrary(directory)
    forget(monkeypatch)
    monkeypatch.setattr(nvml, "_is_installed", lambda: True)
    monkeypatch.setattr(nvml, "_library", lambda *_: os.fspath(library.path))
    for name, value in library.environment(*addresses).items():
        monkeypatch.setenv(name, value)
    return library
