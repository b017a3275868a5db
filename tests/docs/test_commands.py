"""Every command that a page prints without a mark does what the page says: it is typed into a node's terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.docs.pages import PAGES, REPOSITORY, Block, blocks
from tests.docs.terminals import Terminals

_ELSEWHERE: Final[Mapping[str, str]] = {
    "docs/writing-a-backend.md": "tests/docs/test_writing_a_backend.py",
    "docs/installing.md": "tests/deploy/test_kubernetes_docs.py",
    "docs/fleet.md": "tests/deploy/kubectl/test_kubectl_fairlead.py",
}
"""Pages whose commands another test runs, in a way of its own."""

_HARMLESS: Final = {"cat", "echo", "fairlead", "head", "jq"}
"""What may be typed on the machine of whoever runs the tests, perhaps as root: nothing that changes anything outside."""

_RUN: Final = {
    page: found
    for page in PAGES
    if page not in _ELSEWHERE and (found := [block for block in blocks(page) if block.file or not block.mark])
}


def _strange(block: Block) -> list[str]:
    """The commands of a block that are not known to be harmless, and so need a mark."""
    typed = [command.text.split(" #")[0] for command in block.commands if not block.file]
    return [command for command in typed if command and not _is_harmless(command)]


def _is_harmless(command: str) -> bool:
    programs = {words[0] for part in re.split(r"&&|[|;]", command) if (words := part.split())}
    return programs <= _HARMLESS and re.search(r">\s*[/~$]", command) is None


_STRANGE: Final = [f"{block.where}: {it}" for found in _RUN.values() for block in found for it in _strange(block)]


def test_no_command_without_a_mark_changes_the_machine() -> None:
    assert not _STRANGE, "mark them: ```sh cluster, node or sources"


@pytest.mark.parametrize("page", [page for page, found in _RUN.items() if any(block.commands for block in found)])
async def test_its_commands_work(page: str, terminals: Terminals, tmp_path: Path) -> None:
    assert not _STRANGE
    for block in _RUN[page]:
        if block.file:
            (tmp_path / "reading" / block.file).write_text(block.text)
        else:
            for command in block.commands:
                await terminals.follow(command)


def test_there_are_commands_that_are_run() -> None:
    assert {"docs/concepts.md", "docs/operations.md", "docs/recipes.md"} <= _RUN.keys()


@pytest.mark.parametrize(("page", "test"), _ELSEWHERE.items())
def test_a_page_that_is_left_out_has_a_test_of_its_own(page: str, test: str) -> None:
    if page in PAGES:
        assert page.removeprefix("docs/") in (REPOSITORY / test).read_text()


@pytest.mark.parametrize(
    "command",
    ["rm -r /etc/fairlead", "fairlead validate && systemctl restart fairlead", "echo 1 | tee /sys/x", "cat x > /etc/y"],
)
def test_a_command_that_changes_the_machine_is_never_run(command: str) -> None:
    assert _strange(Block("page.md", 1, "sh", "", f"{command}\n")) == [command]
