"""Which backends there are: a plain table of the built-in ones, and the entry points of others."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final

from backends.base import Backend

ENTRY_POINT_GROUP: Final = "fairlead.backends"

_BUILT_IN: Final = {
    "chardev": "backends.chardev:CharDev",
    "stub": "backends.stub:Stub",
}


class UnknownBackendError(LookupError):
    """No backend of that name is built in or installed."""


class BrokenBackendError(Exception):
    """The backend is installed but cannot be loaded."""


def names() -> list[str]:
    """Every backend that a resource may name, without importing any."""
    return sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def load(name: str) -> type[Backend[Any]]:
    """The backend's class; an installed one cannot shadow a built-in.

    Raises:
        UnknownBackendError: there is none of that name.
        BrokenBackendError: its code cannot be imported, or is no backend.
    """
    if (target := _BUILT_IN.get(name)) is not None:
        module, _, attribute = target.partition(":")
        built_in: type[Backend[Any]] = getattr(import_module(module), attribute)
        return built_in
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            found = point.load()
        except Exception as error:
            raise BrokenBackendError(f"backend {name!r} ({point.value}) cannot be imported: {error!r}") from error
        if not (isinstance(found, type) and issubclass(found, Backend)):
            raise BrokenBackendError(f"backend {name!r} ({point.value}) is not a subclass of backends.base.Backend")
        return found
    raise UnknownBackendError(name)
