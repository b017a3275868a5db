"""A typo in a number of tokens is refused with the number that fits, before any ID is made."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from agent.config import load
from agent.config.problems import ConfigError
from agent.runtime import limits
from backends.base import Backend
from backends.chardev import MOST_TOKENS, finder, nodes
from backends.chardev.finder import Group
from tests.e2e.process import finish

FITS = limits.most_tokens()

GPU = '[[resource]]\nname = "a.com/gpu"\nbackend = "gpu"\nreplicas = {count}\n'
GLOB = '[[resource]]\nname = "a.com/tty"\nbackend = "chardev"\npaths = [{{ path = "/dev/tty*" }}]\ncount = {count}\n'
POOL = '[[resource]]\nname = "a.com/hca"\nbackend = "infiniband"\nshared = {count}\n'
GROUPS = '[[resource]]\nname = "a.com/many"\nbackend = "chardev"\n' + "".join(
    f'[[resource.groups]]\npaths = [{{{{ path = "/dev/node{n}" }}}}]\ncount = {{count}}\n' for n in range(20)
)


def problems(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "config.toml").write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(tmp_path / "config.toml")
    return [str(problem) for problem in raised.value.problems]


@pytest.mark.parametrize(
    ("text", "key", "most"),
    [
        (GPU, "replicas", f"{FITS:,}"),
        (GLOB, "count", str(FITS)),
        (POOL, "shared", "100000"),
        (GROUPS, "count", str(FITS)),
    ],
)
def test_more_than_any_list_holds_is_refused_before_an_id_is_made(
    tmp_path: Path, text: str, key: str, most: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: object) -> None:
        raise AssertionError("an ID was made")

    monkeypatch.setattr(nodes, "_ids", made)
    monkeypatch.setattr(finder, "tokens", made)
    monkeypatch.setattr(Backend, "ids", made)
    found = problems(tmp_path, text.format(count=3_000_000))
    assert found
    for problem in found:
        assert re.search(rf"config\.toml:\d+: .*{key}: is 3,?000,?000; .*\b{most}\b", problem)


def test_groups_that_do_not_fit_together_are_refused_before_all_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    tokens = nodes._ids

    def noted(group: Group, path: str) -> tuple[str, ...]:
        made.append(path)
        return tokens(group, path)

    monkeypatch.setattr(nodes, "_ids", noted)
    (problem,) = problems(tmp_path, GROUPS.format(count=150_000))
    assert "would pass the 4 MiB that a kubelet receives: at most" in problem
    assert set(made) == {"/dev/node0", "/dev/node1"}, "the others' IDs were never made"


def test_what_fits_is_taken(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(GPU.format(count=FITS))
    assert load(tmp_path / "config.toml").resources[0].spec.replicas == FITS
    assert MOST_TOKENS == FITS
    for text in (GPU, GLOB):
        assert problems(tmp_path, text.format(count=FITS + 1))


def test_the_number_that_fits_is_exact() -> None:
    sizes = [limits.slot_bytes(str(n), None) for n in range(FITS + 1)]
    assert sum(sizes[:FITS]) <= limits.MESSAGE_LIMIT < sum(sizes)


def test_the_command_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(GPU.format(count=3_000_000))
    code, out, err = asyncio.run(finish("validate", "--config", str(tmp_path / "config.toml")))
    assert code == 2
    assert f"at most {FITS:,} IDs" in " ".join((out + err).split())
