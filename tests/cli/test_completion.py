"""Completion scripts and the man page come from the commands' own definitions."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from agent.cli import _COMMANDS, fairlead

PROGRAM = Path(sys.executable).with_name("fairlead")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script(shell: str) -> None:
    done = CliRunner().invoke(fairlead, ["completion", shell], prog_name="fairlead")
    assert done.exit_code == 0
    assert "_FAIRLEAD_COMPLETE" in done.output


def test_an_unknown_shell_is_named_with_those_there_are() -> None:
    done = CliRunner().invoke(fairlead, ["completion", "tcsh"], prog_name="fairlead")
    assert done.exit_code == 2
    assert "bash" in done.output


def completed(*words: str) -> list[str]:
    """What bash would be offered for the last of these words."""
    environment = {"_FAIRLEAD_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(("fairlead", *words))}
    environment["COMP_CWORD"] = str(len(words))
    done = subprocess.run([PROGRAM], env=environment, capture_output=True, text=True, check=True)
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_and_options_are_completed() -> None:
    assert completed("disc") == ["discover"]
    assert "--json" in completed("discover", "--")


def page() -> str:
    done = CliRunner().invoke(fairlead, ["manual"], prog_name="fairlead")
    assert done.exit_code == 0
    return done.output


def test_the_man_page_has_every_command_with_its_options() -> None:
    written = page()
    for name in _COMMANDS:
        assert f".SS fairlead {name}" in written
    assert r"\-\-config" in written


def test_lines_that_belong_apart_stay_so_in_help_and_man_page() -> None:
    shown = CliRunner().invoke(fairlead, ["completion", "--help"], prog_name="fairlead").output.splitlines()
    assert sum(line.startswith(("  bash: ", "  zsh: ", "  fish: ")) for line in shown) == 3
    assert "bash: fairlead completion bash > /etc/bash_completion.d/fairlead" in page().splitlines()


def test_the_man_page_has_an_argument_in_its_usage_alone() -> None:
    assert "DEVICE" not in {line.strip("\\fBR") for line in page().splitlines()}


@pytest.mark.needs("groff")
def test_groff_has_nothing_to_complain_of() -> None:
    done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z"], input=page(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
