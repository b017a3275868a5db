"""Reads the settings in the values of the charts that install device plugins, and says which values are not known."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from msgspec import Struct, field

from agent.importing.charts import SOURCES, Release
from agent.importing.model import Remark
from agent.importing.readers import intel, nvidia
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, scalars, text_at

POLICY: Final = "ClusterPolicy"
"""The kind of NVIDIA's operator, whose `spec` is as the values of its chart."""

_DEPLOYMENT: Final = frozenset(
    {
        *(
            "affinity",
            "annotations",
            "automountServiceAccountToken",
            "clusterDomain",
            "commonAnnotations",
            "commonLabels",
        ),
        *(
            "configMaps",
            "controller",
            "controllers",
            "daemonset",
            "defaultPodOptions",
            "dnsPolicy",
            "extraVolumeMounts",
        ),
        *("extraVolumes", "fullnameOverride", "global", "hostNetwork", "hostPID", "image", "imagePullPolicy"),
        *(
            "imagePullSecrets",
            "initContainers",
            "initImage",
            "labels",
            "livenessProbe",
            "metrics",
            "name",
            "nameOverride",
        ),
        *("namespace", "namespaceOverride", "nodeSelector", "node_selector", "node_selector_enabled", "persistence"),
        *("podAnnotations", "podLabels", "podMonitor", "podSecurityContext", "priorityClassName", "probes", "rbac"),
        *("readinessProbe", "resources", "revisionHistoryLimit", "route", "runtimeClassName", "securityContext"),
        *("selectorLabelsOverride", "service", "serviceAccount", "serviceMonitor", "terminationGracePeriodSeconds"),
        *(
            "tolerations",
            "topologySpreadConstraints",
            "updateStrategy",
            "volumeMounts",
            "volumes",
            "args",
            "command",
            "env",
        ),
        *("extraArgs", "enabled", "hostPaths", "port", "secrets", "createNamespace"),
    }
)
"""Values that say where and how a plugin's pods run, which Fairlead's own chart says of Fairlead; `args` and `env` of what is
a container are read as such."""

_KNOWN: Final = {
    "nvidia": frozenset({"config", "devicePlugin", "nfd", "mps", "cdi", "allowDefaultNamespace", *nvidia.SETTINGS}),
    "operator": frozenset(
        {
            *(
                "ccManager",
                "cdi",
                "clusterInfo",
                "daemonsets",
                "dcgm",
                "dcgmExporter",
                "devicePlugin",
                "draDriver",
                "driver",
            ),
            *("fabricManager", "gdrcopy", "gds", "gfd", "hostPaths", "kataManager", "kataSandboxDevicePlugin", "mig"),
            *(
                "migManager",
                "nfd",
                "node-feature-discovery",
                "nodeStatusExporter",
                "operator",
                "platform",
                "psa",
                "psp",
            ),
            *("sandboxDevicePlugin", "sandboxWorkloads", "toolkit", "validator", "vfioManager", "vgpuDeviceManager"),
            *("vgpuManager", "tolerations"),
        }
    ),
    "intel": frozenset({*intel.OF_THE_OPERATOR, "allocationPolicy", "logLevel", "nodeFeatureRule", "deviceID"}),
    "rocm": frozenset({"dp", "lbl", "labeller", "nfd", "manifests"}),
    "generic": frozenset({"config", "deviceDomain", "domain"}),
}
"""Values that are read, or that other programs are told; by the plugin, "operator" of NVIDIA's operator."""

_INTELS: Final = {"allocationPolicy": "preferredAllocationPolicy"}
"""What Intel's chart calls otherwise than the operator's resource that it makes."""

_OPERATOR: Final = frozenset({"toolkit", "driver", "mig", "dcgmExporter", "migManager", "validator"})
_OPERATORS_PLUGIN: Final = frozenset(
    {
        *(
            "enabled",
            "repository",
            "image",
            "version",
            "imagePullPolicy",
            "imagePullSecrets",
            "args",
            "env",
            "resources",
        ),
        *("config", "mps", "hostNetwork"),
    }
)
_CDI: Final = {"deviceListStrategy": "cdi-annotations,cdi-cri", "cdiAnnotationPrefix": "cdi.k8s.io/"}
"""What NVIDIA's operator tells its plugin where CDI is on (controllers/object_controls.go)."""


class ReadValues(Struct):
    """What a chart's values tell a plugin."""

    values: dict[str, Tree] = field(default_factory=dict)
    environment: dict[str, Scalar] = field(default_factory=dict)
    arguments: list[tuple[str, Scalar]] = field(default_factory=list)
    maps: dict[str, int] = field(default_factory=dict)
    """The ConfigMap that the plugin's configuration is in, with its line."""
    document: Tree | None = None
    """The operator's resource that the chart makes."""
    remarks: list[Remark] = field(default_factory=list)


def whose(release: Release, sources: Set[str]) -> str:
    """Whose chart it is, by its name, by what was found in its values, or by their names; empty if that is not known."""
    values = release.values.values
    if release.chart in SOURCES:
        return SOURCES[release.chart]
    if _is_operators(release) or len(nvidia.SETTINGS.keys() & values.keys()) > 1:
        return "nvidia"
    if text_at(release.values, "dp", "image", "repository"):
        return "rocm"
    if "sharedDevNum" in values:
        return "intel"
    return next(iter(sources)) if len(sources) == 1 else ""


