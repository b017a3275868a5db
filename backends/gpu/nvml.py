"""Asks NVIDIA's management library (NVML) for MIG devices, NVLinks, memory, drained GPUs and events.

It is optional: the Python package nvidia-ml-py (module `pynvml`, extra `nvidia`) and the driver's libnvidia-ml.so.1,
which this process must be able to see. It is never loaded here: `nvml_process` asks it in a process that ends with the
answer. An open library takes 20 MB and keeps the driver in use, and it may crash, or hang in the driver. A survey is kept
until the driver's entries in /proc change.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from msgspec import Struct, field

from backends.base import Heard, Host, HostPath, Link
from backends.errors import not_short, reason_of
from backends.gpu import nvidia_procfs as procfs
from backends.gpu import nvml_process

INSTALL: Final = (
    "install the Python package nvidia-ml-py where Fairlead is, and let Fairlead see the driver's libnvidia-ml.so.1"
)
_UPGRADED: Final = (
    "the driver in the kernel is of another version than its libraries, as after an upgrade without a reboot, and no new "
    "container can use a GPU: reboot, or unload and load the driver's modules"
)

SOURCES: Final = ("nvml", "nvml-ecc")
"""Of its records: XIDs, and double-bit ECC errors, of which it tells an XID too."""

_NAME: Final = "libnvidia-ml.so.1"
_ROOTS: Final = (HostPath("/"), HostPath("/run/nvidia/driver"), HostPath("/home/kubernetes/bin/nvidia"))
"""Where a host's package, the GPU operator's driver container and GKE's installer on COS put the driver."""
_DIRECTORIES: Final = (f"usr/lib/{platform.machine()}-linux-gnu", "usr/lib64", "usr/lib", "lib64")

_SCRIPT: Final = nvml_process.__file__
_OPENS_WITHIN: Final = 10.0  # seconds; it starts no GPU
_ANSWERS_WITHIN: Final = 60.0  # seconds; without nvidia-persistenced each GPU of a node may take 2 s to start
_ENDS_WITHIN: Final = 1.0  # seconds for a process that was killed; one that hangs in the driver takes for ever
_SILENCE: Final = 15.0  # seconds without a sign of life from who hears events; each second has one
_OTHER_VERSION: Final = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH in nvml.h

_asking: Final = threading.Lock()  # one process at a time: of two that ask at once the second gets what the first hears
_hangs: Final = threading.Event()
_PATIENCE: Final = 2.0  # seconds that a scan waits for the survey of another; after that, no scan waits for it any more
_KEPT_FOR: Final = (
    10.0  # seconds between two questions about what sends no event: a drained GPU, a new library, a failure
)
_undead: Final[list[subprocess.Popen[bytes]]] = []
"""Processes that were killed and have not ended: they hang in the driver. While there is one, no other is started."""

_NOT_THERE: Final = f"NVIDIA's management library is not there; {INSTALL}"
_NO_ANSWER: Final = "NVIDIA's management library (NVML) does not answer"

_T = TypeVar("_T")


class NvmlError(Exception):
    """The library cannot be used; one sentence says why."""


class UnansweredError(Exception):
    """The library is busy with another question, for too long. Unlike an `NvmlError` it tells nothing: what is known stays."""


class MigDevice(Struct, frozen=True):
    """A MIG device as the library knows it."""

    uuid: str
    """`MIG-…`"""
    index: int
    profile: str | None
    """`1g.5gb`; `+me` and the like belong to it."""
    memory: int | None = None
    """Its own, in bytes."""


class Gpu(Struct, frozen=True):
    """A GPU as the library knows it."""

    uuid: str
    mig_mode: bool = False
    mig: Mapping[tuple[int, int], MigDevice] = field(default_factory=dict)
    """By the numbers of GPU instance and compute instance."""
    memory: int | None = None
    """All of it, in bytes."""
    told: Mapping[str, str] = field(default_factory=dict)
    """Further attributes of it and of its driver, as far as they are known."""


class Survey(Struct, frozen=True):
    """The answers of the library to all that we ask, at one time."""

    gpus: Mapping[str, Gpu]
    """By PCI address."""
    links: tuple[Link, ...]


