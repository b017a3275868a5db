"""Says where a file that is shipped names another version of Fairlead than pyproject.toml: python -m tools.versions."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
_SHIPPED: Final = ("Containerfile", "agent/__init__.py", "deploy")
_NUMBER: Final = r"[\"']?v?(\d+\.\d+\.\d+[\w.+-]*)"
_NAMES: Final = re.compile(
    rf"fairlead:{_NUMBER}|newTag: {_NUMBER}|app\.kubernetes\.io/version: {_NUMBER}|image\.version={_NUMBER}"
    rf"|^(?:appVersion|version): {_NUMBER}|^__version__: Final = {_NUMBER}",
    re.MULTILINE,
)


def version() -> str:
    """The version that pyproject.toml has."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def named(text: str) -> Iterator[tuple[int, str]]:
    """Each version of Fairlead that a file names, with its line."""
    for found in _NAMES.finditer(text):
        yield text.count("\n", 0, found.start()) + 1, next(filter(None, found.groups()))


def others() -> Iterator[str]:
    """A sentence for each place that names another version."""
    ours = version()
    for shipped in _SHIPPED:
        place = ROOT / shipped
        for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if file.is_file() and "__pycache__" not in file.parts:  # as where a test has loaded what is shipped
                for line, found in named(file.read_text()):
                    if found != ours:
                        yield f"{file.relative_to(ROOT)}:{line}: {found}, and pyproject.toml has {ours}"


if __name__ == "__main__":
    wrong = list(others())
    print(*wrong, sep="\n", end="\n" if wrong else "")
    sys.exit(bool(wrong))
