"""Reads the configuration of k8s-rdma-shared-dev-plugin: pools of adapters, each behind many tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from msgspec.structs import replace

from agent.importing.fields import Fields, spelled
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.settings import Settings
from agent.importing.values import link_layers
from agent.importing.yaml_tree import Items, Table, Tree

_LIST: Final = "configList"
_PREFIX: Final = "rdma"
_KEYS: Final = (_LIST, "periodicUpdateInterval")
_POOL: Final = ("resourceName", "resourcePrefix", "rdmaHcaMax", "devices", "selectors")
_SELECTORS: Final = {
    "vendors": "vendor",
    "deviceIDs": "device",
    "drivers": "driver",
    "ifNames": "ifname",
    "linkTypes": "link_layer",
}
"""Selector there → attribute here."""

_HEX: Final = re.compile("[0-9a-fA-F]{4}")
_SOURCE: Final = (
    "From the configuration of k8s-rdma-shared-dev-plugin. Names, tokens and nodes are the same, and the kubelet is told of "
    "no NUMA node; topology = true tells it. The plugin sets interfaces up when it starts; Fairlead does not."
)


def is_it(document: Tree) -> bool:
    """Does the document have a list of pools?"""
    return isinstance(document, Table) and isinstance(spelled(document, _KEYS).values.get(_LIST), Items)


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it has no list of pools.
    """
    if not isinstance(document, Table) or not is_it(document):
        raise ImportRefusedError(f"k8s-rdma-shared-dev-plugin's configuration has a list {_LIST!r}", 1)
    fields = Fields(spelled(document, _KEYS), _LIST)
    parts = [_pool(spelled(pool, _POOL)) for pool in fields.tables(_LIST)]
    if fields.scalar("periodicUpdateInterval"):
        fields.note(
            "periodicUpdateInterval", "periodicUpdateInterval is not needed: the kernel's events tell of adapters"
        )
    fields.end()
    if cdi := settings.arguments.get("use-cdi"):
        why = "use-cdi: nodes are in the answer itself, not in CDI specs; pods get the same"
        fields.remarks.append(Remark(cdi.line, why, lost=False))
    return Sketch(_SOURCE, (fields.part(), *_overlapping(parts)))


def _pool(pool: Table) -> Part:
    fields = Fields.named(pool, "resourceName", "a pool")
    name = fields.text("resourceName")
    prefix, tokens = fields.text("resourcePrefix") or _PREFIX, fields.whole("rdmaHcaMax")
    devices, selectors = fields.texts("devices"), fields.tree("selectors")
    select = _selected(selectors, devices, fields)
    fields.end()
    if not fields.sound:
        return fields.part()
    if name is None:
        fields.lost("resourceName", "it has no resourceName and is left out")
    elif not tokens:
        fields.note("rdmaHcaMax", "rdmaHcaMax is 0 or missing, and so none was offered")
    elif not select:
        fields.lost("selectors", "it has neither selectors nor devices, which the plugin refuses; it is left out")
    else:
        options: dict[str, Value] = {"shared": tokens, "select": select, "topology": False}
        return fields.part(Draft.of(f"{prefix}/{name}", options, fields.line("resourceName"), "infiniband"))
    return fields.part()


def _selected(tree: Tree | None, devices: list[str], of: Fields) -> dict[str, Value]:
    """The pool's selector, empty if there is none."""
    found: dict[str, Value] = {}
    if isinstance(tree, Table):
        fields = Fields(spelled(tree, tuple(_SELECTORS)), of.about, of.remarks)
        for key, attribute in _SELECTORS.items():
            if not (values := fields.texts(key)):
                continue
            if attribute in ("vendor", "device"):
                values = [value.lower() if _HEX.fullmatch(value) else value for value in values]
            if attribute == "link_layer":
                values = link_layers(values)
                fields.note(
                    key, "linkTypes: here it is the port's link layer, not the interface's type; of iWARP they differ"
                )
            found[attribute] = values
        fields.end()
        of.sound = of.sound and fields.sound
    if devices and found:
        of.lost("devices", "it has both devices and selectors, which the plugin refuses; the selectors are taken")
    elif devices:
        found["ifname"] = devices
    return found


def _overlapping(parts: Sequence[Part]) -> Iterator[Part]:
    """The pools; those whose adapters may be in another one, too, say so."""
    for part in parts:
        others = [other.draft for other in parts if other is not part and other.draft is not None]
        if part.draft is None or not any(_may_meet(part.draft, other) for other in others):
            yield part
            continue
        (group,) = part.draft.groups
        overlapping = replace(group, options={**group.options, "overlap": True})
        yield replace(part, draft=replace(part.draft, groups=(overlapping,)))


def _may_meet(one: Draft, other: Draft) -> bool:
    selectors: list[Any] = [draft.groups[0].options["select"] for draft in (one, other)]
    mine, theirs = selectors
    return all(set(mine[key]) & set(theirs[key]) for key in mine.keys() & theirs.keys())
