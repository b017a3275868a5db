"""What the documentation prints can be typed: commands exist, files are there, configurations and manifests are valid."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import click
import pytest
import yaml
from kubernetes_validate import validate

from agent.cli.commands import fairlead
from agent.config import load
from tests.docs.pages import LANGUAGES, MARKS, PAGES, REPOSITORY, Block, blocks, every, text

_BUILT_IN: Final = re.compile(r"[a-z0-9]+(/[a-z0-9]+)?")  # an apiVersion without a domain is Kubernetes' own
_KUBERNETES: Final = "1.37"
_COMMAND: Final = re.compile(r"(?:[$#] )?(?:fairlead|kubectl|helm|systemctl|podman|make|pip|apt|curl) [a-z-]")
_TARGETS: Final = set(re.findall(r"^([a-z0-9-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
_MEANT: Final = re.compile(r"\b[A-Z]{2,}\b")  # NAME: what a reader puts there
_USAGE: Final = re.compile(r"[\[\]…<|]|\.\.\.")  # a way to write many commands


def _where(block: Block) -> str:
    return block.where


def _typed() -> Iterator[tuple[str, str]]:
    """Every command of the blocks and of the sentences, with where it stands."""
    for block in every("sh", "console"):
        yield from ((block.where, command.text) for command in block.commands)
    for page in PAGES:
        yield from (
            (page, code.strip())
            for code in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL))
        )


def _of_ours() -> list[tuple[str, str]]:
    found: dict[str, str] = {}
    for where, command in _typed():
        if (ours := re.search(r"(?:^|-- |/|\$\()(fairlead [a-z][^|><)&;]*)", command)) is not None:
            found.setdefault(ours[1].strip(), where)
    return sorted((where, command) for command, where in found.items())


def test_every_block_says_its_language_and_what_its_commands_need() -> None:
    found = [block for page in PAGES for block in blocks(page)]
    assert not [it.where for it in found if it.language not in LANGUAGES or it.mark not in MARKS]
    assert not [it.where for it in found if it.mark and it.language not in ("sh", "console")]


def test_no_command_hides_in_a_block_that_says_no_language() -> None:
    hidden = [
        f"{block.where}: {line}" for block in every("") for line in block.text.splitlines() if _COMMAND.match(line)
    ]
    assert not hidden, "make it ```sh or ```console, with a mark if it needs a cluster, or ```text:\n" + "\n".join(
        hidden
    )


@pytest.mark.parametrize(("where", "command"), _of_ours())
def test_a_command_of_ours_exists_and_takes_these_arguments(where: str, command: str) -> None:
    _, name, *arguments = shlex.split(command, comments=True)
    found: click.Command | None = fairlead.get_command(click.Context(fairlead), name)
    if isinstance(found, click.Group):
        name, *arguments = arguments
        found = found.get_command(click.Context(found), name)
    assert found is not None, where
    takes_more = any(parameter.required for parameter in found.params) and not arguments  # it is only spoken of
    if not takes_more and not _USAGE.search(command):
        with suppress(click.BadOptionUsage):  # an option is spoken of, without its value
            found.make_context(name, arguments, resilient_parsing="--help" in arguments)


def test_every_target_of_make_that_is_named_is_one() -> None:
    named = {
        (where, it) for where, command in _typed() for it in re.findall(r"^make ([a-z][a-z0-9-]*)(?![\w/])", command)
    }
    assert named
    assert not {(where, it) for where, it in named if it not in _TARGETS}


def test_every_file_of_ours_that_is_named_is_there() -> None:
    ours = re.compile(r"(?:docs|deploy|requirements|tests|tools|agent|backends|bench)/[\w./-]*\w|[A-Z_]+\.md")
    named = {(where, it) for where, command in _typed() for it in command.split() if ours.fullmatch(it)}
    assert named
    assert not {
        (where, it)
        for where, it in named
        if not (REPOSITORY / it).exists() and not ("/" in it and _MEANT.search(Path(it).stem))
    }


@pytest.mark.parametrize("block", list(every("toml")), ids=_where)
def test_a_configuration_is_valid(block: Block, tmp_path: Path) -> None:
    if "[project]" in block.text:
        return  # a pyproject.toml, of writing-a-backend
    file = tmp_path / "config.toml"
    file.write_text(block.text)
    load(file)


@pytest.mark.parametrize("block", list(every("json")), ids=_where)
def test_a_json_document_is_one(block: Block) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", list(every("yaml")), ids=_where)
def test_a_manifest_is_valid(block: Block) -> None:
    documents: list[Any] = list(yaml.safe_load_all(block.text))
    assert documents
    for document in documents:
        if isinstance(document, dict) and _BUILT_IN.fullmatch(document.get("apiVersion", ".")):
            validate(document, _KUBERNETES, strict=True)
