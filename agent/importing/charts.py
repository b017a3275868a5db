"""Reads the values of Helm charts: finds them in what carries them, and the settings of device plugins in them.

Values files, Flux, Argo CD, Rancher, Fleet and Kustomize carry values. Of the charts that install device plugins it is known
which values mean something to the plugin; a value that is not known is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set
from typing import Final

from msgspec import Struct, field

from agent.importing.model import ImportRefusedError, Remark
from agent.importing.readers import gpu, nvidia
from agent.importing.yaml_tree import (
    Scalar,
    Table,
    Tree,
    below,
    embedded,
    items_at,
    merged,
    scalars,
    text_at,
    values_at,
)

SOURCES: Final = {
    "nvidia-device-plugin": "nvidia",
    "gpu-operator": "nvidia",
    "intel-device-plugins-gpu": "intel",
    "amd-gpu": "rocm",
    "generic-device-plugin": "generic",
    "smarter-device-manager": "smarter",
    "sriov-network-device-plugin": "sriov",
    "k8s-rdma-shared-dev-plugin": "rdma",
}
"""Chart → whose plugin it installs."""

_DOT: Final = re.compile(r"(?<!\\)\.")


class Release(Struct, frozen=True):
    """A chart with its values."""

    chart: str
    """Its name; empty where nothing tells it, as of a values file."""
    values: Table
    called: str
    """What installs it, for people; empty of a values file."""


class Carried(Struct):
    """What is looked up and said while values are read."""

    maps: Mapping[str, Table]
    """The `data` of the ConfigMaps that are there, by their names."""
    urls: Mapping[str, str]
    """Where Flux' OCIRepositories, by their names, have their charts."""
    files: frozenset[str]
    """The names of the files that are imported, without their folders."""
    remarks: list[Remark]


def releases(tree: Tree, of: Carried) -> Iterator[Release]:
    """The charts that an object installs, or whose values a document is; none of other objects."""
    if not isinstance(tree, Table):
        return
    kind = text_at(tree, "kind")
    if kind is None:
        yield from _subcharts(_fleet(tree) or Release("", tree, ""))
        return
    group = (text_at(tree, "apiVersion") or "").partition("/")[0]
    for chart, values in _READERS[kind](tree, of) if kind in _READERS else ():
        name = chart.rstrip("/").rpartition("/")[2].partition(":")[0]
        if values.values or name in SOURCES or group.startswith("helm"):
            space = text_at(tree, "metadata", "namespace") or "default"
            called = f"{kind} {text_at(tree, 'metadata', 'name') or 'without a name'} of namespace {space}"
            yield from _subcharts(Release(name, values, called))


def _subcharts(release: Release) -> Iterator[Release]:
    """The release, and those of the charts that its own depends on, whose values stand under their names."""
    inner = {key for key, tree in release.values.values.items() if key in SOURCES and isinstance(tree, Table)}
    own = release.values.without(inner)
    if not inner or own.values or release.chart in SOURCES:
        yield Release(release.chart, own, release.called)
    for key in inner:
        values = release.values.values[key]
        if isinstance(values, Table):
            yield Release(key, values, release.called)


def _fleet(tree: Table) -> Release | None:
    """What a fleet.yaml installs."""
    chart, values = text_at(tree, "helm", "chart"), below(tree, "helm", "values")
    if chart is None and not isinstance(values, Table):
        return None
    name = (chart or text_at(tree, "helm", "releaseName") or "").rstrip("/").rpartition("/")[2]
    return Release(name, values if isinstance(values, Table) else _none(tree), f"the bundle of {name}")


def _flux(tree: Table, of: Carried) -> Iterator[tuple[str, Table]]:
    """Flux' HelmRelease, and that of its predecessor, the Helm operator."""
    spec = below(tree, "spec")
    named = text_at(spec, "chartRef", "name") or ""
    chart = (
        text_at(spec, "chart", "spec", "chart")
        or text_at(spec, "chart", "name")
        or of.urls.get(named, named)
        or text_at(tree, "metadata", "name")
        or ""
    )
    values = _none(tree)
    for reference in items_at(spec, "valuesFrom"):
        values = merged(values, _referenced(reference, of))
    own = below(spec, "values")
    yield chart, merged(values, own) if isinstance(own, Table) else values


def references(tree: Tree) -> list[tuple[str, str]]:
    """The kinds and names of the objects that have values for Flux: these are no configurations by themselves."""
    every = items_at(tree, "spec", "valuesFrom")
    return [(text_at(it, "kind") or "ConfigMap", text_at(it, "name") or "") for it in every]


