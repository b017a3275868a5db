"""Sets up this process: descriptors, the C library's heap, Python's threads and garbage collector, and no TLS until it is used.

While descriptors or memory are short no backend is blamed, and connections wait. Of these the log says so once: asyncio tries to
accept them each second, and reports each try of each socket with a traceback.

The modules of TLS are 4 MB, and a daemon without an API server uses none. asyncio and anyio import `ssl` wherever they are
imported themselves: what they then have is the module's place in `sys.modules`; the first use of it loads the module there, so
that what uses TLS notices nothing. So nothing here imports either.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from backends.errors import is_short, not_short

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence
    from importlib.abc import Loader

    from agent.runtime.problems import Problems
else:
    Loader = object  # importlib.abc would load shutil

_PUT_OFF: Final = {
    # for an annotation in anyio.streams.tls; `isinstance` in grpclib.client.Channel and in asyncio's loop.sock_accept
    "ssl": ("SSLContext", "DefaultVerifyPaths", "SSLSocket"),
    "asyncio.sslproto": (),  # it makes a tuple of ssl's errors; asyncio uses it for a connection with TLS alone
}
"""Module → the classes that others ask it for without any TLS; each gets a stand-in."""

AGAIN: Final = 1.0
"""Seconds until the next try to accept a connection, as asyncio has it."""

_ENOUGH: Final = 1 << 20  # descriptors, where the hard limit is none
_SPARE: Final = 4  # descriptors that one look at a unit needs at the same time
_OVER: Final = 60.0  # seconds without a failed try after which the next one is reported again

_THRESHOLDS: Final = (700, 10, 2)
"""The first two are those of Python 3.11 and 3.12; 3.13 begins at 2,000, and the garbage of 200 restarts of a kubelet took 10 MB
instead of 3. The third is 10 there: by then there are 77,000 objects of ended calls, which takes 60 ms; 14,000 take 10 ms."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h
_LARGE: Final = 512 << 10
"""Bytes from which on a piece of memory is the kernel's own (mallopt(3)). asyncio takes 256 KiB each time that it receives: from
the kernel, or from a heap that gives them back each time, that takes 15 us more."""

_HELD_AT_MOST: Final = 0.0005
"""Seconds (sys.setswitchinterval); Python's own are 5 ms."""

ENOUGH: Final = 1000
"""New devices after which they are hidden from the collector: walking over all that belongs to them takes 10 ms."""


# --- files that are read ---


def raise_limits() -> None:
    """Allow this process as many open files as it may have; systemd's and shells' default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def see_that_files_open() -> None:
    """Check that this process can open files: what was read while it could not is not to be believed.

    Raises:
        ShortageError: it cannot.
    """
    spare: list[int] = []
    try:
        spare.extend(os.open("/", os.O_PATH | os.O_CLOEXEC) for _ in range(_SPARE))
    except OSError as error:
        not_short(error)
    finally:
        for file in spare:
            os.close(file)


# --- connections ---


class Shortage:
    """Reports that connections wait."""

    def __init__(self, problems: Problems) -> None:
        self._waiting = problems.trouble(
            "connections", "connections to a socket of Fairlead wait", "connections-wait", level="error", fades=_OVER,
            then="trying again every second",
        )  # fmt: skip

    def tell(self, error: BaseException) -> None:
        """Report that a connection could not be accepted."""
        self._waiting.report_once((isinstance(error, OSError) and error.strerror) or str(error))

    def handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception handler for the event loop."""
        error = context.get("exception")
        if error is not None and is_short(error) and "socket" in context:
            self.tell(error)
        elif not _is_over(context):
            loop.default_exception_handler(context)


def _is_over(context: Mapping[str, Any]) -> bool:
    """Whether asyncio tried again to accept connections at a socket that was closed meanwhile.

    `_accept_connection` of asyncio's selector_events plans as many tries as connections may wait (bpo-27906), and a
    server that closes takes none of them back.
    """
    callback = getattr(context.get("handle"), "_callback", None)
    return getattr(callback, "__name__", "") == "_start_serving" and isinstance(context.get("exception"), ValueError)


# --- memory ---


def switch_threads_often() -> None:
    """Have a thread that works give the interpreter away half a millisecond after the event loop wants it, not 5 ms after.

    An Allocate wants it three times. While uevents have 100 devices read, 10,000 a second, it takes 4.4 ms, or then 6.0.
    """
    sys.setswitchinterval(_HELD_AT_MOST)


def use_one_heap() -> None:
    """Have glibc take the memory of all threads from one heap, and give back what is large as soon as it is free.

    It has a heap for each thread, up to eight a CPU, though the interpreter lets one thread run at a time; and once a large
    piece was freed, others as large come from the heap, where a small one above them keeps them (malloc/malloc.c,
    `mp_.no_dyn_threshold`). After 3,000 steps of the soak that was 2 of 61 MB. Other C libraries have neither.
    """
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, _LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE)


def put_off_collecting() -> None:
    """Collect nothing until `settle`: what imports make stays, and walking over it takes a tenth of the start."""
    gc.disable()


def settle() -> None:
    """Hide all objects that exist now from the collector: walking over 50,000 of them stops the loop for 20 ms.

    It is called once everything exists that lives as long as the process.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(*_THRESHOLDS)


def hide() -> None:
    """Hide all objects that exist now from the collector; garbage is collected before."""
    gc.collect()
    gc.freeze()


class Pile:
    """Counts new devices, and hides each thousand of them from the collector: with 10,000 a walk takes 100 ms.

    Hidden objects are freed all the same once nothing refers to them, but for cycles. Devices have none. A connection of
    the kubelet's has, and stays in memory if it is open when the thousand is full: where few devices come and go all the
    time, the process would grow by 1 MB a minute. So devices that go count, too. Objects are not counted:
    `gc.get_objects` in a thread breaks a tuple that another thread is making (SystemError, "bad argument to internal
    function").
    """

    def __init__(self) -> None:
        self._new = 0

    def grow(self, devices: int) -> None:
        """Count so many devices more; fewer, if negative."""
        self._new = max(0, self._new + devices)
        if self._new >= ENOUGH:
            self._new = 0
            hide()


# --- modules ---


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
