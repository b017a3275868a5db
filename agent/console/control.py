"""What may be asked of the daemon, which `agent/daemon/control.py` answers; how the admin socket carries it; and who asks there.

Commands and daemon may be of different versions: fields that are not known are left out, those that are missing have
their defaults.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import msgspec
from grpclib.client import Channel, UnaryStreamMethod, UnaryUnaryMethod
from grpclib.const import Status as Code
from grpclib.encoding.base import CodecBase
from grpclib.exceptions import GRPCError, ProtocolError, StreamTerminatedError

from agent.console.views import Drained, Event, Explanation, HandedOver, Histories, History, Reloaded, Status, Undrained
from agent.runtime.errors import ExitCode, FairleadError
from backends.interface.decoding import decoded


class NoSuchDeviceError(LookupError):
    """No device has that name; the sentence says which one has a similar one."""


class RefusedError(Exception):
    """The daemon cannot do that as things are; the sentence says why."""


class Control(Protocol):
    """The daemon, for a person; every method is called on its event loop."""

    async def status(self) -> Status:
        """Everything there is to see."""

    def watch(self, last: int, *, follow: bool) -> AsyncGenerator[Event, None]:
        """The newest `last` events kept, then, to follow, every one as it happens; who does not keep up misses some."""

    async def explain(self, device: str) -> Explanation:
        """All that is known of a device, named by ID, key, address or hardware.

        Raises:
            NoSuchDeviceError: there is none.
        """

    async def history(self, device: str) -> History:
        """How a device was in the last 24 hours, named as to `explain`, or by the key that it had.

        Raises:
            NoSuchDeviceError: there is none.
        """

    async def histories(self) -> Histories:
        """How all devices were."""

    async def drain(self, device: str, reason: str, until: float | None) -> Drained:
        """Offer it to no new pod, until then (seconds since 1970) or until it is undrained; kept over restarts.

        Raises:
            NoSuchDeviceError: there is none.
            RefusedError: the time is past, or a restart would forget it.
        """

    async def undrain(self, device: str) -> Undrained:
        """Back into service: ends its drain, its quarantine, and what waits for an operator.

        Raises:
            NoSuchDeviceError: there is none.
            RefusedError: a restart would forget it.
        """

    async def reload(self) -> Reloaded:
        """Read the configuration again and apply what changed.

        Raises:
            RefusedError: it has mistakes, all of them in the sentence; nothing has changed.
        """

    async def hand_over(self) -> HandedOver:
        """Have another process, of what is installed now, serve the node, and end.

        Raises:
            RefusedError: it cannot, and this one serves on.
        """


# --- the admin socket's protocol: gRPC whose messages are JSON; the answers are those of `views` ---


SERVICE: Final = "/fairlead.admin.v1.Admin/"

_Message = TypeVar("_Message")


class Codec(CodecBase):
    """Has grpclib send and receive structs."""

    __content_subtype__ = "json"

    def encode(self, message: Any, message_type: type[Any]) -> bytes:  # noqa: ARG002  # grpclib's signature
        """The bytes of a message; a status takes 3 ms where it has 10,000 devices."""
        try:
            return msgspec.json.encode(message)
        except UnicodeEncodeError:  # of a file name that is no text
            return json.dumps(msgspec.to_builtins(message), ensure_ascii=False).encode(errors="replace")

    def decode(self, data: bytes, message_type: type[_Message]) -> _Message:
        """The message in these bytes.

        Raises:
            msgspec.DecodeError: they are no such message.
        """
        return decoded(data, message_type)


class EmptyRequest(msgspec.Struct, frozen=True):
    """A request that says nothing: Status, Reload, Handover."""


class DeviceRequest(msgspec.Struct, frozen=True):
    """A request about one device: Explain, History, Undrain."""

    device: str = ""


class WatchRequest(msgspec.Struct, frozen=True):
    """The newest `last` events; then, to follow, every one as it happens."""

    last: int = 0
    follow: bool = False


class DrainRequest(msgspec.Struct, frozen=True):
    """Offer a device to no new pod."""

    device: str = ""
    reason: str = ""
    until: float | None = None


# --- who asks: the commands ---


_Answer = TypeVar("_Answer")

PATIENCE: Final = 10.0
"""Seconds for which an answer is awaited; a reload may look at all hardware."""

_NO_SUCH_METHOD: Final = "Missing content-type header"
"""What grpclib's client makes of its server's UNIMPLEMENTED, which has no content type (`grpclib.server._abort`)."""


class NoDaemonError(FairleadError):
    """No daemon answers."""


class WrongNameError(FairleadError):
    """The daemon knows no such device."""

    exit_code = ExitCode.USAGE


class Client:
    """One connection to the daemon."""

    def __init__(self, socket: Path, patience: float = PATIENCE) -> None:
        """`patience` is how many seconds an answer is awaited."""
        self._socket, self._patience = socket, patience
        self._channel = Channel(path=str(socket), codec=Codec())

    def close(self) -> None:
        """Close it."""
        self._channel.close()

    async def status(self) -> Status:
        """Everything there is to see, now."""
        return await self._ask("Status", EmptyRequest(), Status)

    async def watch(self, last: int, *, follow: bool) -> AsyncIterator[Event]:
        """The newest `last` events, then, to follow, every one as it happens; ends when the daemon does."""
        watch = UnaryStreamMethod(self._channel, f"{SERVICE}Watch", WatchRequest, Event)
        with self._errors():
            async with watch.open() as stream:
                await stream.send_message(WatchRequest(last, follow), end=True)
                async for event in stream:
                    yield event

    async def explain(self, device: str) -> Explanation:
        """All that is known of a device."""
        return await self._ask("Explain", DeviceRequest(device), Explanation)

    async def history(self, device: str) -> History:
        """How a device was in the last 24 hours."""
        return await self._ask("History", DeviceRequest(device), History)

    async def histories(self) -> Histories:
        """How all devices were."""
        return await self._ask("Histories", EmptyRequest(), Histories)

    async def drain(self, device: str, reason: str, until: float | None) -> Drained:
        """Take a device out of service."""
        return await self._ask("Drain", DrainRequest(device, reason, until), Drained)

    async def undrain(self, device: str) -> Undrained:
        """Put a device back into service."""
        return await self._ask("Undrain", DeviceRequest(device), Undrained)

    async def reload(self) -> Reloaded:
        """Have the configuration read again."""
        return await self._ask("Reload", EmptyRequest(), Reloaded)

    async def hand_over(self) -> HandedOver:
        """Have a new process serve the node."""
        return await self._ask("Handover", EmptyRequest(), HandedOver)

    async def _ask(self, name: str, request: msgspec.Struct, answer: type[_Answer]) -> _Answer:
        call = UnaryUnaryMethod(self._channel, SERVICE + name, type(request), answer)
        with self._errors():
            return await call(request, timeout=self._patience)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn what goes wrong into sentences."""
        try:
            yield
        except GRPCError as error:
            if error.message == _NO_SUCH_METHOD:
                raise FairleadError(
                    f"the Fairlead that answers at {self._socket} is older than this command; restart it"
                ) from error
            kind = WrongNameError if error.status is Code.NOT_FOUND else FairleadError
            raise kind(error.message or f"the daemon refused: {error.status.name}") from error
        except msgspec.DecodeError as error:
            raise FairleadError(
                f"the Fairlead that answers at {self._socket} is of another version than this command: {error}"
            ) from error
        except PermissionError as error:
            raise NoDaemonError(f"{self._socket} may be used by root only") from error
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NoDaemonError(
                f"no Fairlead answers at {self._socket}: it does not run, or has another [agent] admin_socket"
            ) from error
        except TimeoutError as error:
            raise NoDaemonError(f"Fairlead did not answer at {self._socket} within {self._patience:g} s") from error
        except (OSError, StreamTerminatedError, ProtocolError, AttributeError) as error:  # the last: lost when made
            raise NoDaemonError(f"the connection to Fairlead at {self._socket} was lost: {error}") from error
