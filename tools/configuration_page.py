"""Writes docs/configuration.md, every key of the configuration with its type, default and meaning, from its JSON Schema.

`make generated` runs it; a test compares the page with what it would write.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent.config.file import APPLIED_AT_ONCE
from agent.config.resources import RESOURCE_KEYS
from agent.config.schema import schema
from backends import registry

PAGE: Final = Path(__file__).resolve().parents[1] / "docs/configuration.md"
_SECTIONS: Final = {
    "cex": "chardev.md#crypto-express-queues",
    "mdev": "vfio.md#mediated-devices",
    "solarflare": "sriov.md#solarflare-with-onload",
    "stub": "recipes.md#made-up-devices",
}
"""Backend → its section, where it has no page of its own."""

_Schema = Mapping[str, Any]
_REF: Final = "#/$defs/"
_NOTES: Final = re.compile(r" \(kubelet contract: \w+\)")  # ours, which no reader has
_INTRODUCTION: Final = """\
# Configuration reference

<!-- Written by `make generated` from the schema; do not edit. -->

The configuration is one TOML file, `/etc/fairlead/config.toml` if no other is named. `fairlead validate FILE` checks it:
each mistake is named with its line. `fairlead schema` prints the JSON Schema that this page is made of, for editors.
`config.example.toml` in the sources shows every key in use. Without a file Fairlead offers KubeVirt's device nodes.

A duration is a text such as `"250ms"`, `"5s"` or `"1h30m"`. A key without a default may be left out, unless it says
*required*.
"""
_TABLES: Final[Mapping[str, str]] = {
    "agent": "Where the kubelet is, what is kept where, and how often hardware is looked at. "
    f"A reload applies {', '.join(f'`{it}`' for it in sorted(APPLIED_AT_ONCE))}; a change of the others needs a restart.",
    "host": "Where this process sees the node's trees: in a container they are mounted elsewhere. A change needs a restart.",
    "http": "Metrics, probes and the live page ([http.md](http.md)). A change needs a restart.",
    "kubernetes": "What Kubernetes' API server is told and asked ([operations.md](operations.md#kubernetes-own-faces)). "
    "A reload applies it.",
    "dra": 'How resources with `serve = "dra"` are offered ([dra.md](dra.md)). A reload applies it.',
}
_RESOURCE: Final = """\
## `[[resource]]`

One table for each name that pods ask for. A device joins the first resource that takes it. The keys of its backend
stand beside these, or in a table `[resource.options]` below.

