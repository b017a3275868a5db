"""Each recipe does what its page shows, on a made-up node that has the device."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from click.testing import CliRunner

from agent.cli.commands import fairlead
from tests.backends.trees import HOST, planted_host
from tests.docs.pages import Block, blocks, text
from tests.docs.recipe_nodes import NODES

_PAGE: Final = "docs/recipes.md"
_GETS: Final = re.compile(r"^A container gets ((?:`[^`]+`(?:,\s)?)+)\.", re.MULTILINE)
_KUBELETS_OWN: Final = re.compile(r"cpu|memory|hugepages-.*")


@dataclass(frozen=True)
class Recipe:
    """One section of the page of recipes."""

    heading: str
    configuration: str
    pod: Mapping[str, Any]
    shown: str
    """What discover prints."""
    nodes: frozenset[str]
    """What a container with what the pod asks for has in its /dev."""

    @property
    def asked(self) -> dict[str, int]:
        """What the pod asks for, beside what the kubelet has by itself."""
        limits = self.pod["spec"]["containers"][0]["resources"]["limits"]
        return {name: int(count) for name, count in limits.items() if not _KUBELETS_OWN.fullmatch(name)}


def _recipes() -> Iterator[Recipe]:
    lines = text(_PAGE).partition("\n## Made-up devices\n")[0].splitlines()
    starts = [number for number, line in enumerate(lines, 1) if line.startswith("### ")]
    for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
        within = [block for block in blocks(_PAGE) if start < block.line < end]
        gets = _GETS.search("\n".join(lines[start - 1 : end - 1]))
        assert gets is not None, f"{_PAGE}:{start}: say what a container gets"
        yield Recipe(
            lines[start - 1].removeprefix("### "),
            _only(within, "toml").text,
            yaml.safe_load(_only(within, "yaml").text),
            _only(within, "text").text,
            frozenset(re.findall("`([^`]+)`", gets[1])),
        )


def _only(within: list[Block], language: str) -> Block:
    (block,) = [block for block in within if block.language == language]
    return block


RECIPES: Final = list(_recipes())


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.heading)
def test_it_offers_what_it_shows_and_gives_the_nodes_it_names(recipe: Recipe, tmp_path: Path) -> None:
    host = tmp_path / "host"
    planted_host(host, NODES[recipe.heading])
    config = tmp_path / "config.toml"
    config.write_text(f"{HOST.format(root=host)}\n{recipe.configuration}")
    assert _said("discover", "--config", str(config)) == recipe.shown
    offered = {
        one["name"]: one["devices"]
        for one in json.loads(_said("discover", "--config", str(config), "--json"))["resources"]
    }
    nodes = set[str]()
    for name, count in recipe.asked.items():
        assert len(offered[name]) >= count
        device = offered[name][0]["id"]
        told = json.loads(_said("explain", device, "--config", str(config), "--json").splitlines()[-1])
        nodes |= {node["container_path"] for node in told["gift"]["devices"]}
    assert nodes == recipe.nodes


def _said(*arguments: str) -> str:
    """What a command prints, beside warnings."""
    result = CliRunner().invoke(fairlead, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_every_recipe_has_a_node_and_every_node_a_recipe() -> None:
    assert {recipe.heading for recipe in RECIPES} == NODES.keys()
    assert len(RECIPES) == len(NODES)


def test_no_two_recipes_claim_one_name_for_different_things() -> None:
    names = [name for recipe in RECIPES for name in re.findall(r'^name = "(.*)"', recipe.configuration, re.MULTILINE)]
    assert len(names) == len(set(names))
