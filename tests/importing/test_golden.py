"""A whole file of each format: what comes out of it, line by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from agent.importing import FORMATS
from tests.importing.helpers import import_text, loads, said

_GOLDEN = Path(__file__).parent / "golden"


@pytest.mark.parametrize("source", FORMATS)
def test_the_import_of_a_whole_file_is_as_written_down(source: str) -> None:
    found = import_text((_GOLDEN / f"{source}.yaml").read_text())
    assert found.toml == (_GOLDEN / f"{source}.toml").read_text()
    assert said(found) == (_GOLDEN / f"{source}.txt").read_text().splitlines()


@pytest.mark.parametrize("source", FORMATS)
def test_what_is_commented_out_as_a_suggestion_would_load_too(source: str) -> None:
    found = import_text((_GOLDEN / f"{source}.yaml").read_text())
    everything = re.sub(r"^#(?! \S)", "", found.toml, flags=re.MULTILINE)
    assert len(loads(replace(found, toml=everything))) == everything.count("[[resource]]")