def is_there(host: Host, roots: Sequence[HostPath]) -> bool:
    """Whether the Python package and the library are installed. `roots` are further places of a driver."""
    return _is_installed() and _library(host, roots) is not None


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("pynvml") is not None


def _library(host: Host, roots: Sequence[HostPath]) -> str | None:
    """The first library there is: this process's own, as a container's runtime mounts it, before the host's."""
    return _found(host, tuple(roots), int(time.monotonic() // _KEPT_FOR))


@functools.lru_cache(maxsize=4)
def _found(host: Host, roots: Sequence[HostPath], _moment: int) -> str | None:
    return next(filter(os.path.exists, _candidates(host, roots)), None)


def _candidates(host: Host, roots: Sequence[HostPath]) -> tuple[str, ...]:
    named = [Path(one) for one in os.environ.get("LD_LIBRARY_PATH", "").split(":") if one]
    below = [Path("/"), *(host.local(root) for root in (*roots, *_ROOTS))]
    directories = [*named, *(root / name for root in below for name in _DIRECTORIES)]
    return tuple(dict.fromkeys(os.fspath(directory / _NAME) for directory in directories))


def survey(host: Host, roots: Sequence[HostPath]) -> Survey:
    """What the library says; it is asked again only after what the driver shows in /proc has changed.

    Raises:
        NvmlError: it cannot be used.
        UnansweredError: another question takes it too long.
    """
    path = _library(host, roots)
    return _kept(("survey", path, procfs.stamp(host)), lambda: _surveyed(_answer(path, "survey")))


def drained(host: Host, roots: Sequence[HostPath]) -> frozenset[str]:
    """The addresses of the GPUs that `nvidia-smi drain` has taken out of use. The question starts no GPU.

    While another question takes long, it is what was known last.

    Raises:
        NvmlError: it cannot be asked.
        UnansweredError: it never was, and another question takes too long.
    """
    path, addresses = _library(host, roots), procfs.addresses(host)
    moment = int(time.monotonic() // _KEPT_FOR)
    try:
        return _kept(
            ("drained", path, *addresses, moment),
            lambda: frozenset(cast("list[str]", _answer(path, "drained", *addresses))),
        )
    except UnansweredError:
        last = next((it for key, (_, it) in list(_answers.items()) if key[:2] == ("drained", path)), None)
        if not isinstance(last, frozenset):
            raise
        return last


def listen(host: Host, roots: Sequence[HostPath], addresses: Sequence[str]) -> Iterator[Heard | None]:
    """Yield each XID and double-bit ECC error of these GPUs that NVML tells; None each second.

    The driver cannot be unloaded, nor a GPU be unbound, until the generator is closed.

    Raises:
        NvmlError: the library cannot be used, hangs, or none of these GPUs has events.
    """
    with _Process(_library(host, roots), "events", *addresses) as process:
        process.opened()
        deaf = ""
        while True:
            said = process.line(_SILENCE, f"the events of {_NO_ANSWER}")
            if said.get("deaf"):
                deaf = "; ".join(f"{address}: {why}" for address, why in sorted(said["deaf"].items()))
            if said.get("registered") == []:
                raise NvmlError(f"no GPU tells NVIDIA's management library (NVML) of errors: {deaf}")
            yield _heard(said) if "xid" in said else None


def _heard(said: Mapping[str, Any]) -> Heard:
    properties = {"address": str(said["address"]), "xid": str(int(said["xid"]))}
    if said["gi"] is not None:
        properties["gi"] = str(int(said["gi"]))
    return Heard(SOURCES[said["ecc"]], f"XID {said['xid']} of {said['address']}", properties)


# --- what is kept of answers ---

_answers: Final[dict[tuple[object, ...], tuple[float, Any]]] = {}
"""Question, library and what else the answer depends on → when it came, and the answer."""


def _kept(key: tuple[object, ...], ask: Callable[[], _T]) -> _T:
    """The answer that is kept under this key, else a new one. A failure is kept too, for `_KEPT_FOR`.

    Raises:
        NvmlError: as `ask` raises it.
        UnansweredError: another thread has asked, and gets no answer for so long.
    """
    if (answer := _known(key)) is None:
        if not _asking.acquire(timeout=0.0 if _hangs.is_set() else _PATIENCE):
            _hangs.set()
            raise UnansweredError(_NO_ANSWER)
        try:
            if (answer := _known(key)) is None:
                try:
                    answer = ask()
                except NvmlError as error:
                    answer = error
                for old in [it for it in _answers if it[:2] == key[:2]]:  # of each question its last answer
                    del _answers[old]
                _answers[key] = time.monotonic(), answer
        finally:
            _hangs.clear()
            _asking.release()
    if isinstance(answer, NvmlError):
        raise NvmlError(str(answer))
    return cast("_T", answer)


def _known(key: tuple[object, ...]) -> Any:
    since, answer = _answers.get(key, (0.0, None))
    return None if isinstance(answer, NvmlError) and time.monotonic() - since >= _KEPT_FOR else answer


def _surveyed(said: Any) -> Survey:
    gpus = {}
    for address, it in said["gpus"].items():
        parts = {
            (one["gi"], one["ci"]): MigDevice(one["uuid"], one["index"], one["profile"], one.get("memory"))
            for one in it.get("mig", ())
        }
        gpus[address] = Gpu(it["uuid"], it.get("mig_mode", False), parts, it.get("memory"), it.get("told", {}))
    return Survey(gpus, tuple(Link(**link) for link in said["links"]))


# --- the process that asks ---


def _answer(path: str | None, question: str, *addresses: str) -> Any:
    """What the library at this path answers to a question of `nvml_process`.

    Raises:
        NvmlError: it cannot be used.
    """
    with _Process(path, question, *addresses) as process:
        process.opened()
        return process.line(_ANSWERS_WITHIN, _NO_ANSWER)


class _Process:
    """A process that asks the library one question; it is killed where the body ends."""

    def __init__(self, path: str | None, question: str, *addresses: str) -> None:
        if path is None or not _is_installed():
            raise NvmlError(_NOT_THERE)
        _undead[:] = [it for it in _undead if it.poll() is None]
        if _undead:
            raise NvmlError(f"{_NO_ANSWER}: process {_undead[0].pid} hangs in the driver")
        self._path = path
        self._read = b""
        command = [sys.executable, "-I", _SCRIPT, path, question, *addresses]
        try:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            why = reason_of(not_short(error))  # want of descriptors or processes tells nothing of the library
            raise NvmlError(f"{_NO_ANSWER}: no process can be started for it: {why}") from error

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdout is not None
        self._process.kill()
        self._process.stdout.close()
        try:
            self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            _undead.append(self._process)

    def opened(self) -> None:
        """Wait until the library is open.

        Raises:
            NvmlError: it cannot be opened.
        """
        self.line(_OPENS_WITHIN, f"{self._path} hangs when it is loaded", "when it is loaded")

    def line(self, within: float, hangs: str, when: str = "when it is asked") -> Any:
        """The next document that the process writes.

        Raises:
            NvmlError: there is none, or it tells of a failure; `hangs` says that none came within so many seconds.
        """
        assert self._process.stdout is not None
        out, until = self._process.stdout.fileno(), time.monotonic() + within
        while b"\n" not in self._read:
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise NvmlError(hangs)
            if not (data := os.read(out, 1 << 16)):
                raise NvmlError(self._ended(when))
            self._read += data
        written, _, self._read = self._read.partition(b"\n")
        said = json.loads(written)
        if isinstance(said, dict) and (why := failure(self._path, said)):
            raise NvmlError(why)
        return said

    def _ended(self, when: str) -> str:
        try:
            code = self._process.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            return _NO_ANSWER
        return f"{self._path} crashes (signal {-code}) {when}" if code < 0 else f"{_NO_ANSWER}: exit code {code}"


def failure(path: str, said: Mapping[str, Any]) -> str:
    """What a document of the process says does not work; empty if it is an answer."""
    if said.get("missing"):
        return _NOT_THERE
    if "unloadable" in said:
        return f"{path} cannot be loaded: {said['unloadable']}"
    if "error" in said:
        is_upgraded = said["code"] == _OTHER_VERSION
        return _UPGRADED if is_upgraded else f"NVIDIA's management library (NVML) fails: {said['error']}"
    return ""
