"""Keeps one CDI specification for each ResourceClaim, written before the kubelet is answered: DRA has no other way in.

It stays until the claim is unprepared, also while no agent runs: a container that starts again is made from it. Its name is
the claim's UID, so that no runtime takes an earlier one for it. It is not synced: a boot empties /run, and the kubelet then
has claims prepared again. All of it blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from agent.cdi import names, spec
from agent.cdi.directory import resolved
from backends.base import ContainerEdits, Host
from backends.linux import files

UID: Final = re.compile("[A-Za-z0-9][A-Za-z0-9-]{0,99}")
"""What a ResourceClaim's UID may be, as it becomes a file's name: RFC 4122's form, and what stands for one in tests."""

_MOST_READ: Final = 4 << 20  # bytes of a specification: a claim has 32 devices


class ClaimFiles:
    """The specifications of one driver's claims."""

    def __init__(self, host: Host, driver: str) -> None:
        self._host, self._driver = host, driver
        self._kind = names.claim_kind(driver)
        begin, end = names.claim_file(driver, "*").name.split("*")
        self._name = re.compile(f"{re.escape(begin)}({UID.pattern}){re.escape(end)}")

    def write(self, uid: str, devices: Mapping[str, ContainerEdits]) -> None:
        """Have the specification of a claim say this of its devices, by their names; of none, there is no specification.

        Raises:
            OSError: it cannot be written.
        """
        found = {name: resolved(self._host, spec.whole_edits(it)) for name, it in devices.items()}
        path = self._host.local(names.claim_file(self._driver, uid))
        if not found:
            self.remove(uid)
            return
        data = spec.encode(self._kind, found)
        with suppress(OSError):  # an equal file stays: each change has runtimes read all of them again
            if files.read(path, _MOST_READ, follow=False) == data:
                return
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        files.replace(path, data, 0o644)

    def remove(self, uid: str) -> None:
        """Remove the specification of a claim, if there is one.

        Raises:
            OSError: it cannot be removed.
        """
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

    def name(self, device: str) -> str:
        """What the runtime is told for a device of a specification."""
        return f"{self._kind}={device}"
