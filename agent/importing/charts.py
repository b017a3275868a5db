"""Finds the values of Helm charts in what carries them: values files, Flux, Argo CD, Rancher, Fleet and Kustomize."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct

from agent.importing.model import ImportRefusedError, Remark
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, embedded, merged, text_at

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
    references = below(spec, "valuesFrom")
    for reference in references.items if isinstance(references, Items) else ():
        values = merged(values, _referenced(reference, of))
    own = below(spec, "values")
    yield chart, merged(values, own) if isinstance(own, Table) else values


def references(tree: Tree) -> list[tuple[str, str]]:
    """The kinds and names of the objects that have values for Flux: these are no configurations by themselves."""
    found = below(tree, "spec", "valuesFrom")
    every = found.items if isinstance(found, Items) else ()
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
    several = below(spec, "sources")
    for source in (*(several.items if isinstance(several, Items) else ()), below(spec, "source")):
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
        parameters = below(helm, "parameters")
        said = [
            (text_at(one, "name") or "", below(one, "value"))
            for one in (parameters.items if isinstance(parameters, Items) else ())
        ]
        yield (
            text_at(source, "chart") or text_at(source, "path") or "",
            merged(values, _nested(said, source.line, of)),
        )


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
    charts = below(tree, "helmCharts")
    for one in charts.items if isinstance(charts, Items) else ():
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
    names = files.items if isinstance(files, Items) else (files,)
    for name in names:
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
