from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config.typed import Listen, parse_path
from backends.base import Seconds


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(1, 999))
def test_a_duration_is_the_sum_of_its_parts(hours: int, minutes: int, seconds: int, millis: int) -> None:
    text = f"{hours}h{minutes}m{seconds}s{millis}ms"
    assert Seconds.parse(text) == pytest.approx(hours * 3600 + minutes * 60 + seconds + millis / 1000)


@pytest.mark.parametrize(("text", "seconds"), [("5s", 5), ("2m", 120), ("1h30m", 5400), ("1.5s", 1.5), ("20ms", 0.02)])
def test_usual_durations(text: str, seconds: float) -> None:
    assert Seconds.parse(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "5", "s", "5 s", "-5s", "1m1h", "5S", "0s", "0h0m", "1e3s", "٣s", "9" * 400 + "h"]
)
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="duration"):
        Seconds.parse(text)


@pytest.mark.parametrize("text", ["off", "127.0.0.1:9440", "[::1]:80", "node.local:65535", "unix:/run/x.sock"])
def test_addresses_of_each_form_are_accepted(text: str) -> None:
    assert Listen.parse(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "on", "9440", ":9440", "host:", "host:0", "host:65536", "::1:80", "unix:", "unix:x", "unix:/" + "x" * 107],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no a"):
        Listen.parse(text)


@pytest.mark.parametrize("text", ["", "x", "./x", "/a\0b"])
def test_what_is_no_absolute_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no absolute path"):
        parse_path(text)


def test_reading_a_configuration_needs_neither_click_nor_rich_nor_grpclib() -> None:
    code = "import sys, agent.config; print(sorted({'click', 'rich', 'grpclib', 'structlog'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@given(st.integers(1, 10**9))
def test_a_duration_is_read_as_it_was_written(milliseconds: int) -> None:
    assert round(Seconds.parse(Seconds(milliseconds / 1000).written()) * 1000) == milliseconds
