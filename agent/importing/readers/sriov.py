"""Reads the configuration of the sriov-network-device-plugin: `resourceList`, with selectors for each resource."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from msgspec import Struct

from agent.importing.fields import Fields, spelled
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.settings import Settings
from agent.importing.values import link_layers
from agent.importing.yaml_tree import Items, Scalar, Table, Tree

PREFIX: Final = "intel.com"
"""Its own default of --resource-prefix."""

_SOURCE: Final = (
    "From the configuration of the sriov-network-device-plugin. IDs, nodes, variables and DeviceInfo files are the same. "
    "A resource is there also where it has no devices."
)
_ENTRY: Final = ("resourceName", "resourcePrefix", "deviceType", "excludeTopology", "selectors", "additionalInfo")
_TYPES: Final = ("netDevice", "accelerator", "auxNetDevice")
_LISTS: Final = {
    "vendors": "vendor",
    "devices": "device",
    "drivers": "driver",
    "pciAddresses": "address",
    "acpiIndexes": "acpi_index",
    "pKeys": "pkey",
    "linkTypes": "link_layer",
    "ddpProfiles": "ddp_profile",
}
"""Selector there → attribute here."""

_NUMBERED: Final = {"pfNames": "pf", "rootDevices": "physical"}
"""The same, of those that may have numbers behind a `#`."""

_FLAGS: Final = {"isRdma": "rdma", "needVhostNet": "vhost_net"}
_SELECTORS: Final = (*_LISTS, *_NUMBERED, *_FLAGS, "vdpaType", "auxTypes")


def is_it(document: Tree) -> bool:
    """Does the document have a list of resources?"""
    return isinstance(document, Table) and isinstance(
        spelled(document, ("resourceList",)).values.get("resourceList"), Items
    )


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it has no list of resources.
    """
    if not isinstance(document, Table) or not is_it(document):
        raise ImportRefusedError("the sriov-network-device-plugin's configuration has a list 'resourceList'", 1)
    said = settings.arguments.get("resource-prefix")
    prefix = settings.domain or (said.text if said else PREFIX)
    fields = Fields(spelled(document, ("resourceList",)), "resourceList")
    if cdi := settings.arguments.get("use-cdi"):
        why = "use-cdi: nodes are in the answer itself, not in CDI specs; pods get the same"
        fields.remarks.append(Remark(cdi.line, why, lost=False))
    parts = [_resource(spelled(entry, _ENTRY), prefix) for entry in fields.tables("resourceList")]
    fields.end()
    return Sketch(_SOURCE, (fields.part(), *parts))


class _Selection(Struct):
    """What the selectors of a resource mean, as far as it can be said here."""

    tables: list[Value] = []
    options: dict[str, Value] = {}
    same: bool = True
    """Does it select what it selected?"""


def _resource(entry: Table, prefix: str) -> Part:
    fields = Fields.named(entry, "resourceName", "a resource without a name")
    named, prefix = fields.text("resourceName"), fields.text("resourcePrefix") or prefix
    kind = fields.text("deviceType") or _TYPES[0]
    options: dict[str, Value] = {"device_type": kind} if kind != _TYPES[0] else {}
    if fields.flag("excludeTopology"):
        options["topology"] = False
    selection = _selection(fields, kind)
    if info := {
        key: _texts(table) for key, table in fields.table("additionalInfo").items() if isinstance(table, Table)
    }:
        options["additional_info"] = info
    fields.end()
    if fields.sound and named is None:
        fields.lost("resourceName", "it has no resourceName and is left out")
    elif fields.sound and kind not in _TYPES:
        fields.lost("deviceType", f"there is no deviceType {kind!r}; it is left out")
    if not fields.sound or named is None or kind not in _TYPES or selection is None:
        return fields.part()
    select = {"select": selection.tables} if selection.tables else {}
    options |= {**selection.options, **select}
    draft = Draft.of(f"{prefix}/{named}", options, fields.line("resourceName"), "sriov")
    return fields.part(draft, offered=selection.same)


def _selection(fields: Fields, kind: str) -> _Selection | None:
    """What all selectors mean; None if the plugin offered nothing for them."""
    tree = fields.tree("selectors")
    every = [it for it in (tree.items if isinstance(tree, Items) else (tree,)) if isinstance(it, Table)]
    if not every:
        fields.lost("selectors", "it has no selectors, and so it had no devices; it is left out")
        return None
    selection = _Selection()
    flags = [_one(spelled(table, _SELECTORS), kind, fields, selection) for table in every]
    if {} in selection.tables:  # one that selects everything
        selection.tables = []
    selection.options = {key: value for of in flags for key, value in of.items()}
    if any(of != selection.options for of in flags):
        why = "its selectors differ in isRdma, needVhostNet or vdpaType; here all of it is asked of all"
        fields.lost("selectors", why)
        selection.same = False
    return selection


def _one(table: Table, kind: str, of: Fields, selection: _Selection) -> Mapping[str, Value]:
    """Read one selector into the selection; returns the options that it means."""
    fields = Fields(table, of.about, of.remarks)
    base: dict[str, Value] = {}
    for key, attribute in _LISTS.items():
        if values := fields.texts(key):
            base[attribute] = _short(link_layers(values) if key == "linkTypes" else values)
            if key == "linkTypes" and len(values) > 1:
                fields.note(key, "several linkTypes: functions of any of them are offered")
            if key == "ddpProfiles":
                fields.note(key, "the profile is asked for by devlink; a card that only ddptool knows has none here")
    number = "sfnum" if kind == "auxNetDevice" else "vf"
    choices = [list(_numbered(fields.texts(key), attribute, number)) or [{}] for key, attribute in _NUMBERED.items()]
    for pf, root in product(*choices):
        if number in pf and number in root:
            fields.lost("rootDevices", "pfNames and rootDevices both choose numbers; here those of rootDevices count")
            selection.same = False
        selection.tables.append({**base, **pf, **root})
    if [value for value in fields.texts("auxTypes") if value != "sf"]:
        fields.lost("auxTypes", "there are no auxTypes but sf; it is left out")
        selection.same = False
    options: dict[str, Value] = {option: True for key, option in _FLAGS.items() if fields.flag(key)}
    if vdpa := fields.text("vdpaType"):
        options["vdpa"] = vdpa
    fields.end()
    of.sound = of.sound and fields.sound
    return options


def _numbered(values: Sequence[str], attribute: str, number: str) -> Iterator[dict[str, Value]]:
    """Selectors for `ens1f0` and `ens1f1#0,3-5`: all without numbers in one, each with numbers in its own."""
    if plain := [value for value in values if "#" not in value]:
        yield {attribute: _short(plain)}
    for name, _, numbers in (value.partition("#") for value in values if "#" in value):
        yield {attribute: name, number: _short([part.strip() for part in numbers.split(",")])}


def _short(values: list[str]) -> Value:
    return values[0] if len(values) == 1 else values


def _texts(table: Table) -> dict[str, Value]:
    return {key: tree.text for key, tree in table.values.items() if isinstance(tree, Scalar)}
