"""A reader finds the code in small files and small folders, each of which says in its first line what it does."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_GENERATED: Final = _ROOT / "agent" / "kubelet" / "api"
_LINES, _FILES, _ROOMS = 600, 24, 19
_SHORT: Final = 120
_CODE: Final = ("agent", "backends", "bench", "deploy", "proto", "tests", "tools")
_QUESTION: Final = re.compile(r"\?(?=\s|$)")
_APART: Final = {
    "agent/cli/import_.py": "a command, which another one borrows from: each has a file",
}
"""Short files that one neighbour alone uses, and why they are apart all the same."""


def _files() -> list[Path]:
    found = (path for package in ("agent", "backends") for path in _ROOT.joinpath(package).rglob("*.py"))
    return sorted(path for path in found if _GENERATED not in path.parents)


def test_no_file_is_too_long_to_read_in_one_go() -> None:
    lengths = {str(path.relative_to(_ROOT)): len(path.read_text().splitlines()) for path in _files()}
    assert {name: lines for name, lines in lengths.items() if lines > _LINES} == {}


def test_a_short_file_that_one_neighbour_alone_uses_is_a_part_of_it() -> None:
    """Each change of file costs a reader more than a longer one does."""
    used: defaultdict[Path, set[Path]] = defaultdict(set)
    for path in _files():
        for module in _imported(path):
            used[module].add(path)
    short = {path for path in _files() if path.name != "__init__.py" and len(path.read_text().splitlines()) < _SHORT}
    alone = {it for it in short if len(used[it]) == 1 and next(iter(used[it])).parent == it.parent}
    assert {str(it.relative_to(_ROOT)) for it in alone if not _collects(next(iter(used[it])))} == _APART.keys()


def _collects(path: Path) -> bool:
    """Whether this is a package's face, which only passes on what its modules have."""
    return path.name == "__init__.py"


def _imported(path: Path) -> Iterator[Path]:
    """The files of ours that a file imports, or imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            package = _ROOT.joinpath(*node.module.split("."))
            for name in node.names:
                yield next(filter(Path.is_file, (package / f"{name.name}.py", package.with_suffix(".py"))), package)


def test_no_folder_has_more_files_than_a_reader_takes_in_at_once() -> None:
    folders = Counter(path.parent.relative_to(_ROOT) for path in _files())
    assert {str(folder): files for folder, files in folders.items() if files > _FILES} == {}


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
    return (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].endswith((".", ":"))


def test_a_docstring_says_what_is_so_and_asks_nothing() -> None:
    """A predicate's says what is true when it returns true; what a name means is not left to the reader to answer."""
    every = [
        _ROOT / "deploy/kubectl/kubectl-fairlead",
        *(path for one in _CODE for path in (_ROOT / one).rglob("*.py")),
    ]
    asked = {str(path.relative_to(_ROOT)): _questions(path) for path in every if _GENERATED not in path.parents}
    assert {name: lines for name, lines in asked.items() if lines} == {}


def _questions(path: Path) -> list[int]:
    """The lines of docstrings, of attributes too, in which a sentence ends with a question mark."""
    text = path.read_text()
    if "?" not in text:
        return []
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(text)))
    statements = chain.from_iterable(body for body in bodies if isinstance(body, list))
    values = [it.value for it in statements if isinstance(it, ast.Expr)]
    said = [it for it in values if isinstance(it, ast.Constant) and isinstance(it.value, str)]
    return [it.lineno for it in said if _QUESTION.search(str(it.value))]
