"""Compares two configurations: what has changed, and what of that only a restart can apply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from agent.config.model import Config
from backends.base import Resource

_TABLES: Final = ("agent", "host", "http", "kubernetes", "dra")
APPLIED_AT_ONCE: Final = frozenset({"resync", "probe"})
"""The settings of `[agent]` that a running daemon takes over."""


class Difference(Struct, frozen=True):
    """From the configuration in force to another."""

    config: Config
    """The other, without what only a restart can apply: that stays as it is."""
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """Resources that are made otherwise, or stand at another place in the order."""
    kinds: frozenset[str] = frozenset()
    """The backends whose resources are others, or in another order; of some there may be none left."""
    settings: tuple[str, ...] = ()
    """Settings with another value, as in `agent.probe`."""
    needs_restart: tuple[str, ...] = ()
    """Settings of which the other value must wait for a restart."""

    @property
    def new(self) -> frozenset[str]:
        """The resources that are not as they were."""
        return frozenset((*self.added, *self.changed))

    def __bool__(self) -> bool:
        """Is there anything to apply?"""
        return bool(self.added or self.removed or self.changed or self.settings)


def compare(before: Config, after: Config) -> Difference:
    """What has changed from the configuration in force to another."""
    old = {resource.name: resource for resource in before.resources}
    new = {resource.name: resource for resource in after.resources}
    ranks = zip((name for name in old if name in new), (name for name in new if name in old), strict=True)
    moved = {after for before, after in ranks if before != after}
    kinds = {resource.spec.backend for resource in (*before.resources, *after.resources)}
    settings = [it for table in _TABLES for it in _differing(table, before, after)]
    live = {
        it for it in settings if it.startswith(("kubernetes.", "dra.")) or it.removeprefix("agent.") in APPLIED_AT_ONCE
    }
    agent = replace(before.agent, **{name: getattr(after.agent, name) for name in APPLIED_AT_ONCE})
    return Difference(
        replace(after, agent=agent, host=before.host, http=before.http),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and (new[name] != old[name] or name in moved)),
        kinds=frozenset(kind for kind in kinds if _of(kind, before) != _of(kind, after)),
        settings=tuple(it for it in settings if it in live),
        needs_restart=tuple(it for it in settings if it not in live),
    )


def _differing(table: str, before: Config, after: Config) -> Iterator[str]:
    """The settings of a table that are not alike, as in `agent.probe`."""
    one, other = getattr(before, table), getattr(after, table)
    return (f"{table}.{it.name}" for it in fields(one) if getattr(one, it.name) != getattr(other, it.name))


def _of(kind: str, config: Config) -> list[Resource[Any]]:
    return [resource for resource in config.resources if resource.spec.backend == kind]
