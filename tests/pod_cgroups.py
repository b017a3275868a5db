"""Shows which pods run as a node does, by their cgroups: what else an agent would take for forgotten may have ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_OWN_POD: Final = "5f0e7b4c-1f7d-4d3f-9b1e-2a6c8d9e0f11"


def show_running(sys: Path, uids: Iterable[str]) -> None:
    """Make the cgroups of these pods, as far as the agent looks: with those of the node's own pod there are always some."""
    pods, wanted = sys / "fs/cgroup/kubepods", {*uids, _OWN_POD}
    pods.mkdir(parents=True, exist_ok=True)
    there = {path.name.removeprefix("pod") for path in pods.iterdir()}
    for uid in there - wanted:
        shutil.rmtree(pods / f"pod{uid}")
    for uid in sorted(wanted - there):
        group = pods / f"pod{uid}"
        group.mkdir()
        (group / "cgroup.events").write_text("populated 1\n")
