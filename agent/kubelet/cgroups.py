"""Finds the pods that run, by their cgroups: what a kubelet that lost its record does not know any more.

The kubelet gives a pod's devices to another one once nothing of the pod runs, its sandbox included
(`SyncTerminatingPod` of pkg/kubelet): a pod whose cgroup has processes has its devices. Which of its containers has which of
them is no question then. A container's own devices can be seen, too, but not where it matters: a program of cgroup v2's
device controller is instructions of the container runtime's making (BPF_PROG_QUERY on the cgroup, CAP_SYS_ADMIN), whose
shape differs by runtime and which a privileged container has not; its /dev is to be read by /proc/PID/root alone
(CAP_SYS_PTRACE), and lacks what has no node: network functions, mounts, what a process has open and was unlinked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from agent.history.notes import uid_in
from backends.linux import files

_DEEPEST: Final = (
    6  # below the root: kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/…-pod….slice
)
_LEAVES: Final = (".service", ".scope", ".mount", ".socket", ".swap")  # of systemd: no pod is below them
_BYTES: Final = 1 << 20


def running(sys: Path) -> frozenset[str] | None:
    """UIDs of the pods that have a process; None if no pod's cgroup is to be seen here. Blocks.

    A container without the host's /sys sees its own cgroup alone, or none.

    Args:
        sys: where the host's /sys is seen.
    """
    root = sys / "fs/cgroup"
    if not (root / "cgroup.controllers").exists() and (root / "pids").is_dir():  # of cgroup v1 one hierarchy is enough
        root /= "pids"
    found = dict[str, bool]()
    for uid, group in _pods(root, _DEEPEST):
        found[uid] = found.get(uid, False) or _is_populated(group)
    return frozenset(uid for uid, is_populated in found.items() if is_populated) if found else None


def _pods(group: Path, depth: int) -> Iterator[tuple[str, Path]]:
    """The cgroups of pods below this one, with their UIDs."""
    for inner in _below(group):
        if uid := uid_in(os.fsencode(inner.name)):
            yield uid, inner
        elif depth > 1 and not inner.name.endswith(_LEAVES):
            yield from _pods(inner, depth - 1)


def _below(group: Path) -> list[Path]:
    with suppress(OSError), os.scandir(group) as entries:  # it may have gone meanwhile
        return [Path(it.path) for it in entries if it.is_dir(follow_symlinks=False)]
    return []


def _is_populated(group: Path) -> bool:
    """Has it, or one below it, a process? Of cgroup v2 the kernel says so (cgroup.events, cgroup-v2.rst)."""
    with suppress(OSError):
        return b"populated 1" in files.read(group / "cgroup.events", _BYTES)
    with suppress(OSError):
        if files.read(group / "cgroup.procs", _BYTES).strip():
            return True
    return any(map(_is_populated, _below(group)))
