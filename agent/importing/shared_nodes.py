"""Marks nodes and sticks that several groups name: to Fairlead they are the first one's, if they are not said to be shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agent.importing.model import DraftGroup, Part, Remark
from backends.linux.globs import Glob, is_glob


class _Place(Struct, frozen=True):
    """One group among those of all resources, in their order."""

    resource: str
    group: DraftGroup
    before: Sequence[tuple[str, DraftGroup]]
    after: Sequence[tuple[str, DraftGroup]]

    def called(self, resource: str) -> str:
        """A group of this resource as a person hears of it."""
        return resource if resource != self.resource else "another group"


def share(parts: Sequence[Part]) -> tuple[Part, ...]:
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
    """Do both take one node? Of two different globs that cannot be told."""
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
