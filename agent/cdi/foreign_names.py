"""Lets no container name a device that no CDI specification defines, where a backend names others' (`nvidia.com/gpu=…`).

A runtime cannot make such a container, and says so only in its own log, again and again. A device of the pod's own that is
not defined is a refusal; what belongs to all (`gds=all`) is left out, and reported once.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from agent.cdi.spec import DIRECTORY
from agent.runtime import pacing
from agent.runtime.errors import words
from agent.runtime.problems import Problems, Trouble
from agent.runtime.workers import NoWorkerError, Workers
from backends.base import AllocationRefused, ContainerEdits, Host, HostPath, Resource
from backends.interface.decoding import converted, decoded
from backends.linux import files

READ_DEADLINE: Final = 10.0
"""Seconds that an Allocate waits for the disk; the kubelet's sync loop waits meanwhile (kubelet contract: A4)."""

_KEY: Final = "cdi.k8s.io/"
"""In the key of an annotation that names devices; NVIDIA's may have something before it."""
_FOR_ALL: Final = "=all"


class ForeignNames:
    """Checks the CDI names in backends' answers."""

    def __init__(self, host: Host, problems: Problems) -> None:
        self._definitions = Definitions(host)
        self._problems = problems
        self._left_out: dict[str, Trouble] = {}
        self._workers = Workers("cdi definitions")

    async def checked(self, resource: Resource[Any], edits: ContainerEdits) -> ContainerEdits:
        """A backend's answer without the names that no specification defines.

        Raises:
            AllocationRefused: one of them is the pod's own device, or the specifications cannot be read.
        """
        if not (wanted := named(edits)):
            return edits
        try:
            async with pacing.running_timeout(READ_DEADLINE):
                undefined = await self._workers.start(partial(self._definitions.undefined, wanted))
        except (OSError, NoWorkerError, TimeoutError) as error:
            why = words(error) if str(error) else f"not done within {READ_DEADLINE:g} s"
            raise AllocationRefused(
                f"Whether a CDI specification defines {', '.join(sorted(wanted))} for {resource.name} cannot be read: "
                f"{why}. Create the pod again; if it happens again, this node's administrator must look at /etc/cdi and /run/cdi."
            ) from error
        if own := sorted(name for name in undefined if not name.endswith(_FOR_ALL)):
            raise AllocationRefused(
                f"No CDI specification in /etc/cdi or /run/cdi defines {', '.join(own)}, which a container with "
                f"{resource.name} is to have. Ask this node's administrator to have it written, or another name given."
            )
        for name in wanted:
            self._tell(resource.name, name, is_there=name not in undefined)
        return _without(edits, undefined) if undefined else edits

    def _tell(self, resource: str, name: str, *, is_there: bool) -> None:
        """Report a name that is left out, and when it is defined again."""
        if is_there:
            if (trouble := self._left_out.pop(name, None)) is not None:
                trouble.healed()
            return
        if name not in self._left_out:
            what = f"containers with {resource} are not given {name}"
            self._left_out[name] = self._problems.trouble(
                "cdi", what, "cdi-name-left-out", "cdi-name-given", resource=resource, subject=name
            )
        self._left_out[name].report_once("no CDI specification in /etc/cdi or /run/cdi defines it")


def named(edits: ContainerEdits) -> frozenset[str]:
    """The devices that a backend names by CDI, in either way."""
    values = [value for key, value in edits.annotations.items() if _KEY in key]
    return frozenset((*edits.cdi_devices, *(name for value in values for name in value.split(","))))


def _without(edits: ContainerEdits, names: frozenset[str]) -> ContainerEdits:
    """The same without these names."""
    kept = {
        key: ",".join(name for name in value.split(",") if name not in names) if _KEY in key else value
        for key, value in edits.annotations.items()
    }
    return replace(edits, annotations=kept, cdi_devices=tuple(it for it in edits.cdi_devices if it not in names))


# --- which devices a node's CDI specifications define: a container with a name that none defines cannot start ---

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
        content = decoded(data, object) if path.suffix == ".json" else _yaml(data)
        spec = converted(content, _Spec)
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
