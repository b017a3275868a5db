"""Two looks at a directory of which no event tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.discovery.paths import Change, Entries, differences, entries_of

A = {"a": (1, 1)}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        (None, None, []),
        (None, A, [("", Change.CREATED), ("a", Change.CREATED)]),
        (A, None, [("", Change.REMOVED)]),
        (A, A, []),
        (A, {"a": (1, 2)}, [("a", Change.CHANGED)]),
        (A, {"a": (2, 1)}, [("a", Change.CREATED)]),
        (A, {"b": (1, 1)}, [("a", Change.REMOVED), ("b", Change.CREATED)]),
    ],
)
def test_what_differs_is_told(before: Entries, now: Entries, told: list[tuple[str, Change]]) -> None:
    assert list(differences(before, now)) == told


def test_a_directory_is_read_with_links_as_themselves(tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "file").touch()
    found = entries_of(tmp_path)
    assert found is not None
    assert set(found) == {"dangling", "file"}
    assert entries_of(tmp_path / "file") is None
    assert entries_of(tmp_path / "missing") is None
