"""The example in the project's root: it is valid, and documents every key there is."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from agent.config import AgentConfig, Config, load
from agent.config.model import HttpConfig
from agent.config.resources import RESOURCE_KEYS
from backends.base import Host
from tests.config.fakes import CharDevOptions, FakeRegistry, PathOption, StubOptions

_EXAMPLE = Path(__file__).parent.parent / "config.example.toml"


def _all_settings() -> str:
    """The example with every setting that is commented out put into force."""
    return re.sub(r"^#(?! |$)", "", _EXAMPLE.read_text(), flags=re.MULTILINE)


@pytest.fixture
def everything(tmp_path: Path) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(_all_settings())
    return load(file, FakeRegistry())


def test_the_example_is_valid_as_it_is() -> None:
    assert [resource.name for resource in load(_EXAMPLE, FakeRegistry()).resources] == ["devices.kubevirt.io/kvm"]


def test_the_example_is_valid_with_every_setting_in_force(everything: Config) -> None:
    assert [resource.spec.backend for resource in everything.resources] == ["chardev", "stub"]


def test_what_is_commented_out_shows_the_defaults(everything: Config) -> None:
    assert (everything.agent, everything.host, everything.http_listen) == (AgentConfig(), Host(), None)


def test_the_example_names_every_key_and_no_other() -> None:
    tables = tomllib.loads(_all_settings())
    assert set(tables) == {"agent", "host", "http", "resource"}
    for name, record in (("agent", AgentConfig), ("host", Host), ("http", HttpConfig)):
        assert list(tables[name]) == [field.name for field in dataclasses.fields(record)]
    chardev, stub = tables["resource"]
    assert _keys(chardev, stub) == {*RESOURCE_KEYS, *CharDevOptions.__struct_fields__, *StubOptions.__struct_fields__}
    assert set(chardev["paths"][0]) == set(PathOption.__struct_fields__)


def _keys(*resources: dict[str, Any]) -> set[str]:
    return {key for resource in resources for key in (*resource, *resource.get("options", {}))}
