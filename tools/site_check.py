"""Checks that no page of the built site loads anything from another host: python tools/site_check.py DIRECTORY.

Links that a reader may follow are no matter; scripts, styles, fonts, pictures and frames are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

_LOADING_RELS: Final = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "modulepreload"}
_LOADING: Final = {"src", "srcset", "data", "poster", "background"}
_ELSEWHERE: Final = re.compile(r"(?:https?:)?//[^\s\"')]+")
_IN_STYLE: Final = re.compile(r"(?:url\(\s*|@import\s+)[\"']?((?:https?:)?//[^\s\"')]+)")


class _Page(HTMLParser):
    """Collects what a page loads from other hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        loading = [value for name, value in said.items() if name in _LOADING]
        if tag == "link" and _LOADING_RELS & set(said.get("rel", "").split()):
            loading.append(said.get("href", ""))
        self.loaded += [found for value in loading for found in _ELSEWHERE.findall(value)]
        self.loaded += _IN_STYLE.findall(said.get("style", ""))


def loads_elsewhere(site: Path) -> Iterator[str]:
    """A sentence for each thing that the site loads from another host."""
    for path in sorted(site.rglob("*")):
        if path.suffix == ".html":
            page = _Page()
            page.feed(path.read_text())
            found = page.loaded + _IN_STYLE.findall(path.read_text())
        elif path.suffix == ".css":
            found = _IN_STYLE.findall(path.read_text())
        else:
            continue
        yield from (f"{path.relative_to(site)} loads {url}" for url in dict.fromkeys(found))


def main() -> None:
    """Print what is loaded from elsewhere, and exit with 1 if there is any, or no page at all."""
    site = Path(sys.argv[1])
    pages = len(list(site.rglob("*.html")))
    found = list(loads_elsewhere(site))
    print(*found, f"{pages} pages in {site}, {len(found)} loads from other hosts.", sep="\n")
    sys.exit(bool(found) or not pages)


if __name__ == "__main__":
    main()
