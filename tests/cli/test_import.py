"""`fairlead import`: its streams, its exit codes, and what it costs other commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from agent.cli.commands import fairlead
from agent.config import load
from agent.importing.yaml_tree import MOST_BYTES


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "old.yaml"


def _import(*arguments: str | Path) -> Result:
    return CliRunner().invoke(fairlead, ["import", *map(str, arguments)], prog_name="fairlead")


def test_what_is_carried_over_whole_ends_in_0_and_loads(file: Path) -> None:
    file.write_text("- {devicematch: ^fuse$, nummaxdevices: 20}\n")
    result = _import(file)
    assert (result.exit_code, result.stderr) == (0, "")
    file.with_suffix(".toml").write_text(result.stdout)
    assert [resource.name for resource in load(file.with_suffix(".toml")).resources] == ["smarter-devices/fuse"]


def test_what_is_lost_ends_in_1_and_is_said_with_file_and_line(file: Path) -> None:
    file.write_text("- {devicematch: ^fuse$, nummaxdevices: 20}\n- {devicematch: ^a$, nummaxdevices: some}\n")
    result = _import(file)
    assert result.exit_code == 1
    assert result.stderr == (
        f"{file}:2: ^a$: 'nummaxdevices' is 'some' and should be a whole number; this is left out\n"
    )
    assert 'name = "smarter-devices/fuse"' in result.stdout


def test_what_is_only_good_to_know_ends_in_0(file: Path) -> None:
    file.write_text("- {devicematch: ^fuse$}\n")
    result = _import(file)
    assert result.exit_code == 0
    assert result.stderr.startswith(f"{file}:1: note: ")


@pytest.mark.parametrize(
    ("content", "place", "sentence"),
    [
        (None, "", "the file cannot be read: No such file or directory"),
        (b"", "", "the file is empty"),
        (b"a: b: c", ":1", "this is no YAML: mapping values are not allowed here"),
        (b"a\n\xff", ":2", "the file is not written in UTF-8"),
        (b"#" * (MOST_BYTES + 1), "", "the file has more than 1024 KiB; no node's configuration does"),
        (b"- !!python/name:os.system x", ":1", "the tag '!!python/name:os.system' is not read"),
        (b"devices: 3", "", "this is no configuration of NVIDIA's plugin"),
    ],
)
def test_a_file_that_cannot_be_imported_ends_in_2_and_prints_no_toml(
    file: Path, content: bytes | None, place: str, sentence: str
) -> None:
    if content is not None:
        file.write_bytes(content)
    result = _import(file)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{file}{place}: {sentence}")


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    result = _import(tmp_path)
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path}: the file cannot be read: Is a directory\n"


def test_a_byte_order_mark_is_no_matter(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf- {devicematch: ^fuse$, nummaxdevices: 20}\n")
    assert _import(file).exit_code == 0


def test_the_domain_and_the_format_can_be_said(file: Path) -> None:
    file.write_text("devices: [{name: fuse, groups: [{paths: [{path: /dev/fuse}]}]}]")
    assert 'name = "a.b/fuse"' in _import(file, "--domain", "a.b").stdout
    assert _import(file, "--from", "generic").exit_code == 0
    assert _import(file, "--from", "smarter").exit_code == 2


def test_a_terminal_is_sent_no_control_characters(file: Path) -> None:
    file.write_text('- {devicematch: "(\\e[2J", nummaxdevices: 1}\n')
    result = _import(file)
    assert "\x1b" not in result.stderr + result.stdout
    assert "\\x1b" in result.stderr


def test_the_readme_tells_the_truth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = Path(__file__).parents[2].joinpath("README.md").read_text()
    example = readme.partition("### Coming from another plugin")[2]
    conf, says = (
        example.partition("```yaml\n")[2].split("```")[0],
        example.split("and says\n\n```text\n")[1].split("```")[0],
    )
    monkeypatch.chdir(tmp_path)
    Path("conf.yaml").write_text(conf)
    result = _import("conf.yaml")
    assert result.stderr == says
    assert 'name = "smarter-devices/fuse"' in result.stdout
    assert "count = 20" in result.stdout


def test_no_other_command_imports_yaml() -> None:
    code = (
        "import sys; import agent.cli.commands, agent.daemon.supervisor, agent.cli.discover, agent.cli.validate, agent.cli.demo;"
        "print([name for name in sys.modules if name.split('.')[0] == 'yaml'])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


_SECTION = re.compile(
    r"^### (?P<title>.*)\n\n```sh cluster\n(?P<get>(?:.*\n)*?)fairlead migrate (?P<file>\S+)\n```\n", re.MULTILINE
)
_PAGE = Path(__file__).parents[2].joinpath("docs", "migrating.md").read_text()
_MIGRATING = _PAGE.partition("\n## Each plugin\n")[2].partition("\n## Side by side\n")[0].split("\n### ")[1:]


@pytest.mark.parametrize("section", _MIGRATING, ids=[section.partition("\n")[0] for section in _MIGRATING])
def test_the_page_about_migrating_shows_what_an_import_prints(section: str, tmp_path: Path) -> None:
    found = _SECTION.match(f"### {section}")
    assert found is not None
    theirs = re.search(r"Theirs:\n\n```\w+\n(.*?)```", section, re.DOTALL)
    ours = re.search(r"prints it:\n\n```toml\n(.*?)```", section, re.DOTALL)
    says = re.search(r"It says:\n\n```text\n(.*?)```", section, re.DOTALL)
    assert theirs is not None
    assert ours is not None
    file = tmp_path / found["file"]
    file.write_text(theirs[1])
    result = _import(file)
    assert result.stdout.endswith(ours[1])
    assert result.stderr.replace(f"{file}:", "") == (says[1] if says else "")
    assert f"> {file.name}" in found["get"], "the command writes the file that is imported"


@pytest.mark.parametrize("line", sorted(set(re.findall(r"\| `fairlead ([^`]+)` \|$", _PAGE, re.MULTILINE))))
def test_the_page_that_compares_names_commands_as_they_are(line: str) -> None:
    name, *words = line.split()
    command = fairlead.get_command(click.Context(fairlead), name)
    assert command is not None
    command.make_context(name, words, resilient_parsing=False)
