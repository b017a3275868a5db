"""Sets up logging: readable lines on a terminal, JSON lines anywhere else, with their priorities in the journal.

All of it goes to stderr; docs/events.md lists every event. The daemon's lines are written in a thread (`QueuedLines`): a pipe that
is not read blocks its writer once it is full, and journald hangs while its disk does.

Import this before anything else that imports structlog: structlog imports rich wherever rich is installed,
for tracebacks that the daemon never prints. Without rich it starts 28 ms sooner and is 4 MB smaller.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partialmethod
from typing import Any, Final, Literal, Protocol, TextIO

import msgspec

from backends.errors import printable_lines


@contextmanager
def _without_rich() -> Iterator[None]:
    if "rich" in sys.modules:
        yield
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # how Python spells "not installed"
    try:
        yield
    finally:
        del sys.modules["rich"]


with _without_rich():
    import structlog

Level = Literal["debug", "info", "warning", "error"]

_Render = Callable[[Any, str, structlog.typing.EventDict], str | bytes]

_PRIORITIES: Final[Mapping[str, int]] = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""What syslog(3), and with it the journal, calls our levels (sd-daemon(3): a line may start with `<N>`)."""

_FIRST: Final = ("event", "level", "timestamp")

_NUMBERS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


LINES: Final = 4096
"""Lines that wait: what 1,000 devices say when they all fail, four times; 1 MB."""

_LAST_WORDS: Final = 1.0  # seconds that the end of the process waits for the lines that are left
_LOOK_AGAIN: Final = 1.0  # seconds between two looks whether a stream that takes nothing takes something


class Stream(Protocol):
    """Where lines go."""

    def write(self, text: str, /) -> int:
        """Add this."""

    def flush(self) -> None:
        """Have it written."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""

    def fileno(self) -> int:
        """Its descriptor."""


def set_up(
    level: Level = "info",
    stream: Stream | None = None,
    environment: Mapping[str, str] = os.environ,
    note: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Log from `level` upwards to the stream (stderr), in colour where it is a terminal and NO_COLOR is unset.

    Lines bear their priorities where systemd says that the stream is its journal's (JOURNAL_STREAM).

    `note` is told of every line from `info` upwards, whatever the level.

    No call of a logger raises: a line with a field that cannot be shown is written with what can be.
    """
    stream = stream or sys.stderr
    output = _Journal(stream) if _is_journal(stream, environment) else _Output(stream)
    render = _for_a_terminal(colors=not environment.get("NO_COLOR")) if stream.isatty() else _as_json
    structlog.configure(
        processors=[
            *([_Noting(note, _NUMBERS[level])] if note else []),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _as_far_as_possible(render),
        ],
        wrapper_class=_unfailing(min(_NUMBERS[level], logging.INFO) if note else _NUMBERS[level]),
        logger_factory=lambda *_: output,
        cache_logger_on_first_use=True,
    )
    # hpack and h2 write a line per header at debug level, grpclib one for each ended stream at info
    logging.basicConfig(handlers=[_Foreign()], level=max(logging.WARNING, _NUMBERS[level]), force=True)


class _Noting:
    """Calls `note` for each line, and drops those below the level."""

    def __init__(self, note: Callable[[Mapping[str, Any]], None], level: int) -> None:
        self._note = note
        self._level = level

    def __call__(self, _logger: object, name: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        number = _NUMBERS.get(name, logging.ERROR)  # "critical", "exception"
        if number >= logging.INFO:
            try:
                self._note(line)
            except Exception:  # noqa: BLE001  # a line that cannot be kept can still be written
                with suppress(Exception):
                    self._note(_plain(line))
        if number < self._level:
            raise structlog.DropEvent
        return line


def _for_a_terminal(*, colors: bool) -> _Render:
    """Makes readable lines; what devices are called does nothing to the terminal."""
    render = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=_escaped_traceback)
    return lambda logger, name, line: render(logger, name, {key: _printable(it) for key, it in line.items()})


def _escaped_traceback(output: TextIO, error: Any) -> None:
    lines = io.StringIO()
    structlog.dev.plain_traceback(lines, error)
    output.write(printable_lines(lines.getvalue()))


def _printable(value: object) -> object:
    if isinstance(value, str):
        return printable_lines(value)
    return [_printable(one) for one in value] if isinstance(value, list | tuple) else value


def _unfailing(level: int) -> type[structlog.typing.FilteringBoundLogger]:
    """Loggers whose calls never raise: no work may fail because it is logged."""
    filtering: Any = structlog.make_filtering_bound_logger(level)

    def proxy_to_logger(self: Any, name: str, event: str | None = None, **fields: Any) -> Any:
        with suppress(Exception):
            return filtering._proxy_to_logger(self, name, event, **fields)

    unfailing: type[structlog.typing.FilteringBoundLogger] = type(
        "UnfailingLogger", (filtering,), {"_proxy_to_logger": proxy_to_logger}
    )
    return unfailing


