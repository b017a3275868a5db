"""What a release takes: one version everywhere, and an audit that sees what was yanked and what is outdated."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import __version__
from tools import audit, versions


def test_every_file_that_is_shipped_names_the_version_of_pyproject() -> None:
    assert list(versions.others()) == []
    assert __version__ == versions.version()


def test_what_python_has_compiled_beside_a_script_names_no_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tmp_path / "deploy/kubectl/__pycache__/kubectl-fairlead.cpython-311.pyc"
    compiled.parent.mkdir(parents=True)
    compiled.write_bytes(b"\xa7\r\r\n\x80 fairlead:9.9.9")
    for shipped in ("Containerfile", "agent/__init__.py"):
        (tmp_path / shipped).parent.mkdir(exist_ok=True)
        (tmp_path / shipped).touch()
    monkeypatch.setattr(versions, "version", lambda: "0.1.0")
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    assert list(versions.others()) == []


@pytest.mark.parametrize(
    "line",
    [
        "podman build --tag fairlead:9.9.9 .",
        "    newTag: 9.9.9",
        '    newTag: "9.9.9"',
        "app.kubernetes.io/version: 9.9.9",
        'org.opencontainers.image.version="9.9.9"',
        "appVersion: v9.9.9",
        "version: 9.9.9",
        '__version__: Final = "9.9.9"',
    ],
)
def test_each_way_to_name_a_version_is_found_with_its_line(line: str) -> None:
    assert list(versions.named(f"# something\n{line}\n")) == [(2, "9.9.9")]


def test_what_is_yanked_is_named_with_its_reason() -> None:
    said = 'Resolved 1 package\n + attrs==21.1.0\nwarning: `attrs==21.1.0` is yanked (reason: "Broken.")\n'
    assert audit.yanked(said) == ['`attrs==21.1.0` is yanked (reason: "Broken.")']
    assert audit.yanked("Resolved 1 package\nwarning: something else\n") == []


def test_what_is_outdated_is_named_with_both_versions() -> None:
    now = "click==8.1.0 \\\n    --hash=sha256:0\nsix==1.17.0\nanyio==4.16.0 ; python_version < '4'\n"
    newest = "click==8.5.1 \\\n    --hash=sha256:1\nanyio==4.16.0\n"
    assert list(audit.outdated(now, newest)) == ["click 8.1.0 → 8.5.1", "six 1.17.0 → no longer needed"]
