"""What a release takes: one version everywhere, and an audit that sees what was yanked and what is outdated."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import __version__
from tools import audit, demo_speed, versions


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


# --- the demo, in the gate ---

QUIET = [(0.2, 1.5), (0.3, 1.6), (0.3, 1.8), (28.0, 1.2)] * 4
BUSY = [(1.4, 1.1), (3.0, 2.1), (7.6, 2.6), (44.9, 7.5)] * 4
"""As measured where four others compiled; what went by without a CPU is no part of it."""
KUBELET_IN_THE_WAY = [(1.3, 0.9), (5.8, 40.3), (7.8, 43.0), (31.7, 2.3)] * 4
"""As measured when the simulated kubelet's answers kept the loop for 45 ms."""


@pytest.mark.parametrize(
    ("changes", "objection"),
    [
        (QUIET, ""),
        (BUSY, ""),
        (KUBELET_IN_THE_WAY, "half of the demo's changes take us 21"),
        ([(0.3, 1.5), (0.3, 40.0), (0.3, 1.5)] * 4, "a quarter of the demo's changes take us 40"),
        (QUIET[:9], "has 9 changes"),
    ],
)
def test_a_demo_that_shows_us_slow_is_refused_and_one_on_a_busy_machine_is_not(
    changes: list[tuple[float, float]], objection: str
) -> None:
    document = {"changes": [{"kernel_ms": kernel, "fairlead_ms": ours} for kernel, ours in changes]}
    found = demo_speed.objection(document)
    assert (objection in found) if objection else not found
