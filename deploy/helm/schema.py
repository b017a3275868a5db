"""Writes the configuration's schema into the chart's, and the values into the docs: schema.py, or `make chart`.

values.schema.json is written by hand but for what lies below `$defs`, which is what `fairlead schema` prints: `config` in
values.yaml is the configuration, so that Helm refuses a mistake in it before anything is rolled out. Its descriptions,
with the defaults of values.yaml, are the table in docs/installing.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from agent.config.schema import schema

CHART: Final = Path(__file__).parent / "fairlead"
FILE: Final = CHART / "values.schema.json"
DOCS: Final = Path(__file__).parents[2] / "docs/installing.md"

_BEGIN: Final = "| value | default | what it is |\n| --- | --- | --- |\n"
_LONGEST: Final = 40  # characters of a default that the table shows; longer ones are read in values.yaml


def definitions() -> dict[str, Any]:
    """`$defs` of the chart's schema: a definition for each part, so that each can have a line of its own."""
    whole = schema()
    parts: dict[str, Any] = whole.pop("$defs")
    del whole["$schema"]
    for choice in whole["properties"]["resource"]["items"]["allOf"]:
        name = f"resource-{choice['if']['properties']['backend']['const']}"
        parts[name], choice["then"] = choice["then"], {"$ref": f"#/$defs/{name}"}
    return {"config": whole, **parts}


def written(values: dict[str, Any]) -> str:
    """The file's text: what is written by hand as people read it, each definition in one line."""
    head = json.dumps({key: value for key, value in values.items() if key != "$defs"}, indent=2, ensure_ascii=False)
    lines = [f"    {json.dumps(name)}: {json.dumps(one, ensure_ascii=False)}" for name, one in definitions().items()]
    return head.removesuffix("\n}") + ',\n  "$defs": {\n' + ",\n".join(lines) + "\n  }\n}\n"


def rows(values: dict[str, Any], defaults: Any, prefix: str = "") -> Iterator[str]:
    """The table's rows, one for each value."""
    for name, one in values["properties"].items():
        if name not in defaults:
            continue
        if "description" not in one:
            yield from rows(one, defaults[name], f"{prefix}{name}.")
            continue
        default = json.dumps(defaults[name])
        shown = f"`{default}`" if len(default) <= _LONGEST else "in `values.yaml`"
        yield f"| `{prefix}{name}` | {shown} | {one['description']} |"


def documented(text: str, values: dict[str, Any]) -> str:
    """The page's text, with the table as it is to be."""
    before, _, after = text.partition(_BEGIN)
    _, blank, rest = after.partition("\n\n")
    table = "\n".join(rows(values, yaml.safe_load((CHART / "values.yaml").read_text())))
    return f"{before}{_BEGIN}{table}{blank}{rest}"


def main() -> None:
    """The command."""
    values = json.loads(FILE.read_text())
    FILE.write_text(written(values))
    DOCS.write_text(documented(DOCS.read_text(), values))


if __name__ == "__main__":
    main()
