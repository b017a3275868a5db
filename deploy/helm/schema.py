"""Writes the configuration's schema into the chart's: schema.py [--check]. `make chart` runs it.

values.schema.json is written by hand but for what lies below `$defs`, which is what `fairlead schema` prints: `config` in
values.yaml is the configuration, so that Helm refuses a mistake in it before anything is rolled out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from agent.config.schema import schema

FILE: Final = Path(__file__).parent / "fairlead/values.schema.json"


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


def main() -> None:
    """The command."""
    there = FILE.read_text()
    text = written(json.loads(there))
    if "--check" not in sys.argv[1:]:
        FILE.write_text(text)
    elif text != there:
        sys.exit(f"{FILE} differs from the configuration's schema: make chart")


if __name__ == "__main__":
    main()
