"""What the plugins' own documentation shows: each file becomes what is written down beside it, and what is lost is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.importing.helpers import import_text, loads

_FILES = sorted(Path(__file__).parent.joinpath("documented").glob("*.yaml"))

_LOSING = {"intel-wsl", "rdma", "rocm"}
"""Those of which something cannot be carried over."""


@pytest.mark.parametrize("file", _FILES, ids=lambda file: file.stem)
def test_what_a_plugin_documents_becomes_what_is_written_down(file: Path) -> None:
    found = import_text(file.read_text())
    assert found.toml == file.with_suffix(".toml").read_text()
    loads(found)
    assert found.lossless is (file.stem not in _LOSING)
