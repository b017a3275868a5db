"""Reads the configurations of plugins for network cards: sriov-network-device-plugin, k8s-rdma-shared-dev-plugin, Solarflare's.

The first has a `resourceList` with selectors for each resource, the second a `configList` of pools of adapters, each behind
many tokens, the third a ConfigMap with the version of Onload.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from agent.importing.fields import Fields, Settings, spelled
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree

_LAYERS: Final = {"ether": "Ethernet", "infiniband": "InfiniBand"}


def _link_layers(types: Iterable[str]) -> list[str]:
    """Types of network interfaces, as `ip link` has them, as the link layers of RDMA ports."""
    return [_LAYERS.get(one.lower(), one) for one in types]


def _say_cdi(settings: Settings, fields: Fields) -> None:
    if cdi := settings.arguments.get("use-cdi"):
        why = "use-cdi: nodes are in the answer itself, not in CDI specs; pods get the same"
        fields.remarks.append(Remark(cdi.line, why, lost=False))


# --- sriov-network-device-plugin ---

_SRIOV_PREFIX: Final = "intel.com"
"""Its own default of --resource-prefix."""

_SRIOV: Final = (
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


def is_sriov(document: Tree) -> bool:
    """Whether the document has a list of resources."""
    return isinstance(document, Table) and isinstance(
        spelled(document, ("resourceList",)).values.get("resourceList"), Items
    )


def read_sriov(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it has no list of resources.
    """
    if not isinstance(document, Table) or not is_sriov(document):
        raise ImportRefusedError("the sriov-network-device-plugin's configuration has a list 'resourceList'", 1)
    said = settings.arguments.get("resource-prefix")
    prefix = settings.domain or (said.text if said else _SRIOV_PREFIX)
    fields = Fields(spelled(document, ("resourceList",)), "resourceList")
    _say_cdi(settings, fields)
    parts = [_resource(spelled(entry, _ENTRY), prefix) for entry in fields.tables("resourceList")]
    fields.end()
    return Sketch(_SRIOV, (fields.part(), *parts))


class _Selection(Struct):
    """What the selectors of a resource mean, as far as it can be said here."""

    tables: list[Value] = []
    options: dict[str, Value] = {}
    same: bool = True
    """Whether it selects what it selected in the imported file."""


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
            base[attribute] = _short(_link_layers(values) if key == "linkTypes" else values)
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


# --- k8s-rdma-shared-dev-plugin ---

_POOLS: Final = "configList"
_RDMA_PREFIX: Final = "rdma"
_RDMA_KEYS: Final = (_POOLS, "periodicUpdateInterval")
_POOL: Final = ("resourceName", "resourcePrefix", "rdmaHcaMax", "devices", "selectors")
_RDMA_SELECTORS: Final = {
    "vendors": "vendor",
    "deviceIDs": "device",
    "drivers": "driver",
    "ifNames": "ifname",
    "linkTypes": "link_layer",
}
"""Selector there → attribute here."""

_HEX: Final = re.compile("[0-9a-fA-F]{4}")
_RDMA: Final = (
    "From the configuration of k8s-rdma-shared-dev-plugin. Names, tokens and nodes are the same, and the kubelet is told of "
    "no NUMA node; topology = true tells it. The plugin sets interfaces up when it starts; Fairlead does not."
)


def is_rdma(document: Tree) -> bool:
    """Whether the document has a list of pools."""
    return isinstance(document, Table) and isinstance(spelled(document, _RDMA_KEYS).values.get(_POOLS), Items)


def read_rdma(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that a configuration means.

    Raises:
        ImportRefusedError: it has no list of pools.
    """
    if not isinstance(document, Table) or not is_rdma(document):
        raise ImportRefusedError(f"k8s-rdma-shared-dev-plugin's configuration has a list {_POOLS!r}", 1)
    fields = Fields(spelled(document, _RDMA_KEYS), _POOLS)
    parts = [_pool(spelled(pool, _POOL)) for pool in fields.tables(_POOLS)]
    if fields.scalar("periodicUpdateInterval"):
        fields.note(
            "periodicUpdateInterval", "periodicUpdateInterval is not needed: the kernel's events tell of adapters"
        )
    fields.end()
    _say_cdi(settings, fields)
    return Sketch(_RDMA, (fields.part(), *_overlapping(parts)))


def _pool(pool: Table) -> Part:
    fields = Fields.named(pool, "resourceName", "a pool")
    name = fields.text("resourceName")
    prefix, tokens = fields.text("resourcePrefix") or _RDMA_PREFIX, fields.whole("rdmaHcaMax")
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
        fields = Fields(spelled(tree, tuple(_RDMA_SELECTORS)), of.about, of.remarks)
        for key, attribute in _RDMA_SELECTORS.items():
            if not (values := fields.texts(key)):
                continue
            if attribute in ("vendor", "device"):
                values = [value.lower() if _HEX.fullmatch(value) else value for value in values]
            if attribute == "link_layer":
                values = _link_layers(values)
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


# --- Solarflare's device plugin (sfc-device-plugin) ---

_NAME: Final = "solarflare/smartNIC"
_EXPRESSION: Final = r"(?m)[\r\n]+^.*SFC[6-9].*$"
_SOLARFLARE_KEYS: Final = frozenset({"onload-version", "resource-name"})
_SOLARFLARE: Final = (
    "From the ConfigMap of Solarflare's device plugin. The IDs of the devices are PCI addresses, not names of interfaces; "
    "no pod names them."
)


def solarflare(document: Tree) -> Table | None:
    """The plugin's keys in a ConfigMap, or alone; None if they are not there."""
    data = document.values.get("data", document) if isinstance(document, Table) else None
    return data if isinstance(data, Table) and data.values.keys() >= _SOLARFLARE_KEYS else None


def read_solarflare(document: Tree | None, _settings: Settings) -> Sketch:
    """The resource that the ConfigMap means.

    Raises:
        ImportRefusedError: it is not that ConfigMap.
    """
    if (data := solarflare(document) if document is not None else None) is None:
        raise ImportRefusedError("Solarflare's ConfigMap has the keys onload-version and resource-name in its data", 1)
    fields = Fields.named(data, "resource-name", _NAME)
    fields.text("resource-name")
    fields.lost(
        "resource-name",
        "the plugin moved a card's interface into its pod and gave it the address in the pod's annotation sfc-nic-ip; "
        "Fairlead leaves that to a CNI plugin: see docs/sriov.md",
    )
    if (expression := fields.text("reg-exp-sfc")) is not None and expression != _EXPRESSION:
        fields.lost(
            "reg-exp-sfc", "reg-exp-sfc may have chosen some models; all Solarflare cards are offered: add select"
        )
    if fields.text("node-label-onload-version"):
        fields.lost("node-label-onload-version", "the node gets no annotation with Onload's version")
    for key in ("k8s-api", "socket-name"):
        if fields.text(key):
            fields.note(key, f"{key} is not needed, and left out")
    options: dict[str, Value] = {}
    if version := fields.text("onload-version"):
        options["onload_version"] = version
    fields.end()
    draft = Draft.of(fields.about, options, fields.line("resource-name"), "solarflare")
    return Sketch(_SOLARFLARE, (fields.part(draft),))
