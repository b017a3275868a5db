from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from agent import cli
from agent.cli.commands import fairlead

PLAIN: tuple[list[str], ...] = (
    [],
    ["--config", "a.toml"],
    ["--config=a.toml", "--log-level", "debug"],
    ["--config", "a", "--config=b"],
)
OTHER = (
    ["--config", ""],
    ["--config"],
    ["--log-level=loud"],
    ["--help"],
    ["--", "x"],
    ["--config", "-x"],
    ["--conf=a"],
)


def _ends(call: Any) -> int | str | None:
    try:
        call()
    except SystemExit as end:
        return end.code
    return 0


@pytest.mark.parametrize("arguments", [*PLAIN, *OTHER])
def test_the_daemon_starts_with_the_same_options_whether_click_reads_them_or_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    started: list[tuple[Path | None, str]] = []
    monkeypatch.setattr(cli, "run_daemon", lambda *options: started.append(options))
    monkeypatch.setattr(sys, "argv", ["fairlead", "run", *arguments])
    ours = _ends(cli.main), started[:], capsys.readouterr()
    assert (cli._options_of_run(["run", *arguments]) is not None) == (arguments in PLAIN)
    started.clear()
    assert ours == (_ends(lambda: fairlead(prog_name="fairlead")), started, capsys.readouterr())


def test_an_interrupt_before_the_daemon_listens_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_daemon", interrupted)
    monkeypatch.setattr(sys, "argv", ["fairlead", "run"])
    assert (_ends(cli.main), capsys.readouterr().err) == (1, "Aborted!\n")
