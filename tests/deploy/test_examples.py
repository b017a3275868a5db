"""The examples of deploy/kubernetes: each configuration is valid, and its pod asks for what it offers."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from click.testing import CliRunner

from agent.cli.commands import fairlead
from agent.config.resources import fits
from tests.deploy.manifests import KUBERNETES, REPOSITORY, run

EXAMPLES: Final = sorted((KUBERNETES / "examples").iterdir())
NAMES: Final = [path.name for path in EXAMPLES]


def tables(example: Path) -> dict[str, Any]:
    return tomllib.loads((example / "config.toml").read_text())


def pod(example: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((example / "pod.yaml").read_text())
    return read


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_configuration_is_valid_and_goes_with_the_base(example: Path) -> None:
    done = CliRunner().invoke(fairlead, ["validate", str(example / "config.toml")])
    assert done.exit_code == 0, done.output
    base = tables(KUBERNETES / "base")
    assert {name: table for name, table in tables(example).items() if name != "resource"} == {
        name: table for name, table in base.items() if name != "resource"
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_the_pod_asks_for_what_the_configuration_offers(example: Path) -> None:
    offered = {one["name"]: one for one in tables(example)["resource"]}
    (container,) = pod(example)["spec"]["containers"]
    assert container["resources"].keys() == {"limits"}  # an extended resource's request is its limit
    limits = container["resources"]["limits"]
    assert limits
    for name, amount in limits.items():
        (resource,) = (one for pattern, one in offered.items() if fits(pattern, name))
        assert amount == 1 or not resource.get("fail_requests_greater_than_one", False)
    assert pod(example)["metadata"]["name"] == f"{example.name}-example"


def test_the_pods_are_valid(tmp_path: Path) -> None:
    (tmp_path / "pods.yaml").write_text("\n---\n".join(json.dumps(pod(one)) for one in EXAMPLES))
    run("kubernetes_validate", "--strict", tmp_path / "pods.yaml")


def test_each_is_a_configuration_and_a_pod() -> None:
    for example in EXAMPLES:
        assert {path.name for path in example.iterdir()} == {"config.toml", "pod.yaml"}


def test_the_docs_have_a_row_for_each() -> None:
    text = (REPOSITORY / "docs/installing.md").read_text()
    assert re.findall(r"^\| \[`(\S+)`\]\(\.\./deploy/kubernetes/examples/\1\)", text, flags=re.MULTILINE) == NAMES
