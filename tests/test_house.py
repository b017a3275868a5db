"""A reader finds the code in small files and small folders, each of which says in its first line what it does."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_GENERATED: Final = _ROOT / "agent" / "kubelet" / "api"
_LINES, _FILES, _ROOMS = 600, 24, 18


def _files() -> list[Path]:
    found = (path for package in ("agent", "backends") for path in _ROOT.joinpath(package).rglob("*.py"))
    return sorted(path for path in found if _GENERATED not in path.parents)


def test_no_file_is_too_long_to_read_in_one_go() -> None:
    lengths = {str(path.relative_to(_ROOT)): len(path.read_text().splitlines()) for path in _files()}
    assert {name: lines for name, lines in lengths.items() if lines > _LINES} == {}


def test_no_folder_has_more_files_than_a_reader_takes_in_at_once() -> None:
    folders = Counter(path.parent.relative_to(_ROOT) for path in _files())
    crowded = {str(folder): files for folder, files in folders.items() if files > _FILES}
    assert crowded.keys() <= {"agent/cli"}, "one file per command stands in agent/cli; split the others"


def test_every_file_stands_in_a_room() -> None:
    rooms = {path.name for path in _ROOT.joinpath("agent").iterdir() if path.joinpath("__init__.py").is_file()}
    assert len(rooms | {"backends"}) <= _ROOMS
    assert {path.name for path in _ROOT.joinpath("agent").glob("*.py")} == {"__init__.py", "model.py"}


def test_every_file_says_in_its_first_line_what_it_does() -> None:
    assert [str(path.relative_to(_ROOT)) for path in _files() if not _says(path)] == []


def _says(path: Path) -> bool:
    text = path.read_text()
    if path.name == "__init__.py" and not text.strip():
        return True
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].endswith((".", ":", "?"))
