"""`fairlead status --history`: how a device was, as a person reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from agent.cli import output
from agent.cli.commands import fairlead
from agent.cli.device_history import _cells, _hours, lines
from agent.console.views import History, Period
from tests.cli.daemon import running
from tests.console.fakes import FakeDaemon

HOUR = 3600
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC).timestamp()
STATES = ("Healthy", "Degraded", "Unhealthy", "Drained", "Gone", "Unknown")
PAST = (
    Period(NOON - 24 * HOUR, NOON - 18 * HOUR, "Unknown", message="Fairlead did not run"),
    Period(NOON - 18 * HOUR, NOON - 12 * HOUR, "Healthy", holders=("training/llama-0",)),
    Period(NOON - 12 * HOUR, NOON - 12 * HOUR + 9, "Unhealthy", "xid-79", "It is off the bus.", ("training/llama-0",)),
    Period(NOON - 12 * HOUR + 9, NOON, "Healthy"),
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(past={"GPU-1": PAST})
    (tmp_path / "config.toml").write_text(f'[agent]\nadmin_socket = "{tmp_path}/admin.sock"\n')
    with running(daemon, tmp_path / "admin.sock"):
        yield daemon


def ask(tmp_path: Path, *arguments: str) -> Result:
    command = ["status", "--config", str(tmp_path / "config.toml"), *arguments]
    return CliRunner().invoke(fairlead, command, prog_name="fairlead")


@pytest.mark.usefixtures("daemon")
def test_a_strip_with_its_hours_shows_a_day_and_the_changes_stand_below_with_reasons_and_pods(tmp_path: Path) -> None:
    result = ask(tmp_path, "--history", "GPU-1")
    head, _, strip, hours, signs, _, *changes = result.output.splitlines()
    assert head == "GPU-1 of nvidia.com/gpu in the last 24 hours"
    assert strip == "?" * 20 + "=" * 20 + "X" + "-" * 39  # nine seconds are seen
    assert hours[40:46] == "|00:00"
    assert signs == "X unhealthy  = healthy, in use  - healthy, free  ? unknown"
    assert [change[23:].strip() for change in changes] == [
        "unknown: Fairlead did not run",
        "healthy, held by training/llama-0",
        "unhealthy, xid-79, held by training/llama-0: It is off the bus.",
        "healthy, free",
    ]
    assert changes[2].startswith("2026-11-20 00:00:00 ")


def test_other_answers_are_sentences_and_json_is_the_whole_of_it(daemon: FakeDaemon, tmp_path: Path) -> None:
    assert json.loads(ask(tmp_path, "--history", "GPU-1", "--json").output)["periods"][2]["reason"] == "xid-79"
    unknown = ask(tmp_path, "--history", "GPU-2")
    assert "did you mean 'GPU-1'" in str(unknown.exception)
    assert ask(tmp_path, "--history", "GPU-1", "--watch").exit_code == 2
    daemon.past["GPU-1"] = ()
    assert "GPU-1 has not been offered in the last 24 hours" in ask(tmp_path, "--history", "GPU-1").output


@given(
    st.lists(st.tuples(st.floats(0.001, 86400), st.sampled_from(STATES)), min_size=1, max_size=30),
    st.integers(10, 120),
)
def test_the_strip_fills_the_terminal_and_shows_whatever_was_bad(spans: list[tuple[float, str]], columns: int) -> None:
    periods, at = list[Period](), NOON
    for lasted, state in spans:
        periods.append(Period(at, at + lasted, state))
        at += lasted
    cells = list(_cells(tuple(periods), columns))
    assert len(cells) == columns
    worst = next((it for it in ("Unhealthy", "Gone", "Drained", "Degraded") if any(it == s for _, s in spans)), None)
    assert worst is None or worst in cells
    assert len(_hours(NOON, at, columns)) <= columns


def test_how_it_is_now_shows_though_the_daemon_has_only_begun() -> None:
    since = (Period(NOON - 24 * HOUR, NOON - 9, "Unknown"), Period(NOON - 9, NOON, "Healthy"))
    assert list(_cells(since, 80)) == [*["Unknown"] * 79, "Healthy"]


def test_lines_are_as_wide_as_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "is_terminal", lambda: True)
    monkeypatch.setattr(output, "columns", lambda: 40)
    shown = [line for text in lines(History("GPU-1", "a.b/c", PAST)) for line in text.splitlines()]
    assert max(len(line) for line in shown if "\x1b" not in line) <= 40