def read(release: Release, source: str, has_containers: bool) -> ReadValues:
    """The settings of a plugin's chart."""
    found = ReadValues()
    values = {
        key: it for key, it in release.values.values.items() if not (isinstance(it, Scalar) and it.kind == "null")
    }
    known = _KNOWN.get(source)
    if source == "nvidia" and _is_operators(release):
        known = _KNOWN["operator"]
        _read_operator(values, release, found)
    elif source == "nvidia":
        _read_nvidia(values, found)
    elif source == "intel":
        spec = release.values.only((*intel.OF_THE_OPERATOR, *_INTELS))
        monitoring = Scalar(spec.line, "true", "bool")  # the chart's own default, not the operator's
        spec = Table.of(spec.line, {"enableMonitoring": monitoring, **spec.values})
        values = {_INTELS.get(key, key): tree for key, tree in spec.values.items()}
        lines = {_INTELS.get(key, key): line for key, line in spec.lines.items()}
        kind = Scalar(spec.line, intel.KIND, "str")
        found.document = Table.of(spec.line, {"kind": kind, "spec": Table(spec.line, values, lines)})
    elif source == "generic":
        for key in ("deviceDomain", "domain"):
            if isinstance(domain := values.get(key), Scalar) and domain.text:
                found.arguments.append(("domain", domain))
        found.environment |= _environment(values.get("env"))
    if known is not None:
        _say_unknown(release, source, known, found.remarks)
    if has_containers:
        found.environment = {}
    return found


def _is_operators(release: Release) -> bool:
    values = release.values.values
    return release.chart == "gpu-operator" or ("devicePlugin" in values and bool(values.keys() & _OPERATOR))


def _say_unknown(release: Release, source: str, known: frozenset[str], remarks: list[Remark]) -> None:
    for key, tree in release.values.values.items():
        if key in known or key in _DEPLOYMENT or (isinstance(tree, Scalar) and tree.kind == "null"):
            continue
        line = release.values.lines.get(key, tree.line)
        if source == "nvidia" and key in nvidia.SECTIONS:
            why = f"the chart has no value {key!r}: it stands in a configuration, below config.map; the plugin never sees it, and this passes over it, too"
            remarks.append(Remark(line, why, lost=False))
        elif any(text.text for text in scalars(tree)):
            remarks.append(Remark(line, f"the chart's value {key!r} is not known here, and is left out"))


def _read_nvidia(values: dict[str, Tree], found: ReadValues) -> None:
    found.values |= {key: values[key] for key in (*nvidia.SETTINGS, "config", "mps") if key in values}
    hook = below(values.get("cdi"), "nvidiaHookPath")
    if isinstance(hook, Scalar) and hook.kind != "null":
        found.values["nvidiaCTKPath"] = hook
    _read_name(values.get("config"), found)


def _read_operator(values: dict[str, Tree], release: Release, found: ReadValues) -> None:
    plugin = values.get("devicePlugin")
    for key in ("config", "mps"):
        if (tree := below(plugin, key)) is not None:
            found.values[key] = tree
    if isinstance(strategy := below(values.get("mig"), "strategy"), Scalar) and strategy.text:
        found.values["migStrategy"] = strategy
    elif POLICY not in release.called:
        why = "mig.strategy is not said; the operator's chart says single then, and so does this, whatever the configuration says"
        found.remarks.append(Remark(release.values.line, why, lost=False))
        found.values["migStrategy"] = Scalar(release.values.line, "single", "str")
    if isinstance(cdi := below(values.get("cdi"), "enabled"), Scalar) and cdi.text == "true":
        found.values |= {key: Scalar(cdi.line, text, "str") for key, text in _CDI.items()}
    found.environment = _environment(below(plugin, "env"))
    for word in scalars(below(plugin, "args")):
        name, _, value = word.text.lstrip("-").partition("=")
        found.arguments.append(
            (name, Scalar(word.line, value or "true", "bool" if value in ("", "true", "false") else "str"))
        )
    if isinstance(enabled := below(plugin, "enabled"), Scalar) and enabled.text == "false":
        found.remarks.append(
            Remark(enabled.line, "devicePlugin.enabled is false: the operator runs no plugin", lost=False)
        )
    for key, tree in plugin.values.items() if isinstance(plugin, Table) else ():
        if key not in _OPERATORS_PLUGIN:
            found.remarks.append(Remark(tree.line, f"the value devicePlugin.{key} is not known here, and is left out"))
    _read_name(below(plugin, "config"), found)


def _read_name(config: Tree | None, found: ReadValues) -> None:
    name = below(config, "name")
    is_made = below(config, "map") is not None or below(config, "data") is not None
    if isinstance(name, Scalar) and name.text and not is_made:
        found.maps[name.text] = name.line


def _environment(tree: Tree | None) -> dict[str, Scalar]:
    pairs = [(text_at(it, "name"), below(it, "value")) for it in tree.items] if isinstance(tree, Items) else []
    pairs += list(tree.values.items()) if isinstance(tree, Table) else []
    kinds = {"true": "bool", "false": "bool"}
    return {
        name: Scalar(value.line, value.text, kinds.get(value.text, "str"))
        for name, value in pairs
        if name and isinstance(value, Scalar)
    }
