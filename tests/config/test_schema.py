"""The JSON Schema takes what the program takes, and refuses what it refuses."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

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


@pytest.mark.parametrize(
    "document",
    [
        "[agnt]\n",
        "[agent]\nresync = 5\n",
        '[agent]\nresync = "five"\n',
        '[agent]\nuevents = "sometimes"\n',
        '[agent]\nplugin_dir = "relative"\n',
        f"[[resource]]\n{KVM}colour = 1\n",
        f"[[resource]]\n{KVM}replicas = 0\n",
        f'[[resource]]\n{KVM}placement = "spred"\n',
        f"[[resource]]\n{KVM}[resource.options]\ncolour = 1\n",
        '[[resource]]\nname = "example.com/x"\nbackend = "nonesuch"\n',
        f"[[resource]]\n{KVM}select = {{}}\n",
    ],
)
def test_it_refuses_what_the_program_refuses(validator: Any, document: str) -> None:
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(tomllib.loads(document))


def test_it_describes_the_keys_as_the_code_does() -> None:
    made = schema()
    assert made["$defs"]["AgentConfig"]["properties"]["resync"]["description"].startswith("Between two full looks")
    (chardev,) = [one for one in made["properties"]["resource"]["items"]["oneOf"] if "chardev" in one["title"]]
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
    titles = [one["title"] for one in schema()["properties"]["resource"]["items"]["oneOf"]]
    assert titles == [f"a resource of the backend {name}" for name in registry.names()]


def test_it_speaks_of_no_null() -> None:
    assert "null" not in str(schema())
