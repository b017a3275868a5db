"""Notices a kubelet that has started, by its registration socket, and registers there."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Final

import anyio
import structlog
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.kubelet import wire
from agent.kubelet.client import Channel
from agent.runtime.errors import words
from agent.runtime.problems import Problems

API_VERSION: Final = "v1beta1"  # the only one a kubelet accepts (A1)

_REGISTER: Final = "/v1beta1.Registration/Register"
_REGISTER_DEADLINE: Final = 30.0  # seconds; it is passed on to the dial-back, which may take 10 (A1)
_AT_ONCE: Final = 16  # concurrent registrations; each has the kubelet dial back to us
_LINK: Final = "It is a symbolic link, which no kubelet makes, and is not followed; remove it"
_WORTH_SAYING: Final = 0.25  # seconds; a kubelet that does not answer for less is just starting

log = structlog.get_logger()


class RegistrationError(Exception):
    """This registration did not work; the sentence says why."""


class UnreachableError(RegistrationError):
    """No process answers on the kubelet's socket."""

    def __init__(self, sentence: str, *, is_unasked: bool) -> None:
        super().__init__(sentence)
        self.is_unasked = is_unasked
        """No process listened, so the kubelet knows nothing of this registration."""


class Kubelet:
    """The kubelet's registration socket: notices a new one, and registers there."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.generation = 0
        """Counts the sockets that we saw appear."""
        self._identity: tuple[int, ...] | None = None
        self._appeared = asyncio.Event()
        self._attempts: set[anyio.CancelScope] = set()
        self._channel: Channel | None = None
        self._users: Counter[Channel] = Counter()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._silent = Problems().trouble(
            "", f"it does not answer on {socket}", "kubelet-silent", socket=str(socket), then="trying again until it does"
        )  # fmt: skip
        self._silent_since: float | None = None

    @property
    def complaint(self) -> str:
        """Why it does not answer, if it was asked and has not for a while."""
        return self._silent.reason

    def look(self) -> None:
        """Look whether the socket is another one, of a kubelet that has just started.

        A new one may have the old one's inode number (A6), but then it has another time.
        """
        try:
            found = self.socket.lstat()
        except OSError:
            return
        if stat.S_ISLNK(found.st_mode):
            self._refuse_link()
            return
        identity = (found.st_dev, found.st_ino, found.st_ctime_ns)
        if identity == self._identity:
            return
        log.info("kubelet-restarted" if self.generation else "kubelet-found", socket=str(self.socket))
        self._identity = identity
        self.generation += 1
        self._channel = None  # closed by the last who uses it
        self._silent_since = None
        self._silent.healed()
        self._appeared.set()
        self._appeared = asyncio.Event()
        for scope in tuple(self._attempts):
            scope.cancel()

    def _refuse_link(self) -> None:
        """Report a link in the place of the socket, once; the directory may be one, where it lies on another disk."""
        self._identity = None
        self._silent.report_once(_LINK, then="waiting until a kubelet makes its own")

    async def newer_than(self, generation: int) -> None:
        """Wait until a socket newer than this one has appeared."""
        while self.generation <= generation:
            await self._appeared.wait()

    @contextmanager
    def until_restart(self) -> Iterator[None]:
        """Cancel the body when another kubelet starts."""
        with anyio.CancelScope() as scope:
            self._attempts.add(scope)
            try:
                yield
            finally:
                self._attempts.discard(scope)

    async def register(self, resource: str, endpoint: str, options: wire.PluginOptions) -> None:
        """Announce our socket `endpoint` (relative to the plugin directory) as the plugin of `resource`.

        Returns when the kubelet has dialled back and opened ListAndWatch (A1).

        Raises:
            UnreachableError: no process listens.
            RegistrationError: the kubelet refuses.
        """
        if self.socket.is_symlink():
            self._refuse_link()
            raise UnreachableError(f"the kubelet does not answer on {self.socket}: {_LINK}", is_unasked=True)
        request = wire.encode_register(API_VERSION, endpoint, resource, options)
        try:
            async with self._turns, self._connection() as channel:
                await channel.call(_REGISTER, request, wire.EmptyCall, _REGISTER_DEADLINE)
        except GRPCError as error:
            raise RegistrationError(f"the kubelet refused: {error.message or error.status.name}") from None
        except wire.SENSELESS as error:
            raise RegistrationError(f"the kubelet's answer makes no sense: {error}") from None
        except (OSError, StreamTerminatedError, ProtocolError, AttributeError) as error:  # grpclib's: lost when made
            self._note_silence(error)
            sentence = f"the kubelet does not answer on {self.socket}: {words(error)}"
            is_unasked = isinstance(error, ConnectionRefusedError | FileNotFoundError)
            raise UnreachableError(sentence, is_unasked=is_unasked) from None
        self._silent_since = None
        self._silent.healed()

    def _note_silence(self, error: Exception) -> None:
        """Report once, for all resources, that the kubelet does not answer."""
        now = time.monotonic()
        self._silent_since = self._silent_since or now
        if now - self._silent_since >= _WORTH_SAYING and not self.complaint:
            why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else words(error)
            self._silent.report_once(why)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Channel]:
        """One connection to this kubelet for all registrations under way; closed when the last is done."""
        channel = self._channel = self._channel or Channel(str(self.socket))
        self._users[channel] += 1
        try:
            yield channel
        finally:
            self._users[channel] -= 1
            if not self._users[channel]:
                del self._users[channel]
                channel.close()
                if self._channel is channel:
                    self._channel = None
