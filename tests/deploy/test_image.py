"""What `make pin-base` writes into the Containerfile, and how the image is called where it is built."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.deploy.manifests import REPOSITORY

_TAG: Final = re.findall(r"^ARG BASE=([^@\n]+)", (REPOSITORY / "Containerfile").read_text(), re.MULTILINE)[0]
_SKOPEO: Final = f"""#!/bin/sh
[ "$*" = "inspect --raw docker://{_TAG}" ] && cat "$INDEX"
"""


def _pin(sources: Path, architectures: Sequence[str]) -> tuple[int, str, str]:
    """Run it where a registry has an index of these; its exit code, its complaint, and the digest of that index."""
    index = sources / "index.json"
    index.write_text(json.dumps({"manifests": [{"platform": {"architecture": it}} for it in architectures]}, indent=1))
    environment = os.environ | {"PATH": f"{sources}:{os.environ['PATH']}", "INDEX": str(index)}
    done = subprocess.run(
        [sources / "deploy/image/pin.sh"], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr, hashlib.sha256(index.read_bytes()).hexdigest()


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    (tmp_path / "deploy/image").mkdir(parents=True)
    shutil.copy(REPOSITORY / "deploy/image/pin.sh", tmp_path / "deploy/image")
    shutil.copy(REPOSITORY / "Containerfile", tmp_path)
    (tmp_path / "skopeo").write_text(_SKOPEO)
    (tmp_path / "skopeo").chmod(0o755)
    return tmp_path


def test_the_base_is_pinned_by_the_digest_of_its_index_and_again_by_the_next_one(sources: Path) -> None:
    before = (sources / "Containerfile").read_text()
    for architectures in (["amd64", "arm64"], ["amd64", "arm64", "s390x"]):
        code, _, digest = _pin(sources, architectures)
        assert code == 0
        pinned = (sources / "Containerfile").read_text()
        assert f"\nARG BASE={_TAG}@sha256:{digest}\n" in pinned
        assert re.sub("@sha256:[0-9a-f]{64}", "", pinned) == re.sub("@sha256:[0-9a-f]{64}", "", before)


def test_a_base_that_lacks_a_processor_of_ours_is_not_pinned(sources: Path) -> None:
    before = (sources / "Containerfile").read_text()
    code, complaint, _ = _pin(sources, ["amd64"])
    assert (code, complaint) == (1, f"{_TAG} has no image for arm64\n")
    assert (sources / "Containerfile").read_text() == before


def test_the_image_says_the_version_of_the_sources() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    text = (REPOSITORY / "Containerfile").read_text()
    assert set(re.findall(r"\b\d+\.\d+\.\d+\b", text)) == {version}
