"""The doctor sees where a resource goes by CDI and cannot, or its containers would have nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.config import AgentConfig, Config
from agent.console.doctor import Finding, Level, Patient
from agent.console.doctor.host import cdi
from backends.base import Edits, Resource, ResourceSpec
from backends.stub import StubOptions
from tests.backends.trees import planted_host


def look(root: Path, edits: Edits = "cdi", tree: str = "run/cdi/") -> Finding:
    resource = Resource("example.com/toy", ResourceSpec("stub", StubOptions([]), edits=edits))
    (finding,) = cdi(Patient(Config(AgentConfig(), planted_host(root, tree), (resource,))))
    assert (finding.level is Level.FINE) == (finding.mend == "")
    return finding


def test_a_place_for_specifications_is_needed_only_where_a_resource_goes_by_cdi(tmp_path: Path) -> None:
    assert look(tmp_path, "inline", "run/cdi = in the way").level is Level.FINE
    assert look(tmp_path, tree="").found == f"{tmp_path}/run/cdi cannot be written: example.com/toy cannot go by CDI."
    (tmp_path / "run/cdi").unlink()
    assert look(tmp_path, tree="").level is Level.FINE
    assert look(tmp_path).found == f"{tmp_path}/run/cdi can be written."


@pytest.mark.parametrize(
    ("lines", "level"),
    [
        ("version = 2", Level.WARNING),
        ("version = 2\\n  enable_cdi = true", Level.FINE),
        ("version = 3", Level.FINE),
        ("version = 3\\n  enable_cdi = false", Level.WARNING),
    ],
)
def test_a_containerd_that_would_ignore_the_names_is_told(tmp_path: Path, lines: str, level: Level) -> None:
    finding = look(tmp_path, tree=f"etc/containerd/config.toml = {lines}")
    assert finding.level is level
    assert look(tmp_path, "both").level is Level.FINE  # they have all inline, too
    assert ("starts containers without what example.com/toy should give them" in finding.found) is bool(level)