| key | type | default | meaning |
| --- | --- | --- | --- |
| `name` | text | *required* | What pods ask for, `example.com/widget`. After the `/` attributes in braces stand for a resource for each value: `nvidia.com/mig-{profile}`. |
| `backend` | text | *required* | The kind of hardware: one of the backends below, or one that is installed beside Fairlead. |
| `select` | table, or list of tables | | Which of the backend's devices: all attributes in a table must match, each with any of its values; a list takes what any table takes. Without it, all devices, where the backend allows that. |
| `exclude` | table, or list of tables | | Which of those not; written as `select`. |
| `replicas` | number | `1` | How many containers may share one device. Each share is an ID, `ID::0`. |
| `placement` | `"spread"`, `"pack"` | `"spread"` | With replicas: the next container gets the device with the most, or the fewest, free shares. |
| `pre_start` | `"none"`, `"check"`, `"reset"` | `"none"` | Before a container starts: nothing, refuse hardware that is unhealthy now, or that and reset it. |
| `edits` | `"inline"`, `"cdi"`, `"both"` | `"inline"` | How a container gets nodes and mounts: from the kubelet, by CDI ([placement.md](placement.md#cdi)), or both ways. |
| `adopt` | `"lenient"`, `"strict"` | `"lenient"` | While a pod of another plugin has something of the resource that leads to no device: offer what is free, or nothing ([migrating.md](migrating.md#the-steps)). |
| `serve` | `"device-plugin"`, `"dra"` | `"device-plugin"` | Which of the kubelet's APIs offers it: device plugins, or dynamic resource allocation ([dra.md](dra.md)). |
| `options` | table | | The backend's own keys, if they do not stand beside these. |
"""


def page() -> str:
    """The whole page."""
    return "\n".join(_parts(schema())).rstrip("\n") + "\n"


def _parts(whole: _Schema) -> Iterator[str]:
    definitions = whole["$defs"]
    yield _INTRODUCTION
    for name, sentence in _TABLES.items():
        yield f"## `[{name}]`\n\n{sentence}\n"
        yield _table(_resolved(whole["properties"][name], definitions))
    yield _RESOURCE
    yield "## Keys and attributes of each backend\n"
    for choice in whole["properties"]["resource"]["items"]["allOf"]:
        yield from _backend(choice["then"], definitions)


def _backend(resource: _Schema, definitions: _Schema) -> Iterator[str]:
    properties = resource["properties"]
    name = properties["backend"]["const"]
    required = definitions[registry.load(name).options_type.__name__].get("required", [])
    own = {key: value for key, value in properties.items() if key not in RESOURCE_KEYS}
    page = _SECTIONS.get(name, f"{name}.md")
    yield f"### {name}\n\nIts page: [{page.partition('#')[0]}]({page}).\n"
    if own:
        yield _table({"properties": own, "required": required})
    shown: list[str] = []
    todo = list(_named(own))
    while todo:
        record = todo.pop(0)
        if record not in shown:
            shown.append(record)
            yield f"#### Tables `{_title(record)}` of {name}\n\n{definitions[record].get('description', '')}\n"
            if definitions[record]["properties"].items() <= own.items():
                same = ", ".join(f"`{key}`" for key in definitions[record]["properties"])
                yield f"Its keys are as those of the resource: {same}.\n"
            else:
                yield _table(definitions[record])
            todo += _named(definitions[record]["properties"])
    attributes = _attributes(properties["select"])
    if attributes:
        yield f"Attributes for `select` and `exclude`: {', '.join(f'`{it}`' for it in attributes)}.\n"


def _table(record: _Schema) -> str:
    required = record.get("required", [])
    rows = [
        f"| `{key}` | {_type(value)} | {_default(key, value, required)} | {_escaped(value.get('description', ''))} |"
        for key, value in record["properties"].items()
    ]
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])


def _type(value: _Schema) -> str:
    """What may be written, in words."""
    if "$ref" in value:
        return f"table `{_title(_record(value))}`"
    if "enum" in value:
        return ", ".join(f"`{json.dumps(it)}`" for it in value["enum"])
    if "anyOf" in value:
        return ", or ".join(dict.fromkeys(_type(it) for it in value["anyOf"]))
    match value.get("type"):
        case "array":
            return f"list: {_type(value['items'])}" if value.get("items") else "list"
        case "object":
            inner = value.get("additionalProperties")
            return f"table of {_type(inner)}" if isinstance(inner, dict) and inner else "table"
        case "string" if "1h30m" in value.get("examples", ()):
            return "duration"
        case "string" if str(value.get("pattern", "")).startswith("^/"):
            return 'path, or `"off"`' if "off" in value["pattern"] else "path"
        case list(kinds):
            return ", or ".join(_WORDS[kind] for kind in kinds)
        case str(kind):
            return _WORDS[kind]
    return "any"


_WORDS: Final = {"string": "text", "integer": "number", "number": "number", "boolean": "`true`, `false`"}


def _default(key: str, value: _Schema, required: list[str]) -> str:
    if key in required:
        return "*required*"
    default = value.get("default")
    return "" if default in (None, [], {}, "") else f"`{json.dumps(default, ensure_ascii=False)}`"


def _named(properties: _Schema) -> Iterator[str]:
    """The records that these keys consist of."""
    for value in properties.values():
        todo: list[Any] = [value]
        while todo:
            one = todo.pop(0)
            if isinstance(one, dict) and "$ref" in one:
                yield _record(one)
            elif isinstance(one, dict):
                todo += one.values()
            elif isinstance(one, list):
                todo += one


def _attributes(select: _Schema) -> list[str]:
    one = select["anyOf"][0]
    return sorted(one.get("properties", {}))


def _resolved(value: _Schema, definitions: _Schema) -> Any:
    return definitions[_record(value)] if "$ref" in value else value


def _record(value: _Schema) -> str:
    return str(value["$ref"]).removeprefix(_REF)


def _title(record: str) -> str:
    """`PathOption` → `path`: how the key that has it is called."""
    return record.removesuffix("Options").removesuffix("Option").removeprefix("Stub").lower()


def _escaped(text: str) -> str:
    return _NOTES.sub("", text).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page())
