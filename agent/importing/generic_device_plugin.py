"""Reads the configuration of generic-device-plugin: named devices, each of groups of paths or USB devices.

What its keys mean is documented at `Path`, `Group` and `USBSpec` in its sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.config.model import parse_path
from agent.importing.fields import Fields
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.sharing import share
from agent.importing.tree import Table, Tree
from agent.importing.usb import usb_id
from agent.limits import plugin_directory_problem

DOMAIN: Final = "squat.ai"
"""Its own default."""

_PLUGIN_DIRECTORY: Final = "/var/lib/kubelet/device-plugins"
_PERMISSIONS: Final = "mrw"
_TYPES: Final = {"Device": "device", "Mount": "mount"}
_SOURCE: Final = (
    "From generic-device-plugin's configuration. The IDs of the devices are other ones: names that stay, not sums of "
    "their paths; no pod names them."
)


@dataclass(frozen=True, slots=True)
class _Group:
    """One group: its options, and whether they say what it said."""

    line: int
    options: Mapping[str, Value] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    remarks: tuple[Remark, ...] = ()
    offered: bool = True

    def part(self, name: str, *more: Remark, offered: bool = True) -> Part:
        """The resource of this group."""
        draft = Draft(name, self.options, self.line, self.lines) if self.options else None
        return Part((*self.remarks, *more), draft, offered and self.offered)


def read(document: Tree, domain: str | None) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it has no list of devices.
    """
    if not isinstance(document, Table) or not document.values.keys() & {"devices", "device"}:
        raise ImportRefusedError("generic-device-plugin's configuration has a list 'devices', and there is none", 1)
    remarks: list[Remark] = []
    fields = Fields(document, "generic-device-plugin", remarks)
    domain = domain or fields.text("domain") or DOMAIN
    fields.scalar("domain")
    parts = [part for key in ("devices", "device") for table in fields.tables(key) for part in _device(table, domain)]
    agent = _agent(fields)
    if fields.text("listen"):
        fields.lost("listen", "listen is left out; where Fairlead serves HTTP is said with listen in [http]")
    if fields.text("log-level"):
        fields.lost("log-level", "log-level is left out; it is said on the command line: fairlead run --log-level")
    fields.end()
    return Sketch(_SOURCE, (Part(tuple(remarks)), *share(parts)), agent)


def _agent(fields: Fields) -> Mapping[str, str]:
    directory = fields.text("plugin-directory")
    if directory is None or directory.rstrip("/") == _PLUGIN_DIRECTORY:
        return {}
    try:
        problem = plugin_directory_problem(parse_path(directory))
    except ValueError as error:
        problem = str(error)
    if problem:
        fields.lost("plugin-directory", f"plugin-directory: {problem}; it is left out")
        return {}
    return {"plugin_dir": directory}


def _device(table: Table, domain: str) -> Iterator[Part]:
    name = Fields(table, "a device", []).text("name")
    remarks: list[Remark] = []
    resource = f"{domain}/{(name or '?').strip()}"
    fields = Fields(table, resource, remarks)
    fields.text("name")
    groups = [_group(group, resource) for group in fields.tables("groups")]
    if fields.sound and name is None:
        fields.lost("name", "it has no name and is left out")
    elif fields.sound and not groups:
        fields.lost("groups", "it has no groups, and so no devices; it is left out")
    fields.end()
    yield Part(tuple(remarks))
    if name is not None:
        yield from _resources(resource, groups)


def _resources(name: str, groups: Sequence[_Group]) -> Iterator[Part]:
    """One resource, and for groups that it cannot have beside the first, suggestions."""
    usable = [group for group in groups if group.offered]
    if len(usable) > 1 and (merged := _one_list_of_sticks(usable)):
        usable = [merged]
        yield merged.part(name)
    elif usable:
        yield usable[0].part(name)
    for index, group in enumerate(usable[1:], 2):
        sentence = (
            f"{name}: a resource of Fairlead has one group, and this is another; it is left out (without the comment "
            "signs it is offered under another name)"
        )
        yield group.part(f"{name}-{index}", Remark(group.line, sentence), offered=False)
    for group in groups:
        if not group.offered:
            yield group.part(name)


def _one_list_of_sticks(groups: Sequence[_Group]) -> _Group | None:
    """Groups of one kind of stick each, all offered alike, as one list: any of them is a device."""
    first = groups[0]
    if not all(group.options.keys() & {"usb"} for group in groups):
        return None
    if len({group.options.get("count", 1) for group in groups}) > 1:
        return None
    usb = [stick for group in groups for stick in _sticks(group.options)]
    lines = {f"usb[{index}]": group.lines["usb[0]"] for index, group in enumerate(groups)}
    remarks = tuple(remark for group in groups for remark in group.remarks)
    return _Group(first.line, {**first.options, "usb": usb}, lines, remarks)


