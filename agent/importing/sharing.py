"""Marks nodes that several resources name: to Fairlead a node belongs to the first one, if it is not said to be shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.importing.model import Draft, Part, Remark
from backends.linux.globs import Glob, is_glob


def share(parts: Sequence[Part]) -> tuple[Part, ...]:
    """The parts, with `shared` nodes; a stick cannot be shared, and is reported as lost to all but the first."""
    return tuple(_shared(part, parts[:index], parts[index + 1 :]) for index, part in enumerate(parts))


def _shared(part: Part, before: Sequence[Part], after: Sequence[Part]) -> Part:
    draft = part.draft
    if draft is None or not part.offered:
        return part
    earlier, others = _drafts(before), [*_drafts(before), *_drafts(after)]
    paths = [dict(path) for path in draft.items("paths")]
    remarks: list[Remark] = []
    for index, path in enumerate(paths):
        if path.get("type") != "mount" and (other := _who(others, path)):
            path["shared"] = True
            sentence = f"{draft.name}: {other} names {path['path']} too; it is marked as shared, so that both offer it"
            remarks.append(Remark(draft.line_of(f"paths[{index}]"), sentence, lost=False))
    for index, stick in enumerate(draft.items("usb")):
        if other := _who_first(earlier, stick):
            sentence = (
                f"{draft.name}: {other} takes the same sticks; each stick belongs to the first resource that does"
            )
            remarks.append(Remark(draft.line_of(f"usb[{index}]"), sentence))
    options = {**draft.options, "paths": paths} if paths else draft.options
    return replace(part, draft=replace(draft, options=options), remarks=(*part.remarks, *remarks))


def _drafts(parts: Sequence[Part]) -> list[Draft]:
    return [part.draft for part in parts if part.draft is not None and part.offered]


def _who(others: Sequence[Draft], path: Mapping[str, Any]) -> str | None:
    """The other resource that names this node."""
    names = (other.name for other in others if any(_overlap(path, theirs) for theirs in other.items("paths")))
    return next(names, None)


def _who_first(earlier: Sequence[Draft], stick: Mapping[str, Any]) -> str | None:
    """The resource that takes these sticks already."""
    names = (other.name for other in earlier if any(_same_sticks(stick, theirs) for theirs in other.items("usb")))
    return next(names, None)


def _overlap(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Do both take one node? Of two globs that are not the same nobody can tell."""
    if other.get("type") == "mount":
        return False
    ours, theirs = one["path"], other["path"]
    return ours == theirs or _takes(ours, theirs) or _takes(theirs, ours)


def _takes(glob: str, path: str) -> bool:
    return is_glob(glob) and Glob(glob).takes(path)


def _same_sticks(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    serials = {one.get("serial"), other.get("serial")}
    return _ids(one) == _ids(other) and (len(serials) == 1 or None in serials)


def _ids(stick: Mapping[str, Any]) -> list[str]:
    return [str(stick[key]).lower().zfill(4) for key in ("vendor", "product")]
