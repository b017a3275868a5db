"""Sets up logging: readable lines on a terminal, JSON lines anywhere else, with their priorities in the journal.

All of it goes to stderr; docs/events.md lists every event.

Import this before anything else that imports structlog: structlog imports rich wherever rich is installed,
for tracebacks that the daemon never prints. Without rich it starts 28 ms sooner and is 4 MB smaller.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partialmethod
from typing import Any, Final, Literal, TextIO

import msgspec

from backends.printable import printable_lines


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

_PRIORITIES: Final[Mapping[str, int]] = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
"""What syslog(3), and with it the journal, calls our levels (sd-daemon(3): a line may start with `<N>`)."""

_NUMBERS: Final[Mapping[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def set_up(
    level: Level = "info",
    stream: TextIO | None = None,
    environment: Mapping[str, str] = os.environ,
    note: Callable[[Mapping[str, Any]], None] | None = None,
) -> None:
    """Log from `level` upwards to the stream (stderr), in colour where it is a terminal and NO_COLOR is unset.

    Lines bear their priorities where systemd says that the stream is its journal's (JOURNAL_STREAM).

    `note` is told of every line from `info` upwards, whatever the level.
    """
    stream = stream or sys.stderr
    output = _Journal(stream) if _is_journal(stream, environment) else _Output(stream)
    last: list[Any]
    if stream.isatty():
        colors = not environment.get("NO_COLOR")
        last = [
            _escaped,
            structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
        ]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_json)]
    structlog.configure(
        processors=[
            *([_Noting(note, _NUMBERS[level])] if note else []),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            min(_NUMBERS[level], logging.INFO) if note else _NUMBERS[level]
        ),
        logger_factory=lambda *_: output,
        cache_logger_on_first_use=True,
    )
    # hpack and h2 write a line per header at debug level, grpclib one for each ended stream at info
    logging.basicConfig(handlers=[_Foreign()], level=max(logging.WARNING, _NUMBERS[level]), force=True)


class _Noting:
    """Tells somebody of a line before it is written, or not written."""

    def __init__(self, note: Callable[[Mapping[str, Any]], None], level: int) -> None:
        self._note = note
        self._level = level

    def __call__(self, _logger: object, name: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
        number = _NUMBERS.get(name, logging.ERROR)  # "critical", "exception"
        if number >= logging.INFO:
            self._note(line)
        if number < self._level:
            raise structlog.DropEvent
        return line


def _escaped(_logger: object, _name: str, line: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """For a terminal, on which what devices are called is to do nothing."""
    return {key: _printable(value) for key, value in line.items()}


def _printable(value: object) -> object:
    if isinstance(value, str):
        return printable_lines(value)
    return [_printable(one) for one in value] if isinstance(value, list | tuple) else value


def _json(event: dict[str, Any], **_: Any) -> bytes:
    try:
        return msgspec.json.encode(event, enc_hook=str)
    except UnicodeEncodeError:  # a file name, in some error, that is no text
        return json.dumps(event, default=str).encode()


class _Output:
    """Writes each line at once; logging is no reason to fail."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def msg(self, line: bytes | str) -> None:
        text = line if isinstance(line, str) else line.decode()
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass  # full disk, closed pipe, closed stream: there is nobody left to tell

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


def _is_journal(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Is it the one that systemd made for us, and has nobody redirected it (systemd.exec(5))?"""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return False
    return environment.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


class _Foreign(logging.Handler):
    """Passes what grpclib and asyncio log through stdlib on to ours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except (TypeError, ValueError) as error:  # its arguments do not fit its text
            message = f"{record.msg} ({error})"
        structlog.get_logger().log(record.levelno, message, logger=record.name, exc_info=record.exc_info)
