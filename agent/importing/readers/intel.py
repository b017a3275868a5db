"""Reads the arguments of Intel's GPU plugin, or the operator's GpuDevicePlugin."""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields, spelled
from agent.importing.model import Draft, Part, Remark, Sketch, Value
from agent.importing.settings import Settings, as_argument
from agent.importing.yaml_tree import Scalar, Table, Tree, below, text_at

KIND: Final = "GpuDevicePlugin"
"""Of the resource by which Intel's operator is told of a plugin."""
_SOURCE: Final = (
    "From the arguments of Intel's GPU plugin. Names, IDs, nodes and mounts are the same. Without card_ids an ID is a PCI "
    "address, which stays when drivers are bound in another order."
)
OF_THE_OPERATOR: Final = {
    "sharedDevNum": "shared-dev-num",
    "preferredAllocationPolicy": "allocation-policy",
    "enableMonitoring": "enable-monitoring",
    "monitoringMode": "monitoring-mode",
    "resourceManager": "resource-manager",
    "allowIDs": "allow-ids",
    "denyIDs": "deny-ids",
    "bypathMode": "bypath",
}
"""Key of its resource → the plugin's argument."""

_OF_ITS_PODS: Final = ("image", "initImage", "logLevel", "nodeSelector", "tolerations")

_ARGUMENTS: Final = (*OF_THE_OPERATOR.values(), "health-management", "xpumd-endpoint", "wsl")
_LIMITS: Final = ("temp-limit", "gpu-temp-limit", "memory-temp-limit")
_PLACEMENTS: Final = {"none": "", "balanced": "", "packed": "pack"}
_BY_PATHS: Final = ("single", "all", "none")
_DRIVERS: Final = ("i915", "xe")
_PREFIX: Final = "gpu.intel.com/"
_MONITORING: Final = {
    "single": {"monitoring": list(_DRIVERS)},
    "split": {f"{driver}_monitoring": [driver] for driver in _DRIVERS},
}
"""Mode → resource → whose GPUs it has."""


def is_it(document: Tree) -> bool:
    """Is the document the operator's resource?"""
    return text_at(document, "kind") == KIND


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that the plugin's arguments mean."""
    remarks: list[Remark] = []
    fields = Fields(_said(document, settings, remarks), "Intel's GPU plugin", remarks)
    options: dict[str, Value] = {"card_ids": True}
    if (shared := fields.whole("shared-dev-num")) and shared > 1:
        options["replicas"] = shared
    policy = fields.text("allocation-policy") or "none"
    if policy not in _PLACEMENTS:
        fields.lost("allocation-policy", f"there is no allocation-policy {policy!r}; 'none' is taken")
    elif _PLACEMENTS[policy]:
        options["placement"] = _PLACEMENTS[policy]
    if fields.flag("resource-manager"):
        fields.lost("resource-manager", "fractions of GPUs, of GPU Aware Scheduling, are not offered")
    if (by_path := fields.text("bypath") or "single") not in _BY_PATHS:
        fields.lost("bypath", f"there is no bypath {by_path!r}; 'single' is taken")
    elif by_path != "single":
        options["by_path"] = by_path
    if fields.flag("health-management") or fields.text("xpumd-endpoint"):
        key = "health-management" if fields.flag("health-management") else "xpumd-endpoint"
        fields.lost(
            key,
            f"{key}: what Level Zero or xpumd say of memory and temperature is not asked; health is what sysfs tells",
        )
    for key in _LIMITS:
        if fields.whole(key):
            fields.lost(key, f"{key} is left out: no temperature makes a GPU unhealthy")
    if fields.flag("wsl"):
        why = "all that Windows lends is one device, and no ZE_AFFINITY_MASK chooses among several GPUs"
        fields.lost("wsl", f"wsl: {why}")
        return Sketch(_SOURCE, (fields.part(), _dxg(shared or 1)))
    allowed, denied = (_ids(fields, key) for key in ("allow-ids", "deny-ids"))
    parts = [_part(name, allowed, denied, options) for name in _DRIVERS]
    monitors = [_monitor(name, drivers) for name, drivers in _monitored(fields)]
    return Sketch(_SOURCE, (fields.part(), *parts, *monitors))


def _said(document: Tree | None, settings: Settings, remarks: list[Remark]) -> Table:
    """The arguments; what the operator's resource says, by their names."""
    spec = below(document, "spec") if document is not None and is_it(document) else None
    values = spelled(spec, (*OF_THE_OPERATOR, *_OF_ITS_PODS)).values if isinstance(spec, Table) else {}
    for key, tree in values.items():
        if key not in OF_THE_OPERATOR and key not in _OF_ITS_PODS:
            remarks.append(Remark(tree.line, f"Fairlead has nothing for the key {key!r} of a {KIND}"))
    said: dict[str, Tree] = {}
    for key, argument in OF_THE_OPERATOR.items():
        if isinstance(found := values.get(key), Scalar):
            said[argument] = as_argument(found.text, found.line)
    said |= {key: settings.arguments[key] for key in (*_ARGUMENTS, *_LIMITS) if key in settings.arguments}
    return Table.of(document.line if document else 1, said)


def _monitored(fields: Fields) -> list[tuple[str, list[str]]]:
    """The resources that have the nodes of all GPUs, and of which drivers."""
    mode = fields.text("monitoring-mode")
    if not fields.flag("enable-monitoring"):
        return []
    if mode is not None and mode not in _MONITORING:
        fields.lost("monitoring-mode", f"there is no monitoring-mode {mode!r}; 'single' is taken")
        mode = "single"
    if mode is None:
        why = "before release 0.36 there is a resource for each driver, since then one for both; all are offered"
        fields.note("enable-monitoring", f"enable-monitoring: {why}")
    return [it for known, resources in _MONITORING.items() if mode in (None, known) for it in resources.items()]


def _monitor(name: str, drivers: list[str]) -> Part:
    select: dict[str, Value] = {"vendor": "8086", "monitoring": drivers if len(drivers) > 1 else drivers[0]}
    return Part((), Draft.of(_PREFIX + name, {"select": select}, 1, "gpu"))


def _dxg(pods: int) -> Part:
    """What a container gets in WSL, where no GPU is on PCI."""
    node: dict[str, Value] = {"path": "/dev/dxg", "permissions": "rw"}
    libraries: dict[str, Value] = {"path": "/usr/lib/wsl", "type": "mount", "read_only": True}
    options: dict[str, Value] = {"paths": [node, libraries], **({"count": pods} if pods > 1 else {})}
    return Part((), Draft.of(f"{_PREFIX}dxg", options, 1))


def _ids(fields: Fields, key: str) -> list[str]:
    """`0x49c5,0x49c6` as four digits each."""
    return [text.strip().lower().removeprefix("0x") for text in (fields.text(key) or "").split(",") if text.strip()]


def _part(driver: str, allowed: list[str], denied: list[str], options: dict[str, Value]) -> Part:
    select: dict[str, Value] = {"vendor": "8086", "driver": driver, **({"device": allowed} if allowed else {})}
    exclude: dict[str, Value] = {"exclude": {"device": denied}} if denied else {}
    return Part((), Draft.of(_PREFIX + driver, {"select": select, **exclude, **options}, 1, "gpu"))
