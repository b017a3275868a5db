from __future__ import annotations

import errno
import fnmatch
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import HostPath
from backends.linux.globs import Glob, is_glob
from tests.backends.trees import planted_host

TREE = """
dev/ttyUSB0
dev/ttyUSB1
dev/ttyS0
dev/.ttyUSB9
dev/snd/by-path/p -> ../pcmC0
dev/snd/pcmC0
dev/cpu/0/msr
dev/cpu/1/msr
dev/cpu/2/
dev/cpu/microcode
dev/lost -> nowhere
dev/cards -> snd
"""


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("/dev/ttyUSB*", ["/dev/ttyUSB0", "/dev/ttyUSB1"]),
        ("/dev/tty[!U]?", ["/dev/ttyS0"]),
        ("/dev/.tty*", ["/dev/.ttyUSB9"]),
        ("/dev/snd/*", ["/dev/snd/by-path", "/dev/snd/pcmC0"]),
        ("/dev/snd/*/*", ["/dev/snd/by-path", "/dev/snd/by-path/p"]),
        ("/dev/cpu/*/msr", ["/dev/cpu/0", "/dev/cpu/0/msr", "/dev/cpu/1", "/dev/cpu/1/msr", "/dev/cpu/2"]),
        ("/dev/cpu/[1-9]/*", ["/dev/cpu/1", "/dev/cpu/1/msr", "/dev/cpu/2"]),
        ("/dev/lo*", ["/dev/lost"]),
        ("/dev/card*/pcm*", ["/dev/cards", "/dev/cards/pcmC0"]),
        ("/dev/none/*", []),
        ("/dev/ttyS0/*", []),
        ("/dev/tty[", []),
    ],
)
def test_a_glob_matches_names_and_the_directories_on_the_way(tmp_path: Path, pattern: str, found: list[str]) -> None:
    assert sorted(Glob(pattern).matches(planted_host(tmp_path, TREE))) == found


def test_a_linked_directory_is_listed_in_the_hosts_tree(tmp_path: Path) -> None:
    host = planted_host(tmp_path, "dev/away -> /dev/pts\ndev/out -> /\ndev/real/x\ndev/link -> /dev/real")
    assert list(Glob("/dev/link/*").matches(host)) == ["/dev/link/x"]
    assert list(Glob("/dev/away/*").matches(host)) == []  # ours has a /dev/pts
    assert list(Glob("/dev/out/*").matches(host)) == ["/dev/out"]
    assert Glob("/dev/*/*").cannot_list(host, HostPath("/dev/out")) == "/dev/out, a link to /, leads out of /dev"
    assert Glob("/dev/*/*").cannot_list(host, HostPath("/dev/real")) is None


def test_a_directory_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = planted_host(tmp_path, "dev/secret/x")

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert list(Glob("/dev/secret/*").matches(host)) == ["/dev/secret"]
    assert (
        Glob("/dev/*/*").cannot_list(host, HostPath("/dev/secret")) == "/dev/secret cannot be listed: permission denied"
    )


def test_names_that_cannot_be_an_id_are_passed_over(tmp_path: Path) -> None:
    host = planted_host(tmp_path)
    for name in (b"n\xff", b"n\n", b"nice"):
        os.close(os.open(os.fsencode(tmp_path / "dev") + b"/" + name, os.O_CREAT))
    assert list(Glob("/dev/n*").matches(host)) == ["/dev/nice"]


def test_the_fixed_directory_is_the_deepest_without_a_wildcard() -> None:
    assert (Glob("/dev/ttyUSB*").fixed, Glob("/dev/ttyUSB*").deep) == (HostPath("/dev"), False)
    assert (Glob("/dev/cpu/*/msr").fixed, Glob("/dev/cpu/*/msr").deep) == (HostPath("/dev/cpu"), True)


@pytest.mark.parametrize(
    ("path", "leads"),
    [
        ("/", True),
        ("/dev", True),
        ("/dev/cpu", True),
        ("/dev/cpu/0", True),
        ("/dev/cpu/0/msr", False),
        ("/dev/cpu/.0", False),
        ("/dev/cp", False),
        ("/dev/net", False),
        ("/de", False),
    ],
)
def test_a_directory_on_the_way_leads_through(path: str, leads: bool) -> None:
    assert Glob("/dev/cpu/*/msr").leads_through(path) is leads


NAMES = st.text("ab.[", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
PATTERNS = st.lists(st.text("ab.*?[]!-", min_size=1, max_size=4), min_size=1, max_size=3).map("/".join)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.lists(NAMES, min_size=1, max_size=3).map("/".join), max_size=6), PATTERNS)
def test_what_matches_is_taken_and_what_is_taken_matches(paths: set[str], pattern: str) -> None:
    if not is_glob(pattern) or {".", ".."} & set(pattern.split("/")):
        return
    glob = Glob(f"/dev/{pattern}")
    with tempfile.TemporaryDirectory() as root:
        host = planted_host(Path(root))
        for path in paths:
            file = Path(root, "dev", path)
            if not any(parent.is_file() for parent in file.parents):
                file.parent.mkdir(parents=True, exist_ok=True)
                if not file.exists():
                    file.touch()
        there = {f"/dev/{p.relative_to(host.dev)}" for p in host.dev.rglob("*")}
        matches = set(glob.matches(host))
    assert {path for path in matches if glob.takes(path)} == {path for path in there if glob.takes(path)}
    assert all(glob.takes(path) or glob.leads_through(path) for path in matches)


@given(st.text("ab", max_size=3), st.text("ab*?[]", min_size=1, max_size=5))
def test_one_component_is_matched_as_fnmatch_does(name: str, pattern: str) -> None:
    if is_glob(pattern):
        assert Glob(f"/dev/{pattern}").takes(f"/dev/{name}") == fnmatch.fnmatchcase(name, pattern)
