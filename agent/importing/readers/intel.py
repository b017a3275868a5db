"""Reads the arguments of Intel's GPU plugin, or the operator's GpuDevicePlugin."""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields
from agent.importing.inputs import Settings, as_argument
from agent.importing.model import Draft, DraftGroup, Part, Remark, Sketch, Value
from agent.importing.tree import Scalar, Table, Tree, below, text_at

_KIND: Final = "GpuDevicePlugin"
_SOURCE: Final = (
    "From the arguments of Intel's GPU plugin. Nodes and mounts are the same; the ID of a GPU is its PCI address, not "
    "`card0-0`, which changes when drivers are bound in another order."
)
_OF_THE_OPERATOR: Final = {
    "sharedDevNum": "shared-dev-num",
    "preferredAllocationPolicy": "allocation-policy",
    "enableMonitoring": "enable-monitoring",
    "resourceManager": "resource-manager",
    "allowIDs": "allow-ids",
    "denyIDs": "deny-ids",
    "byPathMode": "bypath",
}
"""Key of its resource → the plugin's argument."""

_ARGUMENTS: Final = (*_OF_THE_OPERATOR.values(), "health-management", "wsl")
_LIMITS: Final = ("temp-limit", "gpu-temp-limit", "memory-temp-limit")
_PLACEMENTS: Final = {"none": "", "balanced": "", "packed": "pack"}


def is_it(document: Tree) -> bool:
    """Is the document the operator's resource?"""
    return text_at(document, "kind") == _KIND


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that the plugin's arguments mean."""
    remarks: list[Remark] = []
    fields = Fields(_said(document, settings), "Intel's GPU plugin", remarks)
    options: dict[str, Value] = {}
    if (shared := fields.whole("shared-dev-num")) and shared > 1:
        options["replicas"] = shared
    policy = fields.text("allocation-policy") or "none"
    if policy not in _PLACEMENTS:
        fields.lost("allocation-policy", f"there is no allocation-policy {policy!r}; 'none' is taken")
    elif _PLACEMENTS[policy]:
        options["placement"] = _PLACEMENTS[policy]
    if fields.flag("enable-monitoring"):
        why = "the resources i915_monitoring and xe_monitoring, which give a pod all GPUs, are not offered"
        fields.lost("enable-monitoring", why)
    if fields.flag("resource-manager"):
        fields.lost("resource-manager", "fractions of GPUs, of GPU Aware Scheduling, are not offered")
    if (by_path := fields.text("bypath") or "single") != "single":
        fields.lost(
            "bypath", f"bypath {by_path!r}: a GPU's own links in /dev/dri/by-path are mounted, as with 'single'"
        )
    if fields.flag("health-management"):
        fields.note("health-management", "health-management is not needed: health is always watched")
    if fields.flag("wsl"):
        fields.lost("wsl", "WSL's /dev/dxg is not offered; give it a resource of the backend chardev")
    for key in _LIMITS:
        if fields.whole(key):
            fields.lost(key, f"{key} is left out: no temperature makes a GPU unhealthy")
    allowed, denied = (_ids(fields, key) for key in ("allow-ids", "deny-ids"))
    parts = [_part(name, allowed, denied, options) for name in ("i915", "xe")]
    return Sketch(_SOURCE, (Part(tuple(remarks)), *parts))


def _said(document: Tree | None, settings: Settings) -> Table:
    """The arguments; what the operator's resource says, by their names."""
    spec = below(document, "spec") if document is not None and is_it(document) else None
    values = dict(spec.values) if isinstance(spec, Table) else {}
    said: dict[str, Tree] = {}
    for key, argument in _OF_THE_OPERATOR.items():
        if isinstance(found := values.get(key), Scalar):
            said[argument] = as_argument(found.text, found.line)
    said |= {key: settings.arguments[key] for key in (*_ARGUMENTS, *_LIMITS) if key in settings.arguments}
    return Table(document.line if document else 1, said, {key: tree.line for key, tree in said.items()})


def _ids(fields: Fields, key: str) -> list[str]:
    """`0x49c5,0x49c6` as four digits each."""
    return [text.strip().lower().removeprefix("0x") for text in (fields.text(key) or "").split(",") if text.strip()]


def _part(driver: str, allowed: list[str], denied: list[str], options: dict[str, Value]) -> Part:
    select: dict[str, Value] = {"vendor": "8086", "driver": driver, **({"device": allowed} if allowed else {})}
    exclude: dict[str, Value] = {"exclude": {"device": denied}} if denied else {}
    group = DraftGroup({"select": select, **exclude, **options}, 1)
    return Part((), Draft(f"gpu.intel.com/{driver}", (group,), 1, "gpu"))
