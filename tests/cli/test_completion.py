"""Completion scripts and the man page come from the commands' own definitions."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from agent.cli.commands import _COMMANDS, fairlead
from agent.cli.manual import EXAMPLES
from agent.console.views import Device, Resource, Unclaimed
from tests.cli.daemon import running
from tests.console.fakes import FakeDaemon, status

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


_BASH = """
source <("$1" completion bash)
COMP_LINE=$2 COMP_POINT=${#2}
_fairlead_completion "$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def completed(*words: str) -> list[str]:
    """What bash puts in the place of the last of these words, or of what follows its last colon."""
    command = ["bash", "--norc", "-c", _BASH, "bash", str(PROGRAM), " ".join(("fairlead", *words))]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_commands_and_options_are_completed() -> None:
    assert completed("disc") == ["discover"]
    assert "--json" in completed("discover", "--")


def test_undrain_completes_what_it_would_end_something_of(tmp_path: Path) -> None:
    socket, config = tmp_path / "admin.sock", tmp_path / "config.toml"
    config.write_text(f'[agent]\nadmin_socket = "{socket}"\n')
    devices = (
        Device("well", ("well",), "Healthy"),
        Device("drained", ("drained",), "Unhealthy", "drained"),
        Device("fallen", ("fallen",), "Unhealthy", "xid-79", ends="a reboot or `fairlead undrain`"),
        Device("down", ("down",), "Unhealthy", "port-down", ends="the next look that finds it well"),
    )
    shown = replace(status(), resources=(Resource("a.b/c", "gpu", True, True, "", devices),))
    with running(FakeDaemon(shown), socket):
        assert completed(f"undrain --config {config}", "") == ["drained", "fallen"]
        assert len(completed(f"drain --config {config}", "")) == 4


@pytest.mark.parametrize("command", ["explain {}", "drain {}", "status {} --history"])
def test_devices_of_a_running_daemon_are_completed_also_after_a_colon(command: str, tmp_path: Path) -> None:
    socket, config = tmp_path / "admin.sock", tmp_path / "config.toml"
    config.write_text(f'[agent]\nadmin_socket = "{socket}"\n')
    gpu = Device("0000:3b:00.0", ("0000:3b:00.0",), "Healthy", name="nvidia3", nodes=("/dev/nvidia3", "/dev/nvidiactl"))
    gpu = replace(gpu, hardware=("pci:0000:3b:00.0",))
    devices = (gpu, Device("kvm", ("kvm::0", "kvm::1"), "Healthy"))
    shown = replace(status(), resources=(Resource("a.b/c", "gpu", True, True, "", devices),))
    lost = Unclaimed("0000:3c:00.0", "gpu", "it has no driver", name="nvidia5", nodes=("/dev/nvidiactl",))
    shown = replace(shown, unclaimed=(lost,))
    line = command.format(f"--config {config}")
    with running(FakeDaemon(shown), socket):
        assert completed(line, "kvm") == ["kvm", "kvm::0", "kvm::1"]
        assert completed(line, "nv") == ["nvidia3", "nvidia5"]
        assert completed(line, "/dev/n") == ["/dev/nvidia3"]  # and not what several have
        assert completed(line, "0000:3") == ["3b:00.0", "3c:00.0"]
        assert completed(line, "0000:3b:") == ["00.0"]
        assert completed(line, "3b:") == ["00.0"]
    assert completed(line, "kvm") == []


def page() -> str:
    done = CliRunner().invoke(fairlead, ["manual"], prog_name="fairlead")
    assert done.exit_code == 0
    return done.output


def test_the_man_page_has_every_command_with_its_options() -> None:
    written = page()
    for name in _COMMANDS:
        assert f".SS fairlead {name}" in written
    assert r"\-\-config" in written


def test_every_command_says_its_exit_codes_and_is_named_in_the_readme() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    root = fairlead.make_context("fairlead", ["schema"])
    for name in _COMMANDS:
        command = fairlead.get_command(root, name)
        assert (command.epilog or "").startswith("Exit codes: 0 "), f"@click.command(epilog=…) of agent/cli/{name}.py"
        assert f"\nfairlead {name} " in readme, f"a line in README, Run it: fairlead {name}"


def test_every_example_of_the_man_page_is_a_command_as_it_would_be_typed() -> None:
    examples = page().partition(".SH EXAMPLES")[2].partition(".SH FILES")[0]
    assert isinstance(fairlead, click.Group)
    for _, line in EXAMPLES:
        program, name, *arguments = shlex.split(line)
        root = fairlead.make_context(program, [name, *arguments])
        command = fairlead.get_command(root, name)
        assert command is not None
        command.make_context(name, arguments, parent=root).close()
        assert line.replace("-", r"\-") in examples


def test_no_help_and_no_man_page_names_a_file_of_the_sources() -> None:
    for arguments in (["manual"], *([name, "--help"] for name in _COMMANDS)):
        shown = CliRunner().invoke(fairlead, arguments, prog_name="fairlead").output
        assert re.search(r"\b(agent|backends|docs)/|\.py\b", shown) is None, arguments


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
