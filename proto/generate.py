"""Generates the Python modules from the .proto sources; `--check` only says whether they still match.

There is no import package `proto`: this file is run, never imported.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).resolve().parent
TARGETS = {HERE / "kubelet": HERE.parent / "agent/kubelet/api", HERE / "fairlead": HERE.parent / "tests/console/api"}


def generate(sources: Path, target: Path) -> None:
    """One betterproto package for each proto package in `sources`."""
    files = sorted(str(path) for path in sources.rglob("*.proto"))
    plugin = Path(sys.executable).with_name("protoc-gen-python_betterproto")
    arguments = [f"--plugin={plugin}", f"-I{sources}", f"--python_betterproto_out={target}", *files]
    if code := protoc.main(["protoc", *arguments]):
        sys.exit(f"proto/generate.py: protoc failed with {code}")


def modules(target: Path) -> dict[str, str]:
    """The generated packages below `target` and their text."""
    return {str(path.relative_to(target)): path.read_text() for path in sorted(target.rglob("__init__.py"))}


def main() -> None:
    """Generate, or compare with what is committed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit 1 if the committed modules do not match")
    check = parser.parse_args().check
    for sources, target in TARGETS.items():
        if not check:
            generate(sources, target)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            generate(sources, Path(scratch))
            if modules(Path(scratch)) != modules(target):
                sys.exit(f"proto/generate.py: {target} does not match {sources}; run `make proto`")


if __name__ == "__main__":
    main()
