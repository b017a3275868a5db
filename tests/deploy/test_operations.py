"""docs/operations.md: what it tells people to type exists, and what it points at is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click
import pytest

from agent.cli import fairlead
from agent.console.doctor import node_links
from agent.console.doctor.examination import CHECKS
from tests.deploy.manifests import REPOSITORY, run

_BUILT_IN: Final = re.compile(r"^apiVersion: [a-z0-9]+(/[a-z0-9]+)?$", re.MULTILINE)  # no domain: Kubernetes' own
_TEXT: Final = (REPOSITORY / "docs/operations.md").read_text()


def _commands() -> Iterator[str]:
    """Every `fairlead …` of the examples and of the sentences."""
    examples = re.findall(r"```sh\n(.*?)```", _TEXT, flags=re.DOTALL)
    lines = [line for example in examples for line in example.splitlines()]
    for text in (*lines, *re.findall(r"`([^`\n]+)`", _TEXT)):
        command = re.search(r"(?:^|-- )(fairlead [a-z].*)", text)
        if command is not None:
            yield command[1]


@pytest.mark.parametrize("command", sorted(set(_commands())))
def test_the_command_exists_and_takes_these_arguments(command: str) -> None:
    _, name, *arguments = shlex.split(command, comments=True)
    found = fairlead.get_command(click.Context(fairlead), name)
    assert found is not None
    if arguments or "DEVICE" not in {parameter.human_readable_name for parameter in found.params}:
        found.make_context(name, arguments)


def test_the_objects_that_it_prints_are_valid(tmp_path: Path) -> None:
    objects = [text for text in re.findall(r"```yaml\n(.*?)```", _TEXT, flags=re.DOTALL) if _BUILT_IN.search(text)]
    assert objects
    for text in objects:
        file = tmp_path / "object.yaml"
        file.write_text(text)
        run("kubernetes_validate", "--strict", file)


def test_every_file_of_ours_that_it_names_is_there() -> None:
    named = set(re.findall(r"`((?:docs|deploy|requirements|tests)/[^`\s]*|[A-Z]+\.md)`", _TEXT))
    assert named
    assert not [name for name in named if not (REPOSITORY / name).exists()]


def test_every_check_of_the_doctor_that_it_names_is_one() -> None:
    named = {
        name for line in re.findall(r"`doctor`: ([^.|;]*)|checks (`[^|]*`)", _TEXT) for name in _quoted("".join(line))
    }
    assert named
    assert named <= {*CHECKS, node_links.CHECK}


def _quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_the_readme_points_at_it() -> None:
    assert "docs/operations.md" in (Path(REPOSITORY) / "README.md").read_text()
