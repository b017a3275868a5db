"""What another configuration changes, and what of it only a restart can apply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from agent.config.model import Config
from backends.base import Resource

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
    """What is to be done to get from the configuration in force to another."""
    old = {resource.name: resource for resource in before.resources}
    new = {resource.name: resource for resource in after.resources}
    ranks = zip((name for name in old if name in new), (name for name in new if name in old), strict=True)
    moved = {after for before, after in ranks if before != after}
    live, restart = _agent_settings(before, after)
    kept = replace(after.agent, **{name: getattr(before.agent, name) for name in restart})
    return Difference(
        replace(after, agent=kept, host=before.host, http_listen=before.http_listen, http_hosts=before.http_hosts),
        added=tuple(name for name in new if name not in old),
        removed=tuple(name for name in old if name not in new),
        changed=tuple(name for name in new if name in old and (new[name] != old[name] or name in moved)),
        kinds=frozenset(kind for kind in _kinds(before) | _kinds(after) if _of(kind, before) != _of(kind, after)),
        settings=(
            *(f"agent.{name}" for name in live),
            *(f"kubernetes.{name}" for name in _differing(before.kubernetes, after.kubernetes)),
        ),
        needs_restart=(*(f"agent.{name}" for name in restart), *_other_settings(before, after)),
    )


def _agent_settings(before: Config, after: Config) -> tuple[list[str], list[str]]:
    """The settings that differ: those that a running daemon takes over, and the others."""
    differing = _differing(before.agent, after.agent)
    live = [name for name in differing if name in APPLIED_AT_ONCE]
    return live, [name for name in differing if name not in APPLIED_AT_ONCE]


def _differing(before: Any, after: Any) -> list[str]:
    """The fields of a table that are not alike."""
    return [it.name for it in fields(before) if getattr(before, it.name) != getattr(after, it.name)]


def _other_settings(before: Config, after: Config) -> Iterator[str]:
    yield from (f"host.{name}" for name in _differing(before.host, after.host))
    if before.http_hosts != after.http_hosts:
        yield "http.hosts"
    if before.http_listen != after.http_listen:
        yield "http.listen"


def _kinds(config: Config) -> set[str]:
    return {resource.spec.backend for resource in config.resources}


def _of(kind: str, config: Config) -> list[Resource[Any]]:
    return [resource for resource in config.resources if resource.spec.backend == kind]