def _referenced(reference: Tree, of: Carried) -> Table:
    """The values that stand in a ConfigMap, if it is there."""
    kind, name = text_at(reference, "kind") or "ConfigMap", text_at(reference, "name") or ""
    key, target = text_at(reference, "valuesKey") or "values.yaml", text_at(reference, "targetPath")
    found = below(of.maps.get(name), key) if kind == "ConfigMap" else None
    if isinstance(found, Scalar):
        return _nested([(target, found)], reference.line, of) if target else _text(found, of)
    if text_at(reference, "optional") != "true":
        why = f"the values under {key!r} in {kind} {name} are not among these files, and are not read; import them, too"
        of.remarks.append(Remark(reference.line, f"valuesFrom: {why}"))
    return _none(reference)


def _argo(tree: Table, of: Carried) -> Iterator[tuple[str, Table]]:
    """Argo CD's Application, and the template of an ApplicationSet."""
    spec = below(tree, "spec", "template", "spec") or below(tree, "spec")
    for source in (*items_at(spec, "sources"), below(spec, "source")):
        helm = below(source, "helm")
        if source is None or (helm is None and below(source, "chart") is None):
            continue
        values = _none(source)
        text, table = below(helm, "values"), below(helm, "valuesObject")
        if isinstance(table, Table):
            values = table  # it has precedence over `values`, which is not read then
        elif isinstance(text, Scalar) and text.text:
            values = _text(text, of)
        _missing(below(helm, "valueFiles"), of)
        said = [(text_at(one, "name") or "", below(one, "value")) for one in items_at(helm, "parameters")]
        chart = text_at(source, "chart") or text_at(source, "path") or ""
        yield chart, merged(values, _nested(said, source.line, of))


def _rancher(tree: Table, of: Carried) -> Iterator[tuple[str, Table]]:
    """K3s' and RKE2's HelmChart and HelmChartConfig."""
    spec = below(tree, "spec")
    chart = text_at(spec, "chart") or text_at(tree, "metadata", "name") or ""
    text, table, said = below(spec, "valuesContent"), below(spec, "values"), below(spec, "set")
    values = _text(text, of) if isinstance(text, Scalar) else _none(tree)
    if isinstance(table, Table):
        values = merged(values, table)
    if isinstance(said, Table):
        values = merged(values, _nested(list(said.values.items()), said.line, of))
    yield chart, values


def _kustomize(tree: Table, of: Carried) -> Iterator[tuple[str, Table]]:
    """The charts of a kustomization.yaml, whose own patches and files are not read."""
    for one in items_at(tree, "helmCharts"):
        values = below(one, "valuesInline")
        _missing(below(one, "valuesFile"), of)
        _missing(below(one, "additionalValuesFiles"), of)
        yield text_at(one, "name") or "", values if isinstance(values, Table) else _none(one)


_READERS: Final = {
    "HelmRelease": _flux,
    "Application": _argo,
    "ApplicationSet": _argo,
    "HelmChart": _rancher,
    "HelmChartConfig": _rancher,
    "Kustomization": _kustomize,
}

KINDS: Final = frozenset(_READERS)
"""Kinds of objects that carry values."""


def _missing(files: Tree | None, of: Carried) -> None:
    for name in items_at(files) or (files,):
        if isinstance(name, Scalar) and name.text and name.text.rpartition("/")[2] not in of.files:
            why = f"the values in {name.text} are not read from here; import that file, too, or what `helm template` prints"
            of.remarks.append(Remark(name.line, why))


def _text(text: Scalar, of: Carried) -> Table:
    """The values that a text has."""
    try:
        tables = [tree for tree in embedded(text) if isinstance(tree, Table)]
    except ImportRefusedError as error:
        of.remarks.append(Remark(error.line or text.line, f"the chart's values: {error.sentence}; they are not read"))
        tables = []
    return tables[0] if tables else _none(text)


def _nested(said: list[tuple[str, Tree | None]], line: int, of: Carried) -> Table:
    """`a.b: c` as the tables that `helm --set a.b=c` makes of it."""
    values = Table(line, {}, {})
    for name, value in said:
        if not isinstance(value, Scalar) or not name:
            continue
        if "[" in name or "{" in value.text[:1]:
            of.remarks.append(
                Remark(value.line, f"{name}: a list that is set in this way is not read; write it as values")
            )
            continue
        kind = "bool" if value.text in ("true", "false") else value.kind
        tree: Tree = Scalar(value.line, value.text, kind, value.block)
        for key in reversed(_DOT.split(name)):
            tree = Table.of(value.line, {key.replace("\\.", "."): tree})
        values = merged(values, tree) if isinstance(tree, Table) else values
    return values


def _none(tree: Tree) -> Table:
    return Table(tree.line, {}, {})


# --- what a chart's values tell its plugin ---

POLICY: Final = "ClusterPolicy"
"""The kind of NVIDIA's operator, whose `spec` is as the values of its chart."""

