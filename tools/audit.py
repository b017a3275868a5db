"""Says which pinned distributions were yanked and which are outdated: python -m tools.audit [LOCK...]. It asks the index.

Yanked is exit code 1: whoever published it says that it should not be used. Outdated is information. Neither pip's nor
uv's index tells of vulnerabilities; pip-audit, where it is installed, asks a service that does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_REQUIREMENTS: Final = Path(__file__).resolve().parents[1] / "requirements"
_UV: Final = Path(sys.executable).with_name("uv")
_PINNED: Final = re.compile(r"^([\w.-]+)==([^\s;\\]+)", re.MULTILINE)
_YANKED: Final = re.compile(r"^warning: (.*\bis yanked\b.*)$", re.MULTILINE)


def yanked(said: str) -> list[str]:
    """The warnings of uv that name something yanked."""
    return _YANKED.findall(said)


def outdated(now: str, newest: str) -> Iterator[str]:
    """A line for each distribution that two locks pin differently."""
    versions = dict(_PINNED.findall(newest))
    for name, version in dict(_PINNED.findall(now)).items():
        if (other := versions.get(name, "no longer needed")) != version:
            yield f"{name} {version} → {other}"


def _asked(*arguments: str) -> str:
    """What uv says on stderr.

    Raises:
        subprocess.CalledProcessError: it failed; what it said has been printed.
    """
    done = subprocess.run([_UV, "pip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    done.check_returncode()
    return done.stderr


def main() -> None:
    """Ask for each lock, or for those that are named: `run`, `dev`."""
    names = sys.argv[1:] or sorted(path.stem for path in _REQUIREMENTS.glob("*.txt"))
    bad = False
    for name in names:
        lock = _REQUIREMENTS / f"{name}.txt"
        with tempfile.TemporaryDirectory() as scratch:
            newest = Path(scratch, "newest.txt")
            common = ("--universal", "--python-version", "3.11", "--output-file", str(newest))
            _asked("compile", "--upgrade", *common, str(lock.with_suffix(".in")))
            said = _asked("install", "--dry-run", "--no-deps", "--target", scratch, "--requirement", str(lock))
            gone, old = yanked(said), list(outdated(lock.read_text(), newest.read_text()))
        bad |= bool(gone)
        print(f"{lock.name}: {len(gone)} yanked, {len(old)} outdated", *gone, *old, sep="\n  ")
    if (tool := shutil.which("pip-audit")) is not None:
        lock = _REQUIREMENTS / "run.txt"
        bad |= bool(
            subprocess.run([tool, "--require-hashes", "--disable-pip", "--requirement", lock], check=False).returncode
        )
    else:
        print("Nobody was asked about vulnerabilities: there is no pip-audit here.")
    sys.exit(bad)


if __name__ == "__main__":
    main()
