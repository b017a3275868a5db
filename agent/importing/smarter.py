"""Reads the configuration of smarter-device-manager: regular expressions over /dev, and how many pods may share a node.

It makes a resource of every node that matches, down to the tenth directory below /dev.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from agent.importing import patterns
from agent.importing.fields import Fields
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.tree import Items, Table, Tree

_PREFIX: Final = "smarter-devices/"
_NVIDIA: Final = "nvidia-gpu"  # no pattern to it, but Jetson boards' GPUs in /sys/devices
_UNNAMEABLE: Final = re.compile(r"[^A-Za-z0-9_.-]")
_WILD: Final = re.compile(r"\[[^\]]*\]|[*?]")
_SOURCE: Final = (
    "From smarter-device-manager's configuration. The IDs of the devices are other ones; no pod names them. A resource "
    "is there on every node, with no devices where there is no such node in /dev."
)


def read(document: Tree) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it is no list.
    """
    if not isinstance(document, Items):
        raise ImportRefusedError("smarter-device-manager's configuration is a list of devicematch and nummaxdevices", 1)
    return Sketch(_SOURCE, tuple(part for item in document.items for part in _entry(item)))


def _entry(item: Tree) -> Iterator[Part]:
    if not isinstance(item, Table):
        yield Part((Remark(item.line, "this should be a table with devicematch and nummaxdevices; it is left out"),))
        return
    expression = Fields(item, "a device", []).text("devicematch")
    remarks: list[Remark] = []
    fields = Fields(item, expression or "a device", remarks)
    fields.text("devicematch")
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
        sentence = f"{_NVIDIA}: Jetson boards' GPUs are no PCI GPUs, and the backend gpu has no others"
        remarks.append(Remark(line, sentence))
    else:
        yield from _resources(expression, line, count, remarks)
        return
    yield Part(tuple(remarks))


def _resources(expression: str, line: int, count: int, remarks: list[Remark]) -> Iterator[Part]:
    pattern = patterns.parse(expression)
    if pattern is None:
        sentence = f"{expression}: what this regular expression matches cannot be said in globs; it is left out"
        yield Part((*remarks, Remark(line, sentence)))
    elif names := pattern.names():
        yield from (Part(tuple(remarks) if not n else (), _draft(name, line, count)) for n, name in enumerate(names))
    else:
        glob, same = pattern.glob()
        draft = _draft(glob, line, count)
        yield Part((*remarks, Remark(line, _changed(expression, draft.name, same=same))), draft, offered=same)


def _changed(expression: str, name: str, *, same: bool) -> str:
    sentence = f"{expression}: smarter-device-manager makes a resource of every node that matches, named after it; "
    if same:
        return f"{sentence}here all of them are devices of {name}, which pods have to ask for"
    return (
        f"{sentence}no glob matches the same, so it is left out; the nearest is commented out, one resource for all "
        f"nodes, {name}"
    )


def _draft(path: str, line: int, count: int) -> Draft:
    name = _UNNAMEABLE.sub("_", _WILD.sub("", path)).strip("_.-") or "devices"
    options: dict[str, Value] = {"paths": [{"path": f"/dev/{path}", "permissions": "rw"}]}
    if count > 1:
        options["count"] = count
    return Draft(_PREFIX + name, (DraftGroup(options, line),), line)
