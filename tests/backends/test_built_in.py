"""A built-in backend is named wherever its users and this project look for it: a failure says what to add where."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from backends import registry

_ROOT: Final = Path(__file__).parents[2]
_INDEPENDENT: Final = "Backends do not import each other"


def _page(name: str) -> Path:
    """The page that the README's table of hardware links to for a backend."""
    row = re.search(rf"^\| .* \| \[`{name}`\]\((docs/[\w-]+\.md)", (_ROOT / "README.md").read_text(), re.MULTILINE)
    return _ROOT / (row[1] if row else f"docs/{name}.md")


def _lacking(name: str) -> Iterator[str]:
    """What has to be added for a backend of that name."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    if f"backends.{name}" not in next(it["modules"] for it in contracts if it["name"] == _INDEPENDENT):
        yield f"pyproject.toml: 'backends.{name}' in the modules of the contract {_INDEPENDENT!r}"
    if not any((_ROOT / "tests/backends" / it).exists() for it in (f"test_{name}.py", name)):
        yield f"tests/backends/test_{name}.py, or a folder tests/backends/{name}"
    page = _page(name)
    if not page.exists() or f'backend = "{name}"' not in page.read_text():
        yield f"docs/{page.name}: its page, or a section of another kind's, with its options and what they do"
    examples = (_ROOT / "deploy/kubernetes/examples").glob("*/config.toml")
    if not any(name == one["backend"] for it in examples for one in tomllib.loads(it.read_text())["resource"]):
        yield f"deploy/kubernetes/examples/{name}/config.toml and pod.yaml, and their row in docs/installing.md, Examples"
    for file, pattern, what in (
        ("config.example.toml", rf'^#?backend = "{name}"$', "a resource with all its keys, each with its default"),
        ("mkdocs.yml", rf"- {page.name}$", f"{page.name} among the pages of Hardware"),
        ("README.md", rf"^\| .* \| \[`{name}`\]\(docs/", "a row in the table of What it offers"),
        ("docs/installing.md", rf"^\| `{name}` \| ", "a row in the table of Rights"),
        (
            "docs/installing.md",
            rf"(?s)\n### What the unit may do\n(?:(?!\n### ).)*`{name}`",
            "what of it works with the service's rights, in What the unit may do",
        ),
        ("docs/configuration.md", rf"^### {name}$", "run `make generated`"),
        ("deploy/helm/fairlead/values.schema.json", rf"a resource of the backend {name}\b", "run `make chart`"),
        ("CHANGELOG.md", rf"`{name}`", "a line that says what it offers"),
    ):
        if not re.search(pattern, (_ROOT / file).read_text(), re.MULTILINE):
            yield f"{file}: {what}"


@pytest.mark.parametrize("name", registry.names())
def test_a_kind_of_hardware_is_found_wherever_a_user_looks_for_it(name: str) -> None:
    assert not (found := list(_lacking(name))), "add to\n  " + "\n  ".join(found)


def test_what_a_new_kind_of_hardware_lacks_is_said() -> None:
    assert [it.split(":")[0].split(",")[0] for it in _lacking("tpm")] == [
        "pyproject.toml",
        "tests/backends/test_tpm.py",
        "docs/tpm.md",
        "deploy/kubernetes/examples/tpm/config.toml and pod.yaml",
        "config.example.toml",
        "mkdocs.yml",
        "README.md",
        "docs/installing.md",
        "docs/installing.md",
        "docs/configuration.md",
        "deploy/helm/fairlead/values.schema.json",
        "CHANGELOG.md",
    ]
