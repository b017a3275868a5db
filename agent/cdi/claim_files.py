"""Keeps one CDI specification for each ResourceClaim, written before the kubelet is answered: DRA has no other way in.

It stays until the claim is unprepared, also while no agent runs: a container that starts again is made from it. Its name is
the claim's UID, so that no runtime takes an earlier one for it. It is not synced: a boot empties /run, and the kubelet then
has claims prepared again. All of it blocks.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.cdi import names, spec
from agent.cdi.directory import resolved
from backends.base import ContainerEdits, Host, HostPath
from backends.linux import files

UID: Final = re.compile("[A-Za-z0-9][A-Za-z0-9-]{0,99}")
"""What a ResourceClaim's UID may be, as it becomes a file's name: RFC 4122's form, and what stands for one in tests."""

_MOST_READ: Final = 4 << 20  # bytes of a specification: a claim has 32 devices


class ClaimFiles:
    """The specifications of one driver's claims."""

    def __init__(self, host: Host, driver: str, metadata: Path) -> None:
        """Prepare; `metadata` is a directory for what containers can read of their devices, at the host's path of it."""
        self._host, self._driver, self._metadata = host, driver, metadata
        self._kind = names.claim_kind(driver)
        begin, end = names.claim_file(driver, "*").name.split("*")
        self._name = re.compile(f"{re.escape(begin)}({UID.pattern}){re.escape(end)}")

    def metadata(self, uid: str, request: str) -> HostPath:
        """Where the metadata of a request lies, for a mount."""
        return HostPath(str(self._metadata / uid / f"{request}.json"))

    def write(self, uid: str, devices: Mapping[str, ContainerEdits], metadata: Mapping[str, bytes]) -> None:
        """Have the specification of a claim say this of its devices, by their names; of none, there is no specification.

        `metadata` is what containers can read, by request.

        Raises:
            OSError: it cannot be written.
        """
        for request, said in metadata.items():
            _have(self._metadata / uid / f"{request}.json", said)
        found = {name: resolved(self._host, spec.whole_edits(it)) for name, it in devices.items()}
        path = self._host.local(names.claim_file(self._driver, uid))
        if not found:
            self.remove(uid)
            return
        _have(path, spec.encode(self._kind, found))

    def remove(self, uid: str) -> None:
        """Remove the specification and the metadata of a claim, as far as there are any.

        Raises:
            OSError: they cannot be removed.
        """
        with suppress(FileNotFoundError):
            shutil.rmtree(self._metadata / uid)
        path = self._host.local(names.claim_file(self._driver, uid))
        for it in (files.unfinished(path), path):
            it.unlink(missing_ok=True)

    def uids(self) -> frozenset[str]:
        """The claims that have a specification.

        Raises:
            OSError: the directory cannot be read.
        """
        with suppress(FileNotFoundError):
            found = self._host.local(names.DIRECTORY).iterdir()
            return frozenset(it[1] for path in found if (it := self._name.fullmatch(path.name)))
        return frozenset()

    def left(self) -> frozenset[str]:
        """The claims that have a specification, or had one before a boot, which takes only that.

        Raises:
            OSError: a directory cannot be read.
        """
        with suppress(FileNotFoundError):
            return self.uids() | {it.name for it in self._metadata.iterdir() if UID.fullmatch(it.name)}
        return self.uids()

    def name(self, device: str) -> str:
        """What the runtime is told for a device of a specification."""
        return f"{self._kind}={device}"


def _have(path: Path, data: bytes) -> None:
    """Write a file if it has anything else; an equal one stays: each change of a directory has runtimes read it again.

    Raises:
        OSError: it cannot be written.
    """
    with suppress(OSError):
        if files.read(path, _MOST_READ, follow=False) == data:
            return
    try:
        files.replace(path, data, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(path, data, 0o644)
