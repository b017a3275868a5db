"""Fixture trees written as text: a host's /dev, /sys and the rest below one directory.

One entry a line: `dev/kvm c 10:232` and `dev/loop0 b 7:0` are device nodes, `dev/by-id/x -> ../y` is a link,
`sys/a/numa_node = 1` a file with that line in it (`\\n` begins another), `dev/net/` a directory, `dev/log`
an empty file. Directories above an entry come by themselves; `#` starts a comment line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Final

from backends.base import Host
from tests.needs import CORPUS, RECORDINGS, skip_without
from tests.nodes import make_node

_MEMORY: Final = Path("/dev/shm")
_ROOM: Final = 1 << 30
"""Bytes; the largest recording takes 50 MB."""

HOST: Final = """\
[host]
root = "{root}"
sys = "{root}/sys"
dev = "{root}/dev"
proc = "{root}/proc"
run = "{root}/run"

"""
"""The configuration of a made-up machine below a directory."""


def plant(root: Path, text: str) -> None:
    """Make the entries below `root`."""
    for line in text.splitlines():
        if (entry := line.strip()) and not entry.startswith("#"):
            _plant(root, entry)


def planted_host(root: Path, text: str = "") -> Host:
    """A host whose trees are these."""
    for name in ("dev", "sys", "proc", "run"):
        (root / name).mkdir(parents=True, exist_ok=True)
    plant(root, text)
    return Host.below(root)


def recorded_host(root: Path, name: str) -> Host:
    """The host that a recording of the corpus is of; without the recordings, or device nodes, the test is skipped."""
    skip_without(RECORDINGS, "device nodes")
    environment = {**os.environ, "RAW": "/nonexistent"}  # from what was recorded, not from the repositories themselves
    subprocess.run(
        [sys.executable, CORPUS / "build.py", name, root], check=True, env=environment, stdout=subprocess.DEVNULL
    )
    return Host.below(root)


def large_tree() -> tempfile.TemporaryDirectory[str]:
    """A directory for thousands of files, in memory where that has room.

    On a disk each may take a millisecond: ext4 gives no inode again that was let go a moment ago, and looks past all of those.
    """
    found = os.statvfs(_MEMORY) if os.access(_MEMORY, os.W_OK) else None
    has_room = found is not None and found.f_bavail * found.f_frsize >= _ROOM
    return tempfile.TemporaryDirectory(prefix="fl", dir=_MEMORY if has_room else None)


def entries(root: Path) -> list[Path]:
    """All that is no directory, in a fixed order."""
    found = (Path(at) / name for at, names, files in os.walk(root) for name in (*names, *files))
    return sorted(path for path in found if path.is_symlink() or not path.is_dir())


@contextmanager
def restored(root: Path) -> Iterator[Callable[[Path], None]]:
    """Yields what takes an entry away; in the end each is in its place again, whatever is there by then.

    Many times faster than planting the tree again.
    """
    taken: list[Path] = []
    with tempfile.TemporaryDirectory(dir=root.parent) as aside:

        def take(path: Path) -> None:
            path.rename(Path(aside, str(len(taken))))
            taken.append(path)

        try:
            yield take
        finally:
            for number, path in reversed(list(enumerate(taken))):
                if path.is_dir() and not path.is_symlink():
                    path.rmdir()
                else:
                    path.unlink(missing_ok=True)
                Path(aside, str(number)).rename(path)


_SPOILS: Sequence[Callable[[Path, Random], object]] = (
    lambda path, chance: None,
    lambda path, chance: path.write_bytes(chance.randbytes(chance.randrange(200))),
    lambda path, chance: path.write_bytes(b"9" * 4000),
    lambda path, chance: path.symlink_to("/proc/self/mem"),  # opens, and cannot be read
    lambda path, chance: path.mkdir(),
)


@contextmanager
def spoilt(root: Path, paths: Iterable[Path], seed: int, share: float) -> Iterator[None]:
    """For a while, that share of these links and files is missing or garbage, the same for the same seed."""
    chance = Random(seed)
    with restored(root) as take:
        for path in paths:
            if chance.random() < share:
                is_file = not path.is_symlink()
                take(path)
                if is_file:
                    chance.choice(_SPOILS)(path, chance)
        yield


def _plant(root: Path, entry: str) -> None:
    if " -> " in entry:
        name, target = entry.split(" -> ")
        link = _fresh(root / name)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    elif " =" in entry:
        name, _, value = (part.strip() for part in entry.partition(" ="))
        _fresh(root / name).write_text(value.replace("\\n", "\n") + "\n")
    elif entry.endswith("/"):
        (root / entry).mkdir(parents=True, exist_ok=True)
    elif entry.count(" ") == 2:
        name, kind, numbers = entry.split(" ")
        major, minor = numbers.split(":")
        make_node(_fresh(root / name), kind, int(major), int(minor))
    else:
        _fresh(root / entry).touch()


def _fresh(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
