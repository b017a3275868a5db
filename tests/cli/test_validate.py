from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agent.cli.commands import fairlead
from tests.config.fakes import FakeRegistry

_VALID = """\
[[resource]]
name = "a.b/kvm"
backend = "chardev"
paths = [{ path = "/dev/kvm" }]

[[resource]]
name = "a.b/widget"
backend = "stub"
select = { color = "red" }
replicas = 4
"""
_WRONG = '[agent]\nresinc = "5m"\nprobe = 1\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    registry = FakeRegistry()
    monkeypatch.setattr("backends.registry.load", registry.load)
    monkeypatch.setattr("backends.registry.names", registry.names)
    return tmp_path / "config.toml"


def _validate(*arguments: str) -> Result:
    return CliRunner().invoke(fairlead, ["validate", *arguments], prog_name="fairlead")


def test_a_valid_file_is_said_to_be_so_and_what_it_means(file: Path) -> None:
    file.write_text(_VALID)
    result = _validate("--config", str(file))
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{file} is valid.",
        "  a.b/kvm     chardev",
        "  a.b/widget  stub, selected, each device for 4 pods",
    ]


def test_a_file_without_resources_is_said_to_offer_nothing(file: Path) -> None:
    file.write_text("")
    assert _validate("--config", str(file)).stdout.splitlines()[1:] == [
        "It has no [[resource]]: nothing would be offered."
    ]


def test_a_config_map_is_answered_with_the_command_for_this_very_file(tmp_path: Path) -> None:
    file = tmp_path / "config map.yaml"
    file.write_text("kind: ConfigMap\ndata:\n  config.toml: |\n    [[resource]]\n")
    assert f"kubectl create --dry-run=client --filename='{file}' " in _validate("--config", str(file)).stdout


def test_every_problem_is_printed_and_the_exit_code_is_2(file: Path) -> None:
    file.write_text(_WRONG)
    result = _validate("--config", str(file))
    assert result.exit_code == 2
    assert result.stdout.splitlines() == [
        f"{file}:2: agent.resinc: there is no key 'resinc'; did you mean 'resync'?",
        f"{file}:3: agent.probe: expected a duration such as '5s', got 1; write: \"1s\"",
    ]


def test_a_valid_file_in_json(file: Path) -> None:
    file.write_text(_VALID)
    result = _validate("--json", "--config", str(file))
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {
        "valid": True,
        "problems": [],
        "resources": [{"name": "a.b/kvm", "backend": "chardev"}, {"name": "a.b/widget", "backend": "stub"}],
    }


def test_the_file_may_be_named_without_an_option(file: Path) -> None:
    file.write_text(_VALID)
    assert _validate(str(file)).stdout == _validate("--config", str(file)).stdout
    both = _validate(str(file), "--config", str(file))
    assert (both.exit_code, "name one file" in both.stderr) == (2, True)


def test_what_cannot_be_written_is_told_in_one_sentence() -> None:
    for command in ("--help", "manual", "schema"):
        with Path("/dev/full").open("wb") as full:
            code = "from agent.cli import main; main()"
            found = subprocess.run(
                [sys.executable, "-c", code, command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert (found.returncode, found.stderr) == (1, "the output cannot be written: no space left on device\n")


def test_problems_in_json(file: Path) -> None:
    result = _validate("--json", "--config", str(file))
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "valid": False,
        "problems": [
            {
                "file": str(file),
                "line": None,
                "path": "",
                "message": "the file cannot be read: No such file or directory",
            }
        ],
        "resources": [],
    }


def test_the_help_lists_every_command_without_importing_one() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from agent.cli.commands import fairlead;"
        "print(CliRunner().invoke(fairlead, ['--help']).output);"
        "print(sorted(name for name in sys.modules if name.startswith(('agent.', 'msgspec', 'structlog'))))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    for command in ("run", "discover", "validate", "import", "demo"):
        assert f"\n  {command} " in found.stdout
    assert (
        found.stdout.splitlines()[-1] == "['agent.cli', 'agent.cli.commands', 'agent.runtime', 'agent.runtime.errors']"
    )


def test_a_wrong_command_is_answered_with_the_right_one() -> None:
    result = CliRunner().invoke(fairlead, ["valdate"])
    assert result.exit_code == 2
    assert "there is no command 'valdate'; did you mean 'validate'?" in result.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["history", "nvidia2"], "did you mean `fairlead status --history nvidia2`?"),
        (["histroy"], "did you mean `fairlead status --history DEVICE`?"),
        (["status", "nvidia2"], "for one device: `fairlead explain nvidia2`"),
        (["devices", "nvidia2"], "for one device: `fairlead explain nvidia2`"),
        (["xyzzy"], "'validate'\n"),  # of all commands none is left out
    ],
)
def test_what_a_person_types_for_one_device_is_answered_with_the_command_for_it(words: list[str], said: str) -> None:
    result = CliRunner().invoke(fairlead, words, prog_name="fairlead")
    assert (result.exit_code, said in result.stderr) == (2, True)


def test_the_version_is_told() -> None:
    result = CliRunner().invoke(fairlead, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("fairlead 0.")


@pytest.mark.parametrize(("option", "said"), [("--bogus", "'--bogus'.\n"), ("--pod", "mean '--pods'?\n")])
def test_a_wrong_option_is_answered_with_a_near_one_alone(option: str, said: str) -> None:
    assert CliRunner().invoke(fairlead, ["status", option]).output.endswith(said)
