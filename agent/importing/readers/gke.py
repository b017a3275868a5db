"""Reads `gpu_config.json` of GKE's GPU plugin, and its arguments."""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields, spelled
from agent.importing.inputs import Settings
from agent.importing.model import Draft, DraftGroup, Part, Remark, Sketch, Value
from agent.importing.tree import Table, Tree
from agent.importing.values import is_xid

_SIZE, _CLIENTS, _SHARING, _XIDS, _DIVISOR = (
    "GPUPartitionSize",
    "MaxTimeSharedClientsPerGPU",
    "GPUSharingConfig",
    "HealthCriticalXid",
    "GPUFractionDivisor",
)
_KEYS: Final = (_SIZE, _CLIENTS, _SHARING, _XIDS, _DIVISOR)
_STRATEGY, _MOST = "GPUSharingStrategy", "MaxSharedClientsPerGPU"
_XID: Final = 48
"""The only one that the plugin takes for critical by default."""

_PATHS: Final = {
    "host-path": "/home/kubernetes/bin/nvidia",
    "container-path": "/usr/local/nvidia",
    "host-vulkan-icd-path": "/home/kubernetes/bin/nvidia/vulkan/icd.d",
    "container-vulkan-icd-path": "/etc/vulkan/icd.d",
}
_NOT_NEEDED: Final = {
    "enable-health-monitoring": "health is always watched",
    "gpu-config": "it names the file that was imported",
    "enable-container-gpu-metrics": "metrics of GPUs are an exporter's: DCGM's",
    "gpu-fraction-divisor-file": "whole GPUs are offered with it, too",
}
_SOURCE: Final = "From GKE's GPU plugin. Names, IDs, nodes and mounts are the same."


def is_it(document: Tree) -> bool:
    """Has the document a key of the plugin's?"""
    if not isinstance(document, Table):
        return False
    keys = {key.lower() for key in document.values}
    return any(key.lower() in keys for key in (_SIZE, _CLIENTS, _SHARING)) or keys == {_XIDS.lower()}


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resource that a configuration means, with the plugin's arguments."""
    remarks: list[Remark] = []
    table = spelled(document, _KEYS) if isinstance(document, Table) else Table(1, {}, {})
    fields = Fields(table, "nvidia.com/gpu", remarks)
    options: dict[str, Value] = {"select": {"vendor": "10de"}, "style": "gke"}
    same = _share(fields, options, remarks)
    if size := fields.text(_SIZE):
        why = f"{size}: MIG devices are offered as they are; the plugin does not start where a GPU has fewer of them"
        fields.note(_SIZE, why)
    if fields.whole(_DIVISOR):
        fields.note(_DIVISOR, "whole GPUs are offered with a fraction divisor, too")
    options["xid_critical"] = [_XID, *(xid for xid in _xids(fields, settings, remarks) if xid != _XID)]
    _arguments(settings, remarks)
    fields.end()
    draft = Draft("nvidia.com/gpu", (DraftGroup(options, table.line),), table.line, "gpu")
    return Sketch(_SOURCE, (Part(tuple(remarks), draft, same),))


def _share(of: Fields, options: dict[str, Value], remarks: list[Remark]) -> bool:
    """Read how GPUs are shared into the options; False if pods would get less than they did."""
    deprecated, tree = of.whole(_CLIENTS) or 0, of.tree(_SHARING)
    strategy, clients = "", 0
    if isinstance(tree, Table):
        fields = Fields(spelled(tree, (_STRATEGY, _MOST)), of.about, remarks)
        strategy, clients = fields.text(_STRATEGY) or "", fields.whole(_MOST) or 0
        fields.end()
    if deprecated:
        strategy, clients = "time-sharing", deprecated
    if strategy not in ("", "time-sharing", "mps") or (not clients) is not (not strategy):
        why = f"{_SHARING} needs a strategy, time-sharing or mps, and clients; the plugin shares nothing, silently, and so does this"
        of.lost(_SHARING, why)
        return True
    if strategy == "mps":
        of.lost(_SHARING, "mps: pods would share GPUs without MPS's limits; it is commented out, as time-sharing")
    if clients == 1:
        of.lost(_SHARING, "with one client IDs are nvidia0 here, not nvidia0/vgpu0; no pod names them")
    elif clients:
        options |= {"replicas": clients, "fail_requests_greater_than_one": True}
    return strategy != "mps"


def _xids(fields: Fields, settings: Settings, remarks: list[Remark]) -> list[int]:
    """XIDs that are critical; the environment's stand in the place of the file's."""
    said = settings.environment.get("XID_CONFIG") or settings.environment.get(_XIDS)
    texts = fields.texts(_XIDS)
    if said is not None:
        texts = [text.strip() for text in said.text.split(",") if text.strip()]
    found = [text for text in texts if is_xid(text)]
    for text in texts:
        if text not in found:
            line = said.line if said is not None else fields.line(_XIDS)
            remarks.append(Remark(line, f"{_XIDS}: {text!r} is no XID; it is left out"))
    return [int(text) for text in dict.fromkeys(found)]


def _arguments(settings: Settings, remarks: list[Remark]) -> None:
    for name, value in settings.arguments.items():
        if (usual := _PATHS.get(name)) and value.text.rstrip("/") != usual:
            why = f'{name} is {value.text!r}, and style = "gke" has {usual!r}; it is left out'
            remarks.append(Remark(value.line, why))
        elif name in _NOT_NEEDED:
            remarks.append(Remark(value.line, f"{name} is not needed: {_NOT_NEEDED[name]}", lost=False))
        elif name == "publish-driver-version":
            remarks.append(Remark(value.line, f"{name}: the node gets no annotations with the driver's version"))
