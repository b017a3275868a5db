"""What the tests of all formats ask of a result."""

from __future__ import annotations

import tempfile
import textwrap
from pathlib import Path
from typing import Any

from agent.config import load
from agent.importing import Imported, import_files


def imported(text: str, **options: Any) -> Imported:
    """The import of an indented text, which `load` has accepted."""
    found = import_text(textwrap.dedent(text), **options)
    loads(found)
    return found


def loads(found: Imported) -> list[str]:
    """The names of the resources that our own configuration makes of it."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".toml") as file:
        file.write(found.toml)
        file.flush()
        return [resource.name for resource in load(Path(file.name)).resources]


def said(found: Imported) -> list[str]:
    """Every remark, as the command prints it after the file's name."""
    return [f"{remark.line}: {remark}" for remark in found.remarks]


def import_text(
    text: str, source: str | None = None, domain: str | None = None, entry: str | None = None, **environment: str
) -> Imported:
    """The import of one file."""
    return import_files({"old.yaml": text}, source, domain, entry, environment)
