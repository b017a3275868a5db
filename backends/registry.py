"""Knows which backends there are: a table of the built-in ones, and the entry points of installed ones.

A new kind of hardware is a file beside `stub.py`, the smallest of them, and a row here; `base.py` says what it must do.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

import msgspec

from backends.base import Attribute, Backend

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

ENTRY_POINT_GROUP: Final = "fairlead.backends"

_BUILT_IN: Final = {
    "cex": "backends.cex:Cex",
    "chardev": "backends.chardev:CharDev",
    "gpu": "backends.gpu:Gpu",
    "infiniband": "backends.infiniband:InfiniBand",
    "mdev": "backends.mdev:Mdev",
    "solarflare": "backends.solarflare:Solarflare",
    "sriov": "backends.sriov:Sriov",
    "stub": "backends.stub:Stub",
    "vfio": "backends.vfio:Vfio",
}


class UnknownBackendError(LookupError):
    """No backend of that name is built in or installed."""


class BrokenBackendError(Exception):
    """The backend is installed but cannot be used."""


def names() -> list[str]:
    """The names of all backends; none is imported."""
    return sorted({*_BUILT_IN, *(point.name for point in _installed())})


def load(name: str) -> type[Backend[Any]]:
    """The backend's class; an installed one cannot shadow a built-in.

    Raises:
        UnknownBackendError: there is none of that name.
        BrokenBackendError: its code cannot be imported, is no backend, or lacks what every backend must have.
    """
    if (target := _BUILT_IN.get(name)) is not None:
        module, _, attribute = target.partition(":")
        built_in: type[Backend[Any]] = getattr(import_module(module), attribute)
        return built_in
    for point in _installed().select(name=name):
        try:
            found = point.load()
        except Exception as error:
            raise BrokenBackendError(f"backend {name!r} ({point.value}) cannot be imported: {error!r}") from error
        if (fault := _fault(found)) is not None:
            raise BrokenBackendError(f"backend {name!r} ({point.value}) {fault}")
        backend: type[Backend[Any]] = found
        return backend
    raise UnknownBackendError(name)


def _installed() -> EntryPoints:
    from importlib.metadata import entry_points  # noqa: PLC0415  # a twentieth of a start without any

    return entry_points(group=ENTRY_POINT_GROUP)


def _fault(found: Any) -> str | None:
    """Why this is no backend; None if it is one."""
    if not (isinstance(found, type) and issubclass(found, Backend)):
        return "is not a subclass of backends.base.Backend"
    if inspect.isabstract(found):
        return f"must be finished: it has no {', '.join(sorted(found.__abstractmethods__))}"
    options = getattr(found, "options_type", None)
    if not (isinstance(options, type) and issubclass(options, msgspec.Struct)):
        return "has no options_type: the msgspec.Struct that its keys in a configuration are read into"
    told: Any = found.attributes
    if told is not None and not (
        isinstance(told, Mapping) and all(type(key) is str and type(value) is Attribute for key, value in told.items())
    ):
        return "has attributes that are not what they must be: names, each with a backends.base.Attribute"
    return None
