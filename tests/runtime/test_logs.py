from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from agent import __version__
from agent.runtime import logs


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


def test_what_happened_how_bad_and_when_come_first_and_what_is_empty_not_at_all() -> None:
    stream = io.StringIO()
    logs.set_up(stream=stream)
    structlog.get_logger().warning("device-changed", device="d", reason="", message="", count=0, ids=(), pid=None)
    (event,) = _events(stream)
    assert list(event)[:3] == ["event", "level", "timestamp"]
    assert event.keys() - {"event", "level", "timestamp"} == {"device", "count", "ids", "pid"}


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


def test_the_daemon_imports_nothing_large_that_it_does_not_need() -> None:
    """Each would be a fiftieth of its start, or much more."""
    code = (
        "import sys; from agent import cli; sys.argv = ['fairlead', 'run', '--config', '/nowhere']\n"
        "try: cli.main()\n"
        "except SystemExit: print('agent.daemon.supervisor' in sys.modules, {'rich', 'betterproto', 'importlib.metadata', 'pyudev', 'shutil', 'hashlib', 'click', 'gettext', 'argparse', '_ssl'} & sys.modules.keys()); import rich, anyio; anyio.run(anyio.lowlevel.checkpoint); print('_ssl' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["True set()", "False"]


def test_the_programs_version_is_known_without_a_look_at_what_is_installed() -> None:
    """A daemon asked for it once it served: 43 modules on its event loop."""
    code = (
        "import sys; from agent import cli; from agent.daemon import control, serving, supervisor\n"
        "sys.argv = ['fairlead', '--version']\n"
        "try: cli.main()\n"
        "except SystemExit: print('importlib.metadata' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"fairlead {__version__}", "False"]


# --- in the journal ---


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[tuple[io.TextIOWrapper, dict[str, str]]]:
    """A stream, and how systemd tells a service of it."""
    with (tmp_path / "journal").open("w+") as stream:
        found = os.fstat(stream.fileno())
        yield stream, {"JOURNAL_STREAM": f"{found.st_dev}:{found.st_ino}"}


@pytest.mark.parametrize(("level", "priority"), [("debug", 7), ("info", 6), ("warning", 4), ("error", 3)])
def test_in_the_journal_a_line_bears_its_priority(
    journal: tuple[io.TextIOWrapper, dict[str, str]], level: str, priority: int
) -> None:
    stream, environment = journal
    logs.set_up("debug", stream, environment)
    getattr(structlog.get_logger(), level)("registered", resource="a.b/kvm")
    logging.getLogger("asyncio").log(logging.ERROR, "foreign")
    ours, foreign = Path(stream.name).read_text().splitlines()
    assert ours.startswith(f'<{priority}>{{"')
    assert json.loads(ours[3:])["level"] == level
    assert foreign.startswith("<3>{")


def test_a_traceback_in_the_journal_is_part_of_the_line(journal: tuple[io.TextIOWrapper, dict[str, str]]) -> None:
    stream, environment = journal
    logs.set_up(stream=stream, environment=environment)
    try:
        raise RuntimeError("oh no")
    except RuntimeError:
        structlog.get_logger().exception("broken")
    (line,) = Path(stream.name).read_text().splitlines()
    assert line.startswith("<3>{")


def test_a_stream_that_is_not_the_journals_has_no_priorities(
    journal: tuple[io.TextIOWrapper, dict[str, str]], tmp_path: Path
) -> None:
    _, environment = journal
    with (tmp_path / "elsewhere").open("w+") as stream:  # the service's own redirection
        logs.set_up(stream=stream, environment=environment)
        structlog.get_logger().info("registered")
        assert Path(stream.name).read_text().startswith("{")


@pytest.mark.parametrize(("level", "printed"), [("debug", 3), ("info", 2), ("error", 1)])
def test_whoever_notes_lines_is_told_of_those_from_info_upwards_whatever_is_printed(
    level: logs.Level, printed: int
) -> None:
    noted: list[str] = []
    stream = io.StringIO()
    logs.set_up(level, stream, {}, note=lambda line: noted.append(line["event"]))
    log = structlog.get_logger()
    log.debug("detail")
    log.info("registered", resource="a.b/c")
    log.error("part-failed", part="x")
    assert noted == ["registered", "part-failed"]
    assert len(stream.getvalue().splitlines()) == printed
