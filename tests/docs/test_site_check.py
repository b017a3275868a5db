"""`make site` refuses pages that load anything from another host, and shows what a block's mark says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.pages import MARKS, REPOSITORY
from tools.site_check import loads_elsewhere


@pytest.mark.parametrize(
    "page",
    [
        '<script src="https://cdn.example/x.js"></script>',
        '<link rel="stylesheet" href="//fonts.example/css">',
        '<link rel="preconnect" href="https://fonts.example">',
        '<img srcset="a.png 1x, https://pictures.example/a.png 2x">',
        '<p style="background: url(http://pictures.example/b.png)">',
        "<style>@import 'https://fonts.example/c.css';</style>",
    ],
)
def test_what_is_loaded_from_elsewhere_is_named_with_its_page(tmp_path: Path, page: str) -> None:
    (tmp_path / "page.html").write_text(page)
    (found,) = loads_elsewhere(tmp_path)
    assert found.startswith("page.html loads ")
    assert ".example" in found


def test_a_link_that_a_reader_may_follow_and_a_file_of_the_site_are_fine(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text('<a href="https://semver.org">SemVer</a><script src="assets/x.js"></script>')
    (tmp_path / "style.css").write_text("body { background: url(assets/b.png) }")
    assert not list(loads_elsewhere(tmp_path))


def test_a_style_that_loads_a_font_is_named(tmp_path: Path) -> None:
    (tmp_path / "style.css").write_text("@font-face { src: url('https://fonts.example/d.woff2') }")
    assert list(loads_elsewhere(tmp_path)) == ["style.css loads https://fonts.example/d.woff2"]


def test_every_mark_of_a_block_has_words_on_the_site() -> None:
    hooks = (REPOSITORY / "tools/site_hooks.py").read_text()  # needs mkdocs, which is not here
    marks = re.search(r"^MARKS: Final = (\{.*?\})$", hooks, re.MULTILINE | re.DOTALL)
    assert marks is not None
    assert set(ast.literal_eval(marks[1])) == MARKS - {""}
