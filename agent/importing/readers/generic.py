"""Reads the configuration of generic-device-plugin: named devices, each of groups of paths or USB devices.

What its keys mean is documented at `Path`, `Group` and `USBSpec` in its sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from agent.config.typed import parse_path
from agent.importing.fields import USB_IDS, Fields, Settings, usb_ids
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, embedded, text_at
from agent.runtime.limits import plugin_directory_problem
from backends.linux.globs import Glob, is_glob

DOMAIN: Final = "squat.ai"
"""Its own default, before release 0.2.0."""
_DOMAIN_SINCE: Final = "devic.es"
"""The default since then."""
_RELEASE: Final = re.compile(r":v?(\d+)\.(\d+)(\.\d+)?([-@]|$)")
"""Of its image. Its other tags are names of commits, and `latest`."""

_SETTINGS: Final = {
    name: (name, name.replace("-", "_").upper()) for name in ("domain", "plugin-directory", "listen", "log-level")
}
"""Key of the file → argument and variable (config.go: viper's AutomaticEnv)."""
_PLUGIN_DIRECTORY: Final = "/var/lib/kubelet/device-plugins"
_PERMISSIONS: Final = "mrw"
_TYPES: Final = {"Device": "device", "Mount": "mount"}
_SOURCE: Final = (
    "From generic-device-plugin's configuration. The IDs of the devices are other ones: names that stay, not sums of "
    "their paths; no pod names them."
)


class _Group(Struct, frozen=True):
    """One group, and what is said about it."""

    draft: DraftGroup
    remarks: tuple[Remark, ...]
    offered: bool
    """Whether it says what the imported group said."""


def is_it(document: Tree) -> bool:
    """Whether the document has a list of devices."""
    if not isinstance(document, Table):
        return False
    is_alone = not document.values.keys() - {"devices", "device", *_SETTINGS}
    lists = [it for it in map(document.values.get, ("devices", "device")) if isinstance(it, Items)]
    return any(
        is_alone or all(isinstance(item, Table) and "groups" in item.values for item in it.items) for it in lists
    )


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that a configuration means, or that the plugin's arguments --device do.

    Raises:
        ImportRefusedError: there is no list of devices.
    """
    document = _of_arguments(document, settings)
    if not isinstance(document, Table) or not document.values.keys() & {"devices", "device"}:
        raise ImportRefusedError("generic-device-plugin's configuration has a list 'devices', and there is none", 1)
    fields = Fields(_told(document, settings), "generic-device-plugin")
    domain = settings.domain or fields.text("domain") or _default_domain(settings.image, fields)
    fields.scalar("domain")
    parts = [part for key in ("devices", "device") for table in fields.tables(key) for part in _device(table, domain)]
    agent = _agent(fields)
    if fields.text("listen"):
        fields.lost("listen", "listen is left out; where Fairlead serves HTTP is said with listen in [http]")
    if fields.text("log-level") not in (None, "info"):  # its own default, and ours
        fields.lost("log-level", "log-level is left out; it is said on the command line: fairlead run --log-level")
    fields.end()
    return Sketch(_SOURCE, (fields.part(), *_shared(parts)), agent)


def _default_domain(image: str, fields: Fields) -> str:
    """The domain where nothing says one, by the release of the plugin's image."""
    if release := _RELEASE.search(image):
        return _DOMAIN_SINCE if (int(release[1]), int(release[2])) >= (0, 2) else DOMAIN
    why = f"no domain is said, nor which release it is; {DOMAIN} is taken, as before 0.2.0; since then it is {_DOMAIN_SINCE}"
    fields.note("domain", f"{why}: say it with --domain")
    return DOMAIN


def _told(document: Table, settings: Settings) -> Table:
    """The document below what arguments and the environment say beside it: arguments win, then the environment."""
    said = {
        key: tree for key, tree in settings.table(_SETTINGS).values.items() if isinstance(tree, Scalar) and tree.text
    }
    return Table(
        document.line, {**document.values, **said}, {**document.lines, **{key: it.line for key, it in said.items()}}
    )


def _of_arguments(document: Tree | None, settings: Settings) -> Tree | None:
    """The document; where arguments name devices, these take the place of all of its own, as viper has it."""
    said = [value for name, value in settings.repeated if name == "device"]
    if not said:
        return document
    line = said[0].line
    devices = Items(line, tuple(tree for value in said for tree in embedded(value)))
    kept = document.without(("device", "devices")) if isinstance(document, Table) else Table(line, {}, {})
    return Table(line, {**kept.values, "devices": devices}, {**kept.lines, "devices": line})


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
    resource = f"{domain}/{(text_at(table, 'name') or '?').strip()}"
    fields = Fields(table, resource)
    name = fields.text("name")
    groups = [_group(group, resource) for group in fields.tables("groups")]
    if fields.sound and name is None:
        fields.lost("name", "it has no name and is left out")
    elif fields.sound and not groups:
        fields.lost("groups", "it has no groups, and so no devices; it is left out")
    fields.end()
    yield fields.part()
    if name is not None:
        yield from _resources(resource, groups)


def _resources(name: str, groups: Sequence[_Group]) -> Iterator[Part]:
    """The resource, and suggestions for the groups that cannot be had as they were."""
    usable = [group for group in groups if group.offered]
    if usable:
        remarks = tuple(remark for group in usable for remark in group.remarks)
        yield Part(remarks, Draft(name, tuple(group.draft for group in usable), usable[0].draft.line))
    for group in groups:
        if not group.offered:
            draft = Draft(name, (group.draft,), group.draft.line) if group.draft.options else None
            yield Part(group.remarks, draft, offered=False)


def _group(table: Table, name: str) -> _Group:
    fields = Fields(table, name)
    count = fields.whole("count")
    paths = [(path.line, _path(path, fields)) for path in fields.tables("paths")]
    sticks = [(stick.line, _stick(stick, fields)) for stick in fields.tables("usb")]
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
    elif len(sticks) > 1 or (sticks and "serial" not in (sticks[0][1] or {})):
        options["together"] = "all"
        fields.note("usb", 'all sticks that match are one device, as they were; without together = "all" each is one')
    whole = fields.sound and all(item is not None for _, item in (*paths, *sticks))
    return _Group(DraftGroup(options, table.line, lines), tuple(fields.remarks), whole and bool(options))


def _listed(
    key: str, found: Sequence[tuple[int, Mapping[str, Value] | None]]
) -> tuple[dict[str, Value], dict[str, int]]:
    items = [(line, item) for line, item in found if item]
    options: dict[str, Value] = {key: [item for _, item in items]} if items else {}
    return options, {f"{key}[{index}]": line for index, (line, _) in enumerate(items)}


def _path(table: Table, of: Fields) -> Mapping[str, Value] | None:
    fields = Fields(table, of.about, of.remarks)
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
        why = "what '\\' and '[!' mean to it cannot be said in our globs; the group is left out"
        fields.lost("path", f"{path!r}: {why}")
        return None
    if kind not in _TYPES:
        fields.lost("type", f"{kind!r} is no type, only Device and Mount are; the group is left out")
        return None
    return wanted


def _glob(path: str) -> str:
    """A glob of Go's as ours: to Go `**` is no more than `*`, and `[^…]` is what others write `[!…]`."""
    return re.sub(r"\*+", "*", path).replace("[^", "[!")


def _stick(table: Table, of: Fields) -> Mapping[str, Value] | None:
    fields = Fields(table, of.about, of.remarks)
    wanted = usb_ids(fields)
    if serial := fields.text("serial"):
        wanted["serial"] = serial
    fields.end()
    missing = [key for key in USB_IDS if key not in wanted]
    if fields.sound and missing:
        fields.lost("", f"{' and '.join(missing)} of a stick is missing; the group is left out")
    return wanted if fields.sound and not missing else None


# --- nodes and sticks that several groups name: to Fairlead they are the first one's, if they are not said to be shared ---


class _Place(Struct, frozen=True):
    """One group among those of all resources, in their order."""

    resource: str
    group: DraftGroup
    before: Sequence[tuple[str, DraftGroup]]
    after: Sequence[tuple[str, DraftGroup]]

    def called(self, resource: str) -> str:
        """A group of this resource as a person hears of it."""
        return resource if resource != self.resource else "another group"


def _shared(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts, with `shared` nodes and sticks."""
    groups = [(part.draft.name, group) for part in parts if part.draft and part.offered for group in part.draft.groups]
    shared: list[Part] = []
    index = 0
    for part in parts:
        if part.draft is None or not part.offered:
            shared.append(part)
            continue
        found: list[DraftGroup] = []
        remarks = list(part.remarks)
        for group in part.draft.groups:
            place = _Place(part.draft.name, group, groups[:index], groups[index + 1 :])
            has_paths = "paths" in group.options
            found.append((_with_shared_paths if has_paths else _with_shared_sticks)(place, remarks))
            index += 1
        shared.append(replace(part, draft=replace(part.draft, groups=tuple(found)), remarks=tuple(remarks)))
    return tuple(shared)


def _with_shared_paths(place: _Place, remarks: list[Remark]) -> DraftGroup:
    group = place.group
    paths = [dict(path) for path in group.items("paths")]
    for index, path in enumerate(paths):
        if path.get("type") != "mount" and (other := _who(place, path)):
            path["shared"] = True
            why = f"{other} names {path['path']} too; it is marked as shared, so that both offer it"
            remarks.append(Remark(group.line_of(f"paths[{index}]"), f"{place.resource}: {why}", lost=False))
    return replace(group, options={**group.options, "paths": paths})


def _with_shared_sticks(place: _Place, remarks: list[Remark]) -> DraftGroup:
    """The group, with its sticks shared if others take them too; those that have an owner belong to the first group."""
    group = place.group
    others = [*place.before, *(() if "owner" in group.options else place.after)]
    for index, stick in enumerate(group.items("usb")):
        for resource, other in others:
            if not any(_same_sticks(stick, theirs) for theirs in other.items("usb")):
                continue
            if resource == place.resource and other.options == group.options:
                continue  # the same device of the same resource: to both of us it is one
            who, line = place.called(resource), group.line_of(f"usb[{index}]")
            both = f"{place.resource}: {who} takes the same sticks"
            if "owner" in group.options:
                remarks.append(Remark(line, f"{both}; each stick belongs to the first that does"))
                return group
            why = "they are marked as shared, so that both offer them"
            remarks.append(Remark(line, f"{both}; {why}", lost=False))
            return replace(group, options={**group.options, "shared": True})
    return group


def _who(place: _Place, path: Mapping[str, Any]) -> str | None:
    """Who else names this node, and would offer it beside this group."""
    for resource, other in (*place.before, *place.after):
        alone = len(place.group.items("paths")) == len(other.items("paths")) == 1
        if resource == place.resource and alone:
            continue  # the same device of the same resource: to both of us it is one
        if any(_overlap(path, theirs) for theirs in other.items("paths")):
            return place.called(resource)
    return None


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both take one node. Of two different globs that cannot be told."""
    if other.get("type") == "mount":
        return False
    ours, theirs = one["path"], other["path"]
    return ours == theirs or any(
        _takes(one, two) or two.startswith(f"{one}/") for one, two in ((ours, theirs), (theirs, ours))
    )


def _takes(glob: str, path: str) -> bool:
    return is_glob(glob) and Glob(glob).takes(path)


def _same_sticks(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    serials = {one.get("serial"), other.get("serial")}
    return _ids(one) == _ids(other) and (len(serials) == 1 or None in serials)


def _ids(stick: Mapping[str, Any]) -> list[str]:
    return [str(stick[key]).lower().zfill(4) for key in ("vendor", "product")]
