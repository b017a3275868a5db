"""Reads the configuration of k8s-rdma-shared-dev-plugin: pools of adapters, each behind many tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from agent.importing.fields import Fields, spelled
from agent.importing.inputs import Settings
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.tree import Items, Table, Tree
from agent.importing.values import link_layers

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
    "From the configuration of k8s-rdma-shared-dev-plugin. Names, tokens and nodes are the same; a token has the NUMA node "
    "on which all adapters of its pool are. The plugin sets interfaces up when it starts; Fairlead does not."
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
    remarks: list[Remark] = []
    fields = Fields(spelled(document, _KEYS), _LIST, remarks)
    parts = [_pool(spelled(pool, _POOL)) for pool in fields.tables(_LIST)]
    if fields.scalar("periodicUpdateInterval"):
        fields.note(
            "periodicUpdateInterval", "periodicUpdateInterval is not needed: the kernel's events tell of adapters"
        )
    fields.end()
    if cdi := settings.arguments.get("use-cdi"):
        why = "use-cdi: nodes are in the answer itself, not in CDI specs; pods get the same"
        remarks.append(Remark(cdi.line, why, lost=False))
    return Sketch(_SOURCE, (Part(tuple(remarks)), *_compared(parts)))


def _pool(pool: Table) -> Part:
    name = Fields(pool, "", []).text("resourceName")
    remarks: list[Remark] = []
    fields = Fields(pool, name or "a pool", remarks)
    fields.text("resourceName")
    prefix, tokens = fields.text("resourcePrefix") or _PREFIX, fields.whole("rdmaHcaMax")
    devices, selectors = fields.texts("devices"), fields.tree("selectors")
    select = _selected(selectors, devices, fields, remarks)
    fields.end()
    if not fields.sound:
        return Part(tuple(remarks))
    if name is None:
        fields.lost("resourceName", "it has no resourceName and is left out")
    elif not tokens:
        fields.note("rdmaHcaMax", "rdmaHcaMax is 0 or missing, and so none was offered")
    elif not select:
        fields.lost("selectors", "it has neither selectors nor devices, which the plugin refuses; it is left out")
    else:
        line = fields.line("resourceName")
        group = DraftGroup({"shared": tokens, "select": select}, line)
        return Part(tuple(remarks), Draft(f"{prefix}/{name}", (group,), line, "infiniband"))
    return Part(tuple(remarks))


def _selected(tree: Tree | None, devices: list[str], of: Fields, remarks: list[Remark]) -> dict[str, Value]:
    """The pool's selector, empty if there is none."""
    found: dict[str, Value] = {}
    if isinstance(tree, Table):
        fields = Fields(spelled(tree, tuple(_SELECTORS)), of.about, remarks)
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


def _compared(parts: Iterable[Part]) -> Iterator[Part]:
    """The pools; where an earlier one may have adapters of theirs, that is told."""
    seen: list[tuple[str, Mapping[str, Any]]] = []
    for part in parts:
        remarks = list(part.remarks)
        if part.draft is not None:
            select: Any = part.draft.groups[0].options["select"]
            for name, before in seen:
                if all(set(before[key]) & set(select[key]) for key in before.keys() & select.keys()):
                    why = f"its adapters may be in {name} too, which comes first and has them; here an adapter is in one pool"
                    remarks.append(Remark(part.draft.line, f"{part.draft.name}: {why}"))
                    break
            seen.append((part.draft.name, select))
        yield Part(tuple(remarks), part.draft)
