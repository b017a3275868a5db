"""Looks whether any CDI specification of the node defines a device: a container with a name that none defines cannot start."""

from __future__ import annotations

import errno
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

_NO_SPECIFICATION: Final = frozenset({errno.ENOENT, errno.EINVAL, errno.EISDIR, errno.EFBIG, errno.ELOOP})
"""It vanished in this moment; or it is no regular file, or far too long."""

_Stamp = tuple[int, int, int]


class _Device(msgspec.Struct):
    name: str


class _Spec(msgspec.Struct):
    kind: str
    devices: list[_Device] = []


class Definitions:
    """The devices that a host's specifications define; a file is read again when it has changed. All of it blocks."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._read: dict[Path, tuple[_Stamp, frozenset[str]]] = {}

    def undefined(self, names: Iterable[str]) -> frozenset[str]:
        """Those of these names that no specification defines.

        Raises:
            OSError: one that might define them cannot be read.
        """
        before, read = self._read, dict[Path, tuple[_Stamp, frozenset[str]]]()  # two threads may be here at once
        failed: OSError | None = None
        for path in self._files():
            try:
                found = path.stat()
                stamp = (found.st_ino, found.st_size, found.st_mtime_ns)
                known = before.get(path)
                read[path] = known if known and known[0] == stamp else (stamp, _defined(path))
            except OSError as error:
                failed = failed if error.errno in _NO_SPECIFICATION else error
        self._read = read
        undefined = frozenset(names).difference(*(defined for _, defined in read.values()))
        if undefined and failed is not None:
            raise failed
        return undefined

    def _files(self) -> Iterator[Path]:
        for directory in _DIRECTORIES:
            with suppress(FileNotFoundError, NotADirectoryError):
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
    except Exception as error:  # PyYAML also raises what its constructors meet: IndexError, KeyError, TypeError
        raise ValueError(str(error)) from error
