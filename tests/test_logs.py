from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from agent import logs


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Full(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.reset_defaults()
    root.handlers[:] = handlers
    root.setLevel(level)


def _events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_anywhere_but_on_a_terminal_an_event_is_one_json_line() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    structlog.get_logger().info("registered", resource="a.b/kvm", socket=Path("/x"), devices=3)
    (event,) = _events(stream)
    assert event.pop("timestamp").endswith("Z")
    assert event == {"event": "registered", "level": "info", "resource": "a.b/kvm", "socket": "/x", "devices": 3}


def test_what_is_no_text_is_logged_all_the_same() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    structlog.get_logger().info("unreadable", file="/dev/n\udcff", directory=Path("/dev"))
    (event,) = _events(stream)
    assert (event["file"], event["directory"]) == ("/dev/n\udcff", "/dev")


def test_a_traceback_is_part_of_the_line() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    try:
        raise RuntimeError("oh no")
    except RuntimeError:
        structlog.get_logger().exception("the backend raised")
    (event,) = _events(stream)
    assert event["exception"].endswith("RuntimeError: oh no")


def test_on_a_terminal_a_line_is_readable_and_in_colour() -> None:
    stream = _Terminal()
    logs.set_up(stream=stream, environment={})
    structlog.get_logger().info("registered", resource="a.b/kvm")
    assert "\x1b[" in stream.getvalue()
    assert "registered" in stream.getvalue()


def test_no_color_is_honoured() -> None:
    stream = _Terminal()
    logs.set_up(stream=stream, environment={"NO_COLOR": "1"})
    structlog.get_logger().info("registered", resource="a.b/kvm")
    assert "\x1b" not in stream.getvalue()
    assert "resource=a.b/kvm" in stream.getvalue()


def test_what_is_below_the_level_is_left_out() -> None:
    stream = io.StringIO()
    logs.set_up("warning", stream)
    structlog.get_logger().info("quiet")
    logging.getLogger("grpclib.server").info("quiet")
    structlog.get_logger().warning("loud")
    assert [event["event"] for event in _events(stream)] == ["loud"]


def test_what_others_log_through_stdlib_comes_out_the_same_way() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    try:
        raise RuntimeError("oh no")
    except RuntimeError:
        logging.getLogger("grpclib.server").exception("Application %s", "error")
    (event,) = _events(stream)
    assert (event["event"], event["level"], event["logger"]) == ("Application error", "error", "grpclib.server")
    assert event["exception"].endswith("RuntimeError: oh no")


def test_a_foreign_message_that_does_not_fit_its_arguments_is_shown_all_the_same() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    logging.getLogger("asyncio").error("100 %% sure: %s %s", "one")  # noqa: PLE1206
    (event,) = _events(stream)
    assert event["event"].startswith("100 %% sure: %s %s (")


def test_the_noise_of_others_is_left_out_at_our_debug_level() -> None:
    stream = io.StringIO()
    logs.set_up("debug", stream)
    logging.getLogger("hpack.hpack").debug("noise")
    structlog.get_logger().debug("ours")
    assert [event["event"] for event in _events(stream)] == ["ours"]


def test_a_full_disk_is_no_reason_to_fail() -> None:
    logs.set_up(stream=_Full())
    structlog.get_logger().info("lost")


def test_a_stream_that_was_closed_is_no_reason_to_fail() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    stream.close()
    structlog.get_logger().info("lost")


def test_the_daemons_logging_does_not_import_rich() -> None:
    code = "import sys; from agent import logs; logs.set_up(); print('rich' in sys.modules); import rich"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
