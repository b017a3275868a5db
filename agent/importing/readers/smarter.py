"""Reads the configuration of smarter-device-manager: regular expressions over /dev, and how many pods may share a node.

It makes a resource of every node that matches, down to the tenth directory below /dev.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from msgspec.structs import replace

from agent.importing import regex_globs
from agent.importing.fields import Fields
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.settings import Settings
from agent.importing.yaml_tree import Items, Table, Tree

_PREFIX: Final = "smarter-devices/"
_TEMPLATE: Final = f"{_PREFIX}{{devname}}"
"""A resource for each node, named after its path below /dev."""

_NVIDIA: Final = "nvidia-gpu"
"""No pattern to it, but the GPU of a Jetson board: /sys/devices/gpu.0, which it tells to NVIDIA's runtime by number."""
_UNNAMEABLE: Final = re.compile(r"[^A-Za-z0-9_-]")
_SOURCE: Final = (
    "From smarter-device-manager's configuration. The IDs of the devices are other ones; no pod names them. A resource "
    "that is named by itself is there on every node, with no devices where there is no such node in /dev."
)


def is_it(document: Tree) -> bool:
    """Is the document a list of patterns?"""
    return isinstance(document, Items) and any(
        isinstance(item, Table) and "devicematch" in item.values for item in document.items
    )


def read(document: Tree | None, _settings: Settings) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it is no list.
    """
    if not isinstance(document, Items):
        raise ImportRefusedError("smarter-device-manager's configuration is a list of devicematch and nummaxdevices", 1)
    parts = [part for item in document.items for part in _entry(item)]
    return Sketch(_SOURCE, tuple(_one_template(parts)))


def _one_template(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts; the groups that name resources after nodes are all of one template, for no two may give one name."""
    parts = list(parts)
    every = [part for part in parts if part.draft and part.draft.name == _TEMPLATE]
    if not every:
        yield from parts
        return
    remarks = tuple(remark for part in every for remark in part.remarks)
    drafts = [part.draft for part in every if part.draft]
    groups = tuple(group for draft in drafts for group in draft.groups)
    yield from (part for part in parts if part not in every)
    yield Part(remarks, replace(drafts[0], groups=groups))


def _entry(item: Tree) -> Iterator[Part]:
    if not isinstance(item, Table):
        yield Part((Remark(item.line, "this should be a table with devicematch and nummaxdevices; it is left out"),))
        return
    fields = Fields.named(item, "devicematch", "a device")
    expression = fields.text("devicematch")
    count = fields.whole("nummaxdevices")
    fields.end()
    line = fields.line("devicematch")
    if not fields.sound:
        pass
    elif expression is None:
        fields.lost("devicematch", "it has no devicematch and is left out")
    elif not count:
        fields.note("nummaxdevices", "nummaxdevices is 0 or missing, and so none was offered")
    elif expression == _NVIDIA:
        yield fields.part(_jetson(line, count))
        return
    else:
        yield from _resources(expression, line, count, fields.remarks)
        return
    yield fields.part()


def _resources(expression: str, line: int, count: int, remarks: list[Remark]) -> Iterator[Part]:
    if names := regex_globs.names(expression):
        yield from (Part(tuple(remarks) if not n else (), _named(name, line, count)) for n, name in enumerate(names))
    elif not regex_globs.is_understood(expression):
        sentence = f"{expression}: this regular expression is not one that Fairlead and Go read alike; it is left out"
        yield Part((*remarks, Remark(line, sentence)))
    else:
        globs = regex_globs.globs(expression)
        if len(globs) > 1:
            below = regex_globs.DEEPEST - 1
            sentence = f"{expression}: nodes are looked for in {below} directories below /dev, as deep as udev makes any, not in ten"
            remarks.append(Remark(line, sentence, lost=False))
        groups = tuple(_group(f"/dev/{glob}", line, count, pattern=expression) for glob in globs)
        yield Part(tuple(remarks), Draft(_TEMPLATE, groups, line))


def _jetson(line: int, count: int) -> Draft:
    options: dict[str, Value] = {
        "select": {"vendor": "10de", "platform": "tegra"},
        "device_id_strategy": "index",
        **({"replicas": count} if count > 1 else {}),
    }
    return Draft.of(f"{_PREFIX}{_NVIDIA}0", options, line, "gpu")


def _named(path: str, line: int, count: int) -> Draft:
    name = _UNNAMEABLE.sub("_", path).strip("_-") or "devices"
    return Draft(_PREFIX + name, (_group(f"/dev/{path}", line, count),), line)


def _group(path: str, line: int, count: int, **how: str) -> DraftGroup:
    options: dict[str, Value] = {"paths": [{"path": path, **how, "permissions": "rw"}]}
    if count > 1:
        options["count"] = count
    return DraftGroup(options, line)
