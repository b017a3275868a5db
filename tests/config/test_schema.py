"""The JSON Schema takes what the program takes, and refuses what it refuses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from agent.config import load
from agent.config.schema import schema
from backends import registry

EXAMPLE = Path(__file__).parents[2] / "config.example.toml"
ALL_SETTINGS = re.sub(r"^#(?! |$)", "", EXAMPLE.read_text(), flags=re.MULTILINE)


@pytest.fixture(scope="module")
def validator() -> Any:
    made = schema()
    jsonschema.Draft202012Validator.check_schema(made)
    return jsonschema.Draft202012Validator(made)


@pytest.mark.parametrize("document", [EXAMPLE.read_text(), ALL_SETTINGS, ""], ids=["example", "everything", "empty"])
def test_it_takes_what_the_program_takes(validator: Any, document: str) -> None:
    validator.validate(tomllib.loads(document))


KVM = 'name = "example.com/kvm"\nbackend = "chardev"\npaths = [{ path = "/dev/kvm" }]\n'


GPU = 'name = "example.com/gpu"\nbackend = "gpu"\n'


def test_a_selector_in_capitals_is_taken_as_the_program_takes_it(validator: Any, tmp_path: Path) -> None:
    document = f"[[resource]]\n{GPU}select = {{ vendor = '10DE', function = ['Physical'], numa_node = 0 }}\n"
    validator.validate(tomllib.loads(document))
    (tmp_path / "config.toml").write_text(document)
    load(tmp_path / "config.toml")


def test_an_editor_shows_one_error_for_one_mistake(validator: Any) -> None:
    (error,) = validator.iter_errors(tomllib.loads(f"[[resource]]\n{GPU}count = 1\n[[resource]]\n{KVM}"))
    assert "'count' was unexpected" in error.message


@pytest.mark.parametrize(
    "document",
    [
        "[agnt]\n",
        "[agent]\nresync = 5\n",
        '[agent]\nresync = "five"\n',
        '[agent]\nresync = ""\n',
        '[agent]\nuevents = "sometimes"\n',
        '[agent]\nplugin_dir = "relative"\n',
        f"[[resource]]\n{KVM}colour = 1\n",
        f"[[resource]]\n{KVM}replicas = 0\n",
        f'[[resource]]\n{KVM}placement = "spred"\n',
        f"[[resource]]\n{KVM}[resource.options]\ncolour = 1\n",
        '[[resource]]\nname = "example.com/x"\nbackend = "nonesuch"\n',
        f"[[resource]]\n{KVM}select = {{}}\n",
        f"[[resource]]\n{KVM}select = {{ pth = '/dev/kvm' }}\n",
        f"[[resource]]\n{KVM}exclude = [{{ type = 'charakter' }}]\n",
        f"[[resource]]\n{GPU}select = {{ vendor = '0x10de' }}\n",
        f"[[resource]]\n{GPU}select = {{ vendor = 0x10de }}\n",
        f"[[resource]]\n{GPU}select = {{ address = ['3b:00.0'] }}\n",
    ],
)
def test_it_refuses_what_the_program_refuses(validator: Any, document: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(tomllib.loads(document))


def test_it_describes_the_keys_as_the_code_does() -> None:
    made = schema()
    assert made["$defs"]["AgentConfig"]["properties"]["resync"]["description"].startswith("Between two full looks")
    (chardev,) = [one["then"] for one in _resources(made) if "chardev" in one["then"]["title"]]
    assert chardev["properties"]["count"]["description"].startswith("Tokens:")


def test_every_key_has_a_description() -> None:
    made = schema()
    lacking = [
        f"{name}.{key}"
        for name, definition in made["$defs"].items()
        for key, value in definition.get("properties", {}).items()
        if "description" not in value
    ]
    assert lacking == []


def test_it_knows_every_backend() -> None:
    titles = [one["then"]["title"] for one in _resources(schema())]
    assert titles == [f"a resource of the backend {name}" for name in registry.names()]


def test_it_speaks_of_no_null() -> None:
    assert "null" not in str(schema())


def _resources(made: Any) -> Any:
    return made["properties"]["resource"]["items"]["allOf"]
