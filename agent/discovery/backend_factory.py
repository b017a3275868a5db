"""Makes the backends that a configuration names. For one that cannot be made, another stands that lists no units and says why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NoReturn

import msgspec

from agent.discovery.backend_answers import ask
from agent.runtime.errors import shown
from backends import registry
from backends.base import Backend, ContainerEdits, Discovery, Grant, Host, Released, Resource


def make_backends(host: Host, resources: Sequence[Resource[Any]]) -> dict[str, Backend[Any]]:
    """One backend for each kind that the resources name, with all resources of that kind."""
    by_kind: defaultdict[str, list[Resource[Any]]] = defaultdict(list)
    for resource in resources:
        by_kind[resource.spec.backend].append(resource)
    return {kind: _make(kind, host, of_kind) for kind, of_kind in by_kind.items()}


def _make(kind: str, host: Host, resources: list[Resource[Any]]) -> Backend[Any]:
    try:
        return ask(lambda: registry.load(kind)(host, resources))
    except Exception as error:  # noqa: BLE001  # a backend may raise anything; the others go on
        return _Unmade(host, resources, error)


def why_unmade(backend: Backend[Any]) -> str:
    """Why it could not be started; empty if it could."""
    return f"it could not be started: {shown(backend.error)}" if isinstance(backend, _Unmade) else ""


class _Unmade(Backend[msgspec.Struct]):
    """Stands for a backend whose constructor raised: its resources are served, empty, with the reason."""

    options_type: ClassVar = msgspec.Struct

    def __init__(self, host: Host, resources: Sequence[Resource[Any]], error: Exception) -> None:
        super().__init__(host, resources)
        self.error = error

    def _raise(self) -> NoReturn:
        raise RuntimeError(why_unmade(self)) from self.error

    def units(self) -> Iterable[str]:
        self._raise()

    def discover(self, unit: str) -> Discovery:
        raise LookupError(unit)

    def edits(self, resource: Resource[Any], grants: Sequence[Grant]) -> ContainerEdits:  # noqa: ARG002
        raise LookupError(resource.name)

    def release(self, ended: Sequence[Released], idle: frozenset[str]) -> None:  # noqa: ARG002
        self._raise()