def _as_far_as_possible(render: _Render) -> _Render:
    """The same, with what a person looks for first before all else, without what is empty; of what can be shown, if that fails."""

    def rendered(logger: Any, name: str, line: structlog.typing.EventDict) -> str | bytes:
        first = {name: line[name] for name in _FIRST if name in line}
        line = first | {name: value for name, value in line.items() if type(value) is not str or value}
        try:
            return render(logger, name, line)
        except Exception:  # noqa: BLE001  # whatever a field does when it is shown
            return render(logger, name, _plain(line))

    return rendered


def _plain(line: Mapping[str, Any]) -> dict[str, Any]:
    """The same line in text and numbers."""
    return {str(name): _shown(value) for name, value in line.items() if name != "exc_info"}


def _shown(value: Any) -> Any:
    if value is None or (isinstance(value, int) and value.bit_length() < 64) or isinstance(value, str):
        return value
    try:
        return repr(value)
    except Exception:  # noqa: BLE001  # a backend's object may raise anything
        return f"<{type(value).__name__} that cannot be shown>"


def _as_json(logger: Any, name: str, line: structlog.typing.EventDict) -> bytes:
    line = structlog.processors.format_exc_info(logger, name, line)
    try:
        return msgspec.json.encode(line, enc_hook=str)
    except (UnicodeEncodeError, OverflowError):  # a file name, in some error, that is no text; a number beyond 64 bits
        return json.dumps(line, default=str).encode()


class _Output:
    """Writes each line at once; logging is no reason to fail."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def msg(self, line: bytes | str) -> None:
        text = line if isinstance(line, str) else line.decode()
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # full disk, closed pipe, closed stream: there is no other place to report it

    debug = info = warning = error = critical = exception = msg


class _Journal(_Output):
    """Puts each line's priority before it."""

    def _prefixed(self, line: bytes | str, level: str) -> None:
        text = line if isinstance(line, str) else line.decode()
        self.msg(f"<{_PRIORITIES[level]}>{text}")

    debug = partialmethod(_prefixed, level="debug")
    info = partialmethod(_prefixed, level="info")
    warning = partialmethod(_prefixed, level="warning")
    error = partialmethod(_prefixed, level="error")
    critical = partialmethod(_prefixed, level="critical")


def _is_journal(stream: Stream, environment: Mapping[str, str]) -> bool:
    """Whether this stream is the one that systemd connected to its journal (systemd.exec(5))."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class QueuedLines:
    """A text stream, as far as a log needs one: adding a line never waits and never fails.

    At most `LINES` wait here; lines beyond are lost and counted, and their number is logged once there is room again.
    """

    def __init__(self, file: int, limit: int = LINES) -> None:
        """Write to this descriptor; `limit` lines may wait."""
        self._file = file
        self._limit = limit
        self._lines: deque[str] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._busy = False
        self._untold = 0
        self.lost = 0
        """Lines that were lost, in all."""
        self.when_room: Callable[[int], None] = lambda _lost: None
        """Called by the thread with the number of lines lost since it was called last, once there is room again."""

    def write(self, text: str) -> int:
        """Add a line; it is lost where too many wait."""
        with self._changed:
            if len(self._lines) >= self._limit or (self._thread is None and not self._start()):
                self.lost += 1
                self._untold += 1
            else:
                self._lines.append(text)
                self._changed.notify()
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes each line at once."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._file)

    def fileno(self) -> int:
        """The descriptor."""
        return self._file

    def close(self, patience: float = _LAST_WORDS) -> None:
        """Wait for the lines that are left, for so many seconds."""
        end = time.monotonic() + patience
        with self._changed:
            while (self._lines or self._busy) and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)

    def _start(self) -> bool:
        """Start the thread that writes; False if the system has none to give now, and perhaps has one for the next line."""
        thread = threading.Thread(target=self._serve, name="log", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                while not self._lines:
                    self._changed.wait()
                text = self._lines.popleft()
                self._busy = True
                lost = self._untold if len(self._lines) * 2 < self._limit else 0
                self._untold -= lost
            self._write(text.encode(errors="replace"))
            if lost:
                self.when_room(lost)

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._file, data) :]
            except BlockingIOError:  # another process that shares the stream made it non-blocking
                select.select([], [self._file], [], _LOOK_AGAIN)
            except OSError:
                self.lost += 1  # a full disk, a closed pipe: there is no other place to report it
                return


class _Foreign(logging.Handler):
    """Passes what grpclib and asyncio log through stdlib on to ours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as error:  # noqa: BLE001  # its arguments do not fit its text, or cannot be shown
            message = f"{record.msg} ({type(error).__name__} in its arguments)"
        level = max((it for it in _NUMBERS.values() if it <= record.levelno), default=logging.DEBUG)
        structlog.get_logger().log(level, message, logger=record.name, exc_info=record.exc_info)
