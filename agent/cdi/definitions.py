"""Looks whether any CDI specification of the node defines a device: a container with a name that none defines cannot start."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from agent.cdi.names import DIRECTORY
from backends.base import Host, HostPath
from backends.linux import files

_DIRECTORIES: Final = (HostPath("/etc/cdi"), DIRECTORY)
_MOST_READ: Final = 16 << 20  # bytes of a specification

_Stamp = tuple[int, int, int]


class _Device(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct):
    kind: str
    devices: list[_Device] = []


class Definitions:
    """What the specifications of a host define; a file is read again when it is another. All of it blocks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._read: dict[Path, tuple[_Stamp, frozenset[str]]] = {}

    def undefined(self, names: Iterable[str]) -> frozenset[str]:
        """Those of these names that no specification defines."""
        before, self._read = self._read, {}
        for path in self._files():
            with suppress(OSError):  # it vanished in this moment; or is none that a runtime could read
                found = path.stat()
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                known = before.get(path)
                self._read[path] = known if known and known[0] == stamp else (stamp, _defined(path))
        return frozenset(names).difference(*(defined for _, defined in self._read.values()))

    def _files(self) -> Iterator[Path]:
        for directory in _DIRECTORIES:
            with suppress(OSError):
                yield from (it for it in self._host.local(directory).iterdir() if it.suffix in (".json", ".yaml"))


def _defined(path: Path) -> frozenset[str]:
    """The devices that a file defines; none if it is no specification, as a runtime takes it.

    Raises:
        OSError: it cannot be read.
    """
    data = files.read(path, _MOST_READ)
    try:
        content = msgspec.json.decode(data) if path.suffix == ".json" else _yaml(data)
        spec = msgspec.convert(content, _Spec)
    except (ValueError, RecursionError):
        return frozenset()
    return frozenset(f"{spec.kind}={device.name}" for device in spec.devices)


def _yaml(data: bytes) -> Any:
    """What YAML says.

    Raises:
        ValueError: nothing.
    """
    import yaml  # noqa: PLC0415  # 1.5 MB that most nodes can do without

    try:
        return yaml.load(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506  # both are safe
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
