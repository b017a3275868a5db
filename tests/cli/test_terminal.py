"""What devices, pods and kernels call themselves does nothing to the terminal of who reads it."""

from __future__ import annotations

import io
import json
import os
import pty
from pathlib import Path

import pytest
import structlog

from agent.cli import output
from agent.runtime import logs
from backends.errors import printable, printable_lines
from tests.e2e.process import finish

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\b"


@pytest.mark.parametrize("text", [EVIL, "a\x1b[8mhidden\x1b[m", "a\tb\u2028c\udcff"])
def test_what_a_terminal_would_obey_is_escaped(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_lines(f"{text}\n{text}").split("\n") == [printable(text)] * 2


def test_our_own_colours_and_lines_stay(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.utils.should_strip_ansi", lambda *_: False)
    output.echo(output.state("Unhealthy", f"bad{EVIL}") + "\n" + output.bold("HEAD"))
    assert capsys.readouterr().out == f"\x1b[31mbad{printable(EVIL)}\x1b[0m\n\x1b[1mHEAD\x1b[0m\n"


def test_json_says_the_same_without_bytes_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    output.echo_json({"name": EVIL, "é": "\U000e0001"})
    text = capsys.readouterr().out
    assert text.removesuffix("\n").isprintable()
    assert json.loads(text) == {"name": EVIL, "é": "\U000e0001"}


def test_the_log_on_a_terminal_is_escaped_and_elsewhere_it_is_json() -> None:
    ours, theirs = pty.openpty()
    before = structlog.get_config()
    try:
        with os.fdopen(theirs, "w") as terminal:
            logs.set_up("info", stream=terminal, environment={"NO_COLOR": "1"})
            structlog.get_logger().info("said", device=EVIL, ids=[EVIL])
            written = os.read(ours, 65536).decode()
            try:
                raise ValueError(EVIL)
            except ValueError:
                structlog.get_logger().exception("failed")
            trace = os.read(ours, 65536).decode()
        stream = io.StringIO()
        logs.set_up("info", stream=stream, environment={})
        structlog.get_logger().info("said", device=EVIL)
        assert json.loads(stream.getvalue())["device"] == EVIL
    finally:
        structlog.configure(**before)
        os.close(ours)
    assert "said" in written
    assert written.rstrip("\r\n").isprintable()
    assert "ValueError" in trace
    assert trace.replace("\r\n", "").isprintable()


async def test_a_command_escapes_what_hardware_is_called(tmp_path: Path) -> None:
    states = tmp_path / "states"
    states.write_text("stub-0 unhealthy it is \x1b]0;owned\x07 hot\n")
    config = tmp_path / "config.toml"
    config.write_text(
        f'[[resource]]\nname = "a.com/stub"\nbackend = "stub"\nfile = "{states}"\ndevices = [{{ count = 1 }}]\n'
    )
    code, out, err = await finish("discover", "--config", str(config))
    assert (code, err) == (0, "")
    assert "owned" in out
    assert "\x1b" not in out
    assert "\x07" not in out
