"""Hooks of mkdocs: they make pages of the files in the project's root, and a title of each mark on a command block."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File, Files

ROOT: Final = Path(__file__).resolve().parents[1]
ROOT_PAGES: Final = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
}
"""File in the project's root → page of the site."""

MARKS: Final = {"cluster": "on a cluster", "node": "on a node, as root", "sources": "in the sources"}
"""Mark after a block's language, which no renderer shows → the title that the site gives the block."""

_LINK: Final = re.compile(r"(?P<text>\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s#]*)(?P<anchor>#[^)\s]*)?\)")
_MARKED: Final = re.compile(rf"^```(?P<language>\w+) (?P<mark>{'|'.join(MARKS)})$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages whose sources are in the project's root."""
    for source, page in ROOT_PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Say visibly where a block's commands are for, and mend the links for the site."""
    where = {page: source for source, page in ROOT_PAGES.items()}
    source = where.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = _MARKED.sub(lambda it: f'```{it["language"]} title="{MARKS[it["mark"]]}"', markdown)
    return _LINK.sub(lambda link: _on_site(link, posixpath.dirname(source), page.file.src_uri), markdown)


def _on_site(link: re.Match[str], directory: str, page: str) -> str:
    """The link as the site has it; what is only in the sources is named and not linked."""
    target = link["target"]
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = posixpath.normpath(posixpath.join(directory, target))
    goal = ROOT_PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    if goal is None and (ROOT / path).exists():
        return link["text"][1:-1]
    if goal is None:
        return link[0]  # mkdocs complains about it
    return f"{link['text']}({posixpath.relpath(goal, posixpath.dirname(page) or '.')}{link['anchor'] or ''})"