_DEPLOYMENT: Final = frozenset(
    {
        *("affinity", "annotations", "automountServiceAccountToken", "clusterDomain", "commonAnnotations"),
        *("commonLabels", "configMaps", "controller", "controllers", "daemonset", "defaultPodOptions", "dnsPolicy"),
        *("extraVolumeMounts", "extraVolumes", "fullnameOverride", "global", "hostNetwork", "hostPID", "image"),
        *("imagePullPolicy", "imagePullSecrets", "initContainers", "initImage", "labels", "livenessProbe", "metrics"),
        *("name", "nameOverride", "namespace", "namespaceOverride", "nodeSelector", "node_selector"),
        *("node_selector_enabled", "persistence", "podAnnotations", "podLabels", "podMonitor", "podSecurityContext"),
        *("priorityClassName", "probes", "rbac", "readinessProbe", "resources", "revisionHistoryLimit", "route"),
        *("runtimeClassName", "securityContext", "selectorLabelsOverride", "service", "serviceAccount"),
        *("serviceMonitor", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints"),
        *("updateStrategy", "volumeMounts", "volumes", "args", "command", "env", "extraArgs", "enabled", "hostPaths"),
        *("port", "secrets", "createNamespace"),
    }
)
"""Values that say where and how a plugin's pods run, which Fairlead's own chart says of Fairlead; `args` and `env` of what is
a container are read as such."""

_KNOWN: Final = {
    "nvidia": frozenset({"config", "devicePlugin", "nfd", "mps", "cdi", "allowDefaultNamespace", *nvidia.SETTINGS}),
    "operator": frozenset(
        {
            *("ccManager", "cdi", "clusterInfo", "daemonsets", "dcgm", "dcgmExporter", "devicePlugin", "draDriver"),
            *("driver", "fabricManager", "gdrcopy", "gds", "gfd", "hostPaths", "kataManager"),
            *("kataSandboxDevicePlugin", "mig", "migManager", "nfd", "node-feature-discovery", "nodeStatusExporter"),
            *("operator", "platform", "psa", "psp", "sandboxDevicePlugin", "sandboxWorkloads", "toolkit", "validator"),
            *("vfioManager", "vgpuDeviceManager", "vgpuManager", "tolerations"),
        }
    ),
    "intel": frozenset({*gpu.INTEL_SETTINGS, "allocationPolicy", "logLevel", "nodeFeatureRule", "deviceID"}),
    "rocm": frozenset({"dp", "lbl", "labeller", "nfd", "manifests"}),
    "generic": frozenset({"config", "deviceDomain", "domain"}),
}
"""Values that are read, or that other programs are told; by the plugin, "operator" of NVIDIA's operator."""

_INTELS: Final = {"allocationPolicy": "preferredAllocationPolicy"}
"""What Intel's chart calls otherwise than the operator's resource that it makes."""

_OPERATOR: Final = frozenset({"toolkit", "driver", "mig", "dcgmExporter", "migManager", "validator"})
_OPERATORS_PLUGIN: Final = frozenset(
    {
        *("enabled", "repository", "image", "version", "imagePullPolicy", "imagePullSecrets", "args", "env"),
        *("resources", "config", "mps", "hostNetwork"),
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


def read_values(release: Release, source: str, has_containers: bool) -> ReadValues:
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
        spec = release.values.only((*gpu.INTEL_SETTINGS, *_INTELS))
        monitoring = Scalar(spec.line, "true", "bool")  # the chart's own default, not the operator's
        spec = Table.of(spec.line, {"enableMonitoring": monitoring, **spec.values})
        values = {_INTELS.get(key, key): tree for key, tree in spec.values.items()}
        lines = {_INTELS.get(key, key): line for key, line in spec.lines.items()}
        kind = Scalar(spec.line, gpu.INTEL_KIND, "str")
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
    for key, tree in values_at(plugin).items():
        if key not in _OPERATORS_PLUGIN:
            found.remarks.append(Remark(tree.line, f"the value devicePlugin.{key} is not known here, and is left out"))
    _read_name(below(plugin, "config"), found)


def _read_name(config: Tree | None, found: ReadValues) -> None:
    name = below(config, "name")
    is_made = below(config, "map") is not None or below(config, "data") is not None
    if isinstance(name, Scalar) and name.text and not is_made:
        found.maps[name.text] = name.line


def _environment(tree: Tree | None) -> dict[str, Scalar]:
    pairs = [*((text_at(it, "name"), below(it, "value")) for it in items_at(tree)), *values_at(tree).items()]
    kinds = {"true": "bool", "false": "bool"}
    return {
        name: Scalar(value.line, value.text, kinds.get(value.text, "str"))
        for name, value in pairs
        if name and isinstance(value, Scalar)
    }
