"""Puts off the modules of TLS until something uses them: they are 4 MB, and a daemon without an API server uses none.

asyncio and anyio import `ssl` wherever they are imported themselves. What they then have is the module's place in
`sys.modules`; the first use of it loads the module there, so that whoever uses TLS notices nothing.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc would load shutil

_PUT_OFF: Final = {
    # for an annotation in anyio.streams.tls; `isinstance` in grpclib.client.Channel and in asyncio's loop.sock_accept
    "ssl": ("SSLContext", "DefaultVerifyPaths", "SSLSocket"),
    "asyncio.sslproto": (),  # it makes a tuple of ssl's errors; asyncio uses it for a connection with TLS alone
}
"""Module → the classes that others ask it for without any TLS; each gets a stand-in."""


def put_off_tls() -> None:
    """Load these modules at their first use, where nothing has imported them yet."""
    if not _PUT_OFF.keys() & sys.modules.keys():
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds what is put off as Python does, with a loader that waits."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target) if fullname in _PUT_OFF else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


class _Later(Loader):
    """Makes a module that is loaded once an attribute is asked for that it lacks."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._lock, self._is_loaded = loader, RLock(), False
        self._is_loading = False

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing yet."""

    def load(self, module: ModuleType) -> None:
        with self._lock:  # another thread waits until the module is whole
            if self._is_loading or self._is_loaded:
                return
            self._is_loading = True
            try:
                self._loader.exec_module(module)
            finally:
                self._is_loading = False
            assert module.__spec__ is not None
            module.__spec__.loader = module.__loader__ = self._loader
            module.__class__, self._is_loaded = ModuleType, True


class _Module(ModuleType):
    """What is put off. Only names that a module has before it is loaded, as `__spec__`, are there."""

    def __getattr__(self, name: str) -> Any:
        if name in _PUT_OFF[self.__name__]:
            return _StandIn(self, name)
        if not name.startswith("__"):  # importlib asks for `__file__` before it sets it
            _load(self)
        return ModuleType.__getattribute__(self, name)


def _load(module: ModuleType) -> None:
    if module.__spec__ is not None and isinstance(later := module.__spec__.loader, _Later):
        later.load(module)


class _StandIn:
    """A class of a module that is put off: to call it, to ask it, or to make a subclass of it loads the module."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._module, self._name = module, name

    def _class(self) -> Any:
        _load(self._module)
        return vars(self._module)[self._name]

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._class()(*arguments, **more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._class(), name)

    def __instancecheck__(self, instance: object) -> bool:
        made = vars(self._module).get(self._name)  # of a class that is not loaded nothing can be
        return made is not None and isinstance(instance, made)

    def __subclasscheck__(self, subclass: type) -> bool:
        made = vars(self._module).get(self._name)
        return made is not None and issubclass(subclass, made)

    def __mro_entries__(self, _bases: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._class(),)
