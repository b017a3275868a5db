"""Named checks of a node, which look and touch nothing: what each is given to look at, and what it finds, with its mend."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from agent.config import Config


class Level(enum.IntEnum):
    """How bad it is; the worst of all is the command's exit code."""

    FINE = 0
    WARNING = 1
    """Something works less well than it could."""
    FAILURE = 2
    """Something does not work."""


class Finding(Struct, frozen=True):
    """What one check found."""

    check: str
    """Its name: `kubelet-socket`; empty until `named` gives it."""
    level: Level
    found: str
    """One sentence."""
    mend: str = ""
    """What to do; empty where all is well."""


class Patient(Struct, frozen=True):
    """The node and the process that are looked at."""

    config: Config
    proc: Path = Path("/proc")
    """This process's own, not the host's: its rights, namespaces and mounts."""
    uid: int = field(default_factory=os.geteuid)

    def backends(self) -> frozenset[str]:
        """The kinds of hardware that the configuration names."""
        return frozenset(resource.spec.backend for resource in self.config.resources)


Check = Callable[[Patient], Iterator[Finding]]
"""Looks at one thing; may block for a second."""


def fine(found: str, check: str = "") -> Finding:
    """All is well."""
    return Finding(check, Level.FINE, found)


def warning(found: str, mend: str, check: str = "") -> Finding:
    """Something works less well."""
    return Finding(check, Level.WARNING, found, mend)


def failure(found: str, mend: str, check: str = "") -> Finding:
    """Something does not work."""
    return Finding(check, Level.FAILURE, found, mend)


def named(check: str, findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings of this check; one that has a name of its own keeps it."""
    return (it if it.check else replace(it, check=check) for it in findings)