def _sticks(options: Mapping[str, Value]) -> Sequence[Value]:
    sticks = options["usb"]
    assert isinstance(sticks, Sequence)
    return sticks


def _group(table: Table, name: str) -> _Group:
    remarks: list[Remark] = []
    fields = Fields(table, name, remarks)
    count = fields.whole("count")
    paths = [(path.line, _path(path, name, remarks)) for path in fields.tables("paths")]
    sticks = [(stick.line, _stick(stick, name, remarks)) for stick in fields.tables("usb")]
    fields.end()
    options, lines = _listed("paths", paths) if paths else _listed("usb", sticks)
    if count and count > 1:
        options["count"] = count
    if paths and sticks:
        fields.lost("usb", "a group has both paths and usb, which generic-device-plugin refuses too; it is left out")
        options = {}
    elif fields.sound and not paths and not sticks:
        fields.lost("", "a group has neither paths nor usb, and so no devices; it is left out")
        options = {}
    elif len(sticks) > 1:
        sentence = "a group of several kinds of sticks is handed out as one device; to Fairlead each stick is its own"
        fields.lost("usb", f"{sentence}, so the group is left out (without the comment signs: one stick for each)")
    elif sticks and "serial" not in (sticks[0][1] or {}):
        fields.note("usb", "all sticks that matched were one device; now each of them is one")
    whole = fields.sound and all(item is not None for _, item in (*paths, *sticks))
    return _Group(table.line, options, lines, tuple(remarks), whole and bool(options) and len(sticks) < 2)


def _listed(
    key: str, found: Sequence[tuple[int, Mapping[str, Value] | None]]
) -> tuple[dict[str, Value], dict[str, int]]:
    items = [(line, item) for line, item in found if item]
    options: dict[str, Value] = {key: [item for _, item in items]} if items else {}
    return options, {f"{key}[{index}]": line for index, (line, _) in enumerate(items)}


def _path(table: Table, name: str, remarks: list[Remark]) -> Mapping[str, Value] | None:
    fields = Fields(table, name, remarks)
    path, kind = fields.text("path"), fields.text("type") or "Device"
    wanted: dict[str, Value] = {"path": _glob(path or "")}
    if mount_path := fields.text("mountPath"):
        wanted["mount_path"] = mount_path
    permissions, read_only = fields.text("permissions"), fields.flag("readOnly")
    if kind == "Mount":
        wanted["type"] = "mount"
        if read_only:
            wanted["read_only"] = True
        if permissions:
            fields.note("permissions", "permissions are for devices; a mount never had them")
    else:
        wanted["permissions"] = permissions or _PERMISSIONS
        if read_only:
            fields.note("readOnly", "readOnly is for mounts; it never did anything for a device")
    if (limit := fields.whole("limit")) and limit > 1:
        wanted["limit"] = limit
    if fields.flag("optional"):
        wanted["optional"] = True
    fields.end()
    if not fields.sound:
        return None
    if path is None:
        fields.lost("path", "a path of a group is missing; the group is left out")
        return None
    if "\\" in path or "[!" in path:
        fields.lost(
            "path", f"{path!r}: what '\\' and '[!' mean to it cannot be said in our globs; the group is left out"
        )
        return None
    if kind not in _TYPES:
        fields.lost("type", f"{kind!r} is no type, only Device and Mount are; the group is left out")
        return None
    return wanted


def _glob(path: str) -> str:
    """A glob of Go's as ours: to Go `**` is no more than `*`, and `[^…]` is what others write `[!…]`."""
    return re.sub(r"\*+", "*", path).replace("[^", "[!")


def _stick(table: Table, name: str, remarks: list[Remark]) -> Mapping[str, Value] | None:
    fields = Fields(table, name, remarks)
    wanted: dict[str, Value] = {}
    for key in ("vendor", "product"):
        if (written := usb_id(fields, key)) is not None:
            wanted[key] = written
    if serial := fields.text("serial"):
        wanted["serial"] = serial
    fields.end()
    missing = [key for key in ("vendor", "product") if key not in wanted]
    if fields.sound and missing:
        fields.lost("", f"{' and '.join(missing)} of a stick is missing; the group is left out")
    return wanted if fields.sound and not missing else None
