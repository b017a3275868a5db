"""Reads what the GPU plugins of AMD, Intel and GKE are told: by arguments, and by few or no keys of a file.

AMD's has no file, Intel's has its operator's resource GpuDevicePlugin, GKE's has `gpu_config.json`. NVIDIA's is in `nvidia.py`.
"""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields, Settings, as_argument, is_xid, spelled
from agent.importing.model import Draft, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, text_at

# --- AMD's ---

_AMD: Final = "From the arguments of AMD's device plugin. Names, IDs and nodes are the same."
_NAMES: Final = {name: (name, "") for name in ("pulse", "resource_naming_strategy", "driver_type")}
_NAMING, _DRIVER = "resource_naming_strategy", "driver_type"


def read_amd(_document: Tree | None, settings: Settings) -> Sketch:
    """The resources that the plugin's arguments mean."""
    fields = Fields(settings.table(_NAMES), "AMD's device plugin")
    naming, driver = fields.text(_NAMING) or "single", fields.text(_DRIVER) or "container"
    if fields.text("pulse"):
        fields.note("pulse", "pulse is not needed: health is always watched, each GPU's its own")
    if naming not in ("single", "mixed"):
        fields.lost(_NAMING, f"there is no {_NAMING} {naming!r}; 'single' is taken")
    if driver != "container":
        why = f"{_DRIVER} {driver!r} gives GPUs to virtual machines: the backend vfio does that, see docs/vfio.md"
        fields.lost(_DRIVER, why)
    fields.end()
    names = ["amd.com/{partition}"] if naming == "mixed" else []
    options, line = {"select": {"vendor": "1002"}}, fields.line(_NAMING)
    drafts = [Draft.of(name, options, line, "gpu") for name in (*names, "amd.com/gpu")]
    return Sketch(_AMD, (fields.part(), *(Part((), it, driver == "container") for it in drafts)))


# --- Intel's ---

INTEL_KIND: Final = "GpuDevicePlugin"
"""Of the resource by which Intel's operator is told of a plugin."""
_INTEL: Final = (
    "From the arguments of Intel's GPU plugin. Names, IDs, nodes and mounts are the same. Without card_ids an ID is a PCI "
    "address, which stays when drivers are bound in another order."
)
INTEL_SETTINGS: Final = {
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

_ARGUMENTS: Final = (*INTEL_SETTINGS.values(), "health-management", "xpumd-endpoint", "wsl")
_LIMITS: Final = ("temp-limit", "gpu-temp-limit", "memory-temp-limit")
_PLACEMENTS: Final = {"none": "", "balanced": "", "packed": "pack"}
_BY_PATHS: Final = ("single", "all", "none")
_DRIVERS: Final = ("i915", "xe")
_INTELS: Final = "gpu.intel.com/"
_MONITORING: Final = {
    "single": {"monitoring": list(_DRIVERS)},
    "split": {f"{driver}_monitoring": [driver] for driver in _DRIVERS},
}
"""Mode → resource → whose GPUs it has."""


def is_intel(document: Tree) -> bool:
    """Whether the document is the operator's resource."""
    return text_at(document, "kind") == INTEL_KIND


def read_intel(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that the plugin's arguments mean."""
    remarks: list[Remark] = []
    fields = Fields(_intels_arguments(document, settings, remarks), "Intel's GPU plugin", remarks)
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
        return Sketch(_INTEL, (fields.part(), _dxg(shared or 1)))
    allowed, denied = (_ids(fields, key) for key in ("allow-ids", "deny-ids"))
    parts = [_of_driver(name, allowed, denied, options) for name in _DRIVERS]
    monitors = [_monitor(name, drivers) for name, drivers in _monitored(fields)]
    return Sketch(_INTEL, (fields.part(), *parts, *monitors))


def _intels_arguments(document: Tree | None, settings: Settings, remarks: list[Remark]) -> Table:
    """The arguments; what the operator's resource says, by their names."""
    spec = below(document, "spec") if document is not None and is_intel(document) else None
    values = spelled(spec, (*INTEL_SETTINGS, *_OF_ITS_PODS)).values if isinstance(spec, Table) else {}
    for key, tree in values.items():
        if key not in INTEL_SETTINGS and key not in _OF_ITS_PODS:
            remarks.append(Remark(tree.line, f"Fairlead has nothing for the key {key!r} of a {INTEL_KIND}"))
    said: dict[str, Tree] = {}
    for key, argument in INTEL_SETTINGS.items():
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
    return Part((), Draft.of(_INTELS + name, {"select": select}, 1, "gpu"))


def _dxg(pods: int) -> Part:
    """What a container gets in WSL, where no GPU is on PCI."""
    node: dict[str, Value] = {"path": "/dev/dxg", "permissions": "rw"}
    libraries: dict[str, Value] = {"path": "/usr/lib/wsl", "type": "mount", "read_only": True}
    options: dict[str, Value] = {"paths": [node, libraries], **({"count": pods} if pods > 1 else {})}
    return Part((), Draft.of(f"{_INTELS}dxg", options, 1))


def _ids(fields: Fields, key: str) -> list[str]:
    """`0x49c5,0x49c6` as four digits each."""
    return [text.strip().lower().removeprefix("0x") for text in (fields.text(key) or "").split(",") if text.strip()]


def _of_driver(driver: str, allowed: list[str], denied: list[str], options: dict[str, Value]) -> Part:
    select: dict[str, Value] = {"vendor": "8086", "driver": driver, **({"device": allowed} if allowed else {})}
    exclude: dict[str, Value] = {"exclude": {"device": denied}} if denied else {}
    return Part((), Draft.of(_INTELS + driver, {"select": select, **exclude, **options}, 1, "gpu"))


# --- GKE's, for NVIDIA's GPUs ---

_SIZE, _CLIENTS, _SHARING, _XIDS, _DIVISOR = (
    "GPUPartitionSize",
    "MaxTimeSharedClientsPerGPU",
    "GPUSharingConfig",
    "HealthCriticalXid",
    "GPUFractionDivisor",
)
_KEYS: Final = (  # --- GKE's, for NVIDIA's GPUs ---
    _SIZE,
    _CLIENTS,
    _SHARING,
    _XIDS,
    _DIVISOR,
)
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
_GKE: Final = "From GKE's GPU plugin. Names, IDs, nodes, mounts and what is refused are the same."


def is_gke(document: Tree) -> bool:
    """Whether the document has a key of the plugin's. XIDs as text are those of its ConfigMap xid-config, an environment."""
    if not isinstance(document, Table):
        return False
    table = spelled(document, _KEYS).values
    return any(
        key in table
        for key in (  # --- GKE's, for NVIDIA's GPUs ---
            _SIZE,
            _CLIENTS,
            _SHARING,
        )
    ) or isinstance(table.get(_XIDS), Items)


def read_gke(document: Tree | None, settings: Settings) -> Sketch:
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
    options |= _gkes_arguments(settings, fields.remarks)
    fields.end()
    return Sketch(_GKE, (fields.part(Draft.of("nvidia.com/gpu", options, table.line, "gpu")),))


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


def _gkes_arguments(settings: Settings, remarks: list[Remark]) -> dict[str, Value]:
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
