"""Recordings of real machines' /sys and /dev, which public projects keep as test data, as trees to look at.

Their licences keep them out of this repository: they lie beside it, with what unpacks a recording (`build.py`) and what
counts its hardware without Fairlead (`count.py`).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any, Final

CORPUS: Final = Path(__file__).parents[3] / "shared" / "corpus"


def are_here() -> bool:
    """Whether the recordings lie beside the checkout."""
    return CORPUS.joinpath("manifest.tsv").is_file()


def names() -> list[str]:
    """The recordings, in the order of their list."""
    if not are_here():
        return []
    rows = CORPUS.joinpath("manifest.tsv").read_text().splitlines()[1:]
    return [row.partition("\t")[0] for row in rows]


def unpack(name: str, root: Path) -> None:
    """Make a recording's tree; what it lacks and every kernel has is completed."""
    _program("build").build(name, root)


def count(root: Path) -> dict[str, Any]:
    """What hardware there is, by its kind."""
    found: dict[str, Any] = _program("count").count(root)
    return found


def _program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"recordings_{name}", CORPUS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
