"""The example in the project's root: it is valid, and documents every key there is."""

from __future__ import annotations

import re
import tomllib
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.config import AgentConfig, Config, load
from agent.config.file import DraConfig, HttpConfig, KubernetesConfig
from agent.config.resources import RESOURCE_KEYS
from backends import registry
from backends.base import Host

_EXAMPLE = Path(__file__).parents[2] / "config.example.toml"


def _all_settings() -> str:
    """The example with every setting that is commented out put into force."""
    return re.sub(r"^#(?! |$)", "", _EXAMPLE.read_text(), flags=re.MULTILINE)


@pytest.fixture
def everything(tmp_path: Path) -> Config:
    file = tmp_path / "config.toml"
    file.write_text(_all_settings())
    return load(file)


def test_the_example_is_valid_as_it_is() -> None:
    assert [resource.name for resource in load(_EXAMPLE).resources] == ["devices.kubevirt.io/kvm"]


def test_the_example_is_valid_and_so_names_no_unknown_key_with_every_setting_in_force(everything: Config) -> None:
    assert sorted({resource.spec.backend for resource in everything.resources}) == registry.names()


def test_what_is_commented_out_shows_the_defaults(everything: Config) -> None:
    assert (everything.agent, everything.host, everything.http.is_on) == (AgentConfig(), Host(), False)
    assert everything.kubernetes == KubernetesConfig()
    assert everything.dra == DraConfig()


@pytest.mark.parametrize(
    ("table", "record"),
    [
        ("agent", AgentConfig),
        ("host", Host),
        ("http", HttpConfig),
        ("kubernetes", KubernetesConfig),
        ("dra", DraConfig),
    ],
)
def test_the_example_names_every_key_of_a_table(table: str, record: Any) -> None:
    assert list(tomllib.loads(_all_settings())[table]) == [field.name for field in msgspec.structs.fields(record)]


def test_the_example_names_every_key_of_a_resource() -> None:
    assert set(RESOURCE_KEYS) <= {key for table in tomllib.loads(_all_settings())["resource"] for key in table}


@pytest.mark.parametrize("backend", registry.names())
def test_the_example_names_every_key_of_a_backend(backend: str) -> None:
    tables = [table for table in tomllib.loads(_all_settings())["resource"] if table["backend"] == backend]
    assert set(_keys_of(registry.load(backend).options_type)) <= set(_keys_in(tables))


def _keys_of(wanted: Any) -> Iterator[str]:
    """The keys of a struct and of every struct in it."""
    if isinstance(wanted, type) and issubclass(wanted, msgspec.Struct):
        yield from wanted.__struct_encode_fields__
        for hint in typing.get_type_hints(wanted).values():
            yield from _keys_of(hint)
    for inner in typing.get_args(wanted):
        yield from _keys_of(inner)


def _keys_in(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _keys_in(inner)
