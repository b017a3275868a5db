"""What a container runtime makes of CDI specifications, written after the specification 1.1.0 and not after our writer.

It takes a file that has only what the schema has, of a version that carries it, and edits a container by its devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema

_TEXT: Final = {"type": "string", "minLength": 1}
_EDITS: Final[Mapping[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "env": {"type": "array", "items": {"type": "string", "pattern": "^[^=]+="}},
        "deviceNodes": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["path"],
                "properties": {
                    "path": _TEXT,
                    "hostPath": _TEXT,
                    "permissions": {"type": "string", "pattern": "^[rwm]*$"},
                    "type": {"enum": ["b", "c", "u", "p"]},
                    "major": {"type": "integer"},
                    "minor": {"type": "integer"},
                    "fileMode": {"type": "integer", "minimum": 0, "maximum": 0o777},
                    "uid": {"type": "integer", "minimum": 0},
                    "gid": {"type": "integer", "minimum": 0},
                },
            },
        },
        "mounts": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["hostPath", "containerPath"],
                "properties": {
                    "hostPath": _TEXT,
                    "containerPath": _TEXT,
                    "type": _TEXT,
                    "options": {"type": "array", "items": _TEXT},
                },
            },
        },
    },
}
SCHEMA: Final[Mapping[str, Any]] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["cdiVersion", "kind", "devices"],
    "properties": {
        "cdiVersion": {"enum": ["0.3.0", "0.4.0", "0.5.0"]},
        "kind": {
            "type": "string",
            "pattern": "^[A-Za-z]([A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z]([A-Za-z0-9_-]*[A-Za-z0-9])?$",
        },
        "containerEdits": _EDITS,
        "devices": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["name", "containerEdits"],
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?$"},
                    "containerEdits": {**_EDITS, "minProperties": 1},
                },
            },
        },
    },
}
"""Of what runtimes in use read, containerd 1.7 and CRI-O 1.27: version 0.5.0 at most, and no `.` in a class."""

_VALIDATOR: Final = jsonschema.Draft202012Validator(SCHEMA)

Container = tuple[dict[str, tuple[str, str]], dict[str, tuple[str, bool]]]
"""Nodes and mounts by their path in the container: the host's path, with permissions, and whether it is read-only."""


def checked(data: bytes) -> dict[str, Any]:
    """A specification that a runtime takes: valid, no version too low for it, and none higher than it needs."""
    spec: dict[str, Any] = json.loads(data)
    _VALIDATOR.validate(spec)
    assert spec["cdiVersion"] == _needed(spec)
    names = [device["name"] for device in spec["devices"]]
    assert len({*names}) == len(names)
    return spec


def _needed(spec: Mapping[str, Any]) -> str:
    version = "0.3.0"
    for device in spec["devices"]:
        edits = device["containerEdits"]
        if any("type" in mount for mount in edits.get("mounts", ())):
            version = max(version, "0.4.0")
        if device["name"][0] in "0123456789" or any("hostPath" in node for node in edits.get("deviceNodes", ())):
            version = max(version, "0.5.0")
    return version


def container(specs: Iterable[bytes], devices: Iterable[str]) -> Container:
    """What a container with these devices has; a KeyError where no specification defines one."""
    known = {
        f"{it['kind']}={one['name']}": one["containerEdits"] for it in map(checked, specs) for one in it["devices"]
    }
    nodes: dict[str, tuple[str, str]] = {}
    mounts: dict[str, tuple[str, bool]] = {}
    for name in devices:
        for node in known[name].get("deviceNodes", ()):
            nodes[node["path"]] = node.get("hostPath", node["path"]), node["permissions"]
        for mount in known[name].get("mounts", ()):
            assert "rbind" in mount["options"]
            mounts[mount["containerPath"]] = mount["hostPath"], "ro" in mount["options"]
    return nodes, mounts


def specs(root: Path) -> list[bytes]:
    """All that a runtime reads in a host's directory of generated specifications."""
    return [path.read_bytes() for path in sorted((root / "run/cdi").glob("*")) if path.suffix in (".json", ".yaml")]
