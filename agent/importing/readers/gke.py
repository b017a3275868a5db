"""Reads `gpu_config.json` of GKE's GPU plugin, and its arguments."""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields, spelled
from agent.importing.model import Draft, Remark, Sketch, Value
from agent.importing.settings import Settings
from agent.importing.values import is_xid
from agent.importing.yaml_tree import Items, Table, Tree

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
    "host-path": ("driver_path", "/home/kubernetes/bin/nvidia"),
    "container-path": ("driver_mount", "/usr/local/nvidia"),
    "host-vulkan-icd-path": ("vulkan_path", "/home/kubernetes/bin/nvidia/vulkan/icd.d"),
    "container-vulkan-icd-path": ("vulkan_mount", "/etc/vulkan/icd.d"),
}
"""Argument → our key, and the default of both."""

_DIVISOR_FILE: Final = "gpu-fraction-divisor-file"
_NOT_NEEDED: Final = {
    "enable-health-monitoring": "health is always watched",
    "gpu-config": "it names the file that was imported",
    "enable-container-gpu-metrics": "metrics of GPUs are an exporter's: DCGM's",
    "gpu-metrics-port": "metrics of GPUs are an exporter's: DCGM's",
    "gpu-metrics-collection-interval": "metrics of GPUs are an exporter's: DCGM's",
}
_SHARING_HERE: Final = {"time-sharing": "time-slicing", "mps": "mps"}
_SOURCE: Final = "From GKE's GPU plugin. Names, IDs, nodes, mounts and what is refused are the same."


def is_it(document: Tree) -> bool:
    """Has the document a key of the plugin's? XIDs as a text are those of its ConfigMap xid-config, which is environment."""
    if not isinstance(document, Table):
        return False
    table = spelled(document, _KEYS).values
    return any(key in table for key in (_SIZE, _CLIENTS, _SHARING)) or isinstance(table.get(_XIDS), Items)


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resource that a configuration means, with the plugin's arguments."""
    table = spelled(document, _KEYS) if isinstance(document, Table) else Table(1, {}, {})
    fields = Fields(table, "nvidia.com/gpu")
    options: dict[str, Value] = {"select": {"vendor": "10de"}, "style": "gke"}
    options |= _shared(fields)
    if size := fields.text(_SIZE):
        why = f"{size}: MIG devices are offered as they are; the plugin does not start where a GPU has fewer of them"
        fields.note(_SIZE, why)
    if (fields.whole(_DIVISOR) or 0) > 1:
        options["mig_devices"] = False
    if more := [xid for xid in _xids(fields, settings) if xid != _XID]:
        options["xid_critical"] = more
    options |= _arguments(settings, fields.remarks)
    fields.end()
    return Sketch(_SOURCE, (fields.part(Draft.of("nvidia.com/gpu", options, table.line, "gpu")),))


def _shared(of: Fields) -> dict[str, Value]:
    """How GPUs are shared. With one client, too, IDs are those of shared GPUs."""
    deprecated, tree = of.whole(_CLIENTS) or 0, of.tree(_SHARING)
    strategy, clients = "", 0
    if isinstance(tree, Table):
        fields = Fields(spelled(tree, (_STRATEGY, _MOST)), of.about, of.remarks)
        strategy, clients = fields.text(_STRATEGY) or "", fields.whole(_MOST) or 0
        fields.end()
    if deprecated:
        strategy, clients = "time-sharing", deprecated
    if not strategy and not clients:
        return {}
    if strategy not in _SHARING_HERE or not clients:
        why = f"{_SHARING} needs a strategy, time-sharing or mps, and clients; the plugin shares nothing, silently, and so does this"
        of.lost(_SHARING, why)
        return {}
    return {"sharing": _SHARING_HERE[strategy], **({"replicas": clients} if clients > 1 else {})}


def _xids(fields: Fields, settings: Settings) -> list[int]:
    """XIDs that are critical; the environment's stand in the place of the file's."""
    said = settings.environment.get("XID_CONFIG") or settings.environment.get(_XIDS)
    texts = fields.texts(_XIDS)
    if said is not None:
        texts = [text.strip() for text in said.text.split(",") if text.strip()]
    found = [text for text in texts if is_xid(text)]
    for text in texts:
        if text not in found:
            line = said.line if said is not None else fields.line(_XIDS)
            fields.remarks.append(Remark(line, f"{_XIDS}: {text!r} is no XID; it is left out"))
    return [int(text) for text in dict.fromkeys(found)]


def _arguments(settings: Settings, remarks: list[Remark]) -> dict[str, Value]:
    options: dict[str, Value] = {}
    for name, value in settings.arguments.items():
        if name in _PATHS:
            key, usual = _PATHS[name]
            options |= {key: value.text} if value.text.rstrip("/") != usual else {}
        elif name == _DIVISOR_FILE:
            why = f"what is in {value.text} is not seen here; where it is above 1, write mig_devices = false"
            remarks.append(Remark(value.line, f"{name}: {why}"))
        elif name in _NOT_NEEDED:
            remarks.append(Remark(value.line, f"{name} is not needed: {_NOT_NEEDED[name]}", lost=False))
        elif name == "publish-driver-version":
            remarks.append(Remark(value.line, f"{name}: the node gets no annotations with the driver's version"))
    return options
