"""Gathers, from the documents of several files, the configurations in them and the arguments of plugins' containers.

A configuration may stand alone, as a text in a ConfigMap or in a chart's values, or in a list of such; the arguments and
the environment stand in a DaemonSet, or in the values of a chart that makes one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from agent.importing import charts
from agent.importing.charts import Carried, Release
from agent.importing.fields import Settings, as_argument, together
from agent.importing.model import ImportRefusedError, Remark
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, embedded, items_at, scalars, text_at, values_at

_IMAGES: Final = {
    "rocm": re.compile(r"(rocm|amdgpu)[/-]k8s-device-plugin|amdgpu-device-plugin"),
    "gke": re.compile(r"nvidia-gpu-device-plugin"),
    "intel": re.compile(r"intel-gpu-plugin"),
    "generic": re.compile(r"generic-device-plugin"),
    "smarter": re.compile(r"smarter-device-manager"),
    "rdma": re.compile(r"rdma-shared-d(ev|evice)-plugin"),
    "sriov": re.compile(r"sriov-network-device-plugin"),
    "cex": re.compile(r"cex-(dev-)?plugin"),
    "nvidia": re.compile(r"k8s-device-plugin|nvidia-device-plugin"),
}
"""By what a container's image, or its program, is known; the first that fits."""

WORKLOADS: Final = frozenset({"DaemonSet", "Deployment", "Pod"})
"""Kinds that have containers."""

_STAYS: Final = re.compile(r"mps-control-daemon|gpu-feature-discovery")
"""Programs of NVIDIA's that stand beside its plugin and are no plugins."""

_FLAG: Final = re.compile(r"--?(?P<name>[A-Za-z][A-Za-z0-9_.-]*)(=(?P<value>.*))?", re.DOTALL)


_ENTRY: Final = re.compile(
    r"""^[\s-]*["']?(version|flags|sharing|timeSlicing|resources?|resourceList|configList|cryptoconfigsets|devices?|devicematch"""
    r"""|GPUSharingConfig|permittedHostDevices)["']?\s*:""",
    re.MULTILINE,
)
"""What a text has that was meant to be a plugin's configuration, also where it is no YAML."""

_FILLED_IN: Final = re.compile(r"(?P<flux>\$\{[A-Za-z_][^}]*\})|(?P<template>\{\{.*?\}\})|(?P<sops>^ENC\[AES256)")
_BY: Final = {
    "flux": "is filled in by Flux, by postBuild; import what `kubectl get -o yaml` shows",
    "template": "is filled in by Helm; import what `helm template` prints, or `kubectl get -o yaml` shows",
    "sops": "is encrypted by SOPS; import what `sops --decrypt` prints",
}

_NEVER: Final = frozenset({"ControllerRevision", "CustomResourceDefinition", "ReplicaSet"})
"""Kinds that repeat what stands elsewhere, or stood there once."""

_UNTOLD: Final = {
    "SriovNetworkNodePolicy": "of it the operator makes the ConfigMap device-plugin-config; import that, and let the operator go on "
    "making virtual functions",
    "DeviceConfig": "of it AMD's operator makes the plugin's DaemonSet; import that",
    **{
        f"{name}DevicePlugin": f"Fairlead has nothing that reads what Intel's {name} plugin is told"
        for name in ("Dlb", "Dsa", "Fpga", "Iaa", "Npu", "Qat", "Sgx")
    },
}
"""Kinds that are about device plugins and are not read."""


class Configuration(Struct, frozen=True):
    """One configuration among the documents."""

    name: str
    """The key under which it stands in a ConfigMap or a values file; empty if it stands alone."""
    document: Tree
    source: str
    map: str = ""
    """The ConfigMap in which it stands, if any."""


class Told(Struct):
    """What runs a plugin, and what that tells it."""

    source: str
    name: str
    line: int
    settings: Settings = field(default_factory=Settings)
    maps: dict[str, int] = field(default_factory=dict)
    """ConfigMaps that its containers mount or take variables from, each with the line that says so."""
    texts: frozenset[str] = frozenset()
    """Of a chart, every text of its values: any may be a ConfigMap's name."""


class Inputs(Struct):
    """Everything that was found in the documents."""

    configurations: list[Configuration] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    common: Settings = field(default_factory=Settings)
    """What may be any plugin's."""
    kinds: set[str] = field(default_factory=set)
    """Of Kubernetes' objects."""
    workloads: list[tuple[str, str]] = field(default_factory=list)
    """Those that have containers: the plugin's that runs in it, empty if that is not known, and name and namespace."""
    maps: dict[str, Table] = field(default_factory=dict)
    """The data of the ConfigMaps, by their names."""
    broken: list[Remark] = field(default_factory=list)
    """Texts that were meant for configurations and are no YAML."""
    remarks: list[Remark] = field(default_factory=list)

    def of(self, source: str, domain: str | None, entry: str | None = None) -> Settings:
        """What a plugin is told, by what runs it before what may be any plugin's.

        Raises:
            ImportRefusedError: several run it and are told different things, and `entry` names none of them.
        """
        every = [it for it in self.told if it.source == source]
        different = [
            it for n, it in enumerate(every) if all(it.settings.plain() != o.settings.plain() for o in every[:n])
        ]
        different = [it for it in different if it.settings != Settings(image=it.settings.image)] or different[:1]
        chosen = [it for it in different if it.name == entry] if len(different) > 1 else different
        if len(different) > 1 and len({it.name for it in different}) == 1:
            chosen = different  # a chart's values in several places
        if different and not chosen:
            names = ", ".join(it.name for it in different)
            why = f"{source} runs {len(different)} times and is told different things: {names}; choose one with --entry, node by node"
            raise ImportRefusedError(why, different[1].line)
        common = self.common
        own = Settings()
        for it in chosen:
            own = together(own, it.settings)
        return replace(together(common, own), domain=domain)


Recognised = Callable[[Tree], str | None]
"""Whose configuration a tree is."""


def gather(documents: Iterable[Tree], recognised: Recognised, files: Iterable[str] = ()) -> Inputs:
    """The configurations of documents, and the settings; `files` are the names of all files that are imported."""
    found, unknown = Inputs(), list[Table]()
    objects = [one for document in documents for one in _objects(document)]
    found.maps = dict(_maps(objects))
    urls = {
        text_at(one, "metadata", "name") or "": text_at(one, "spec", "url") or ""
        for one in objects
        if text_at(one, "kind") == "OCIRepository"
    }
    names = frozenset(name.rpartition("/")[2] for name in files)
    carried = Carried(found.maps, urls, names, found.remarks)
    present = {(text_at(one, "kind"), text_at(one, "metadata", "name")) for one in objects}
    values = {(kind, name) for one in objects for kind, name in charts.references(one)}
    for one in objects:
        kind = text_at(one, "kind") or ""
        if kind:
            found.kinds.add(kind)
        if kind in _NEVER or _is_made_by(one, present) or (kind, text_at(one, "metadata", "name")) in values:
            continue
        if kind in WORKLOADS:
            unknown += _read_workload(one, _called(one), text_at(one, "metadata", "name") or "", found)
        else:
            _read_object(one, found, recognised, carried)
    if not any(source for source, _ in found.workloads):  # beside one that is known they are no plugin's
        for container in unknown:
            _read_container(container, found.common, found)
    return found


def _is_made_by(one: Tree, present: set[tuple[str | None, str | None]]) -> bool:
    """Whether another object that is there made it, as a DaemonSet makes a pod."""
    return any(
        text_at(it, "kind") in WORKLOADS and (text_at(it, "kind"), text_at(it, "name")) in present
        for it in items_at(one, "metadata", "ownerReferences")
    )


def _maps(objects: Iterable[Tree]) -> Iterator[tuple[str, Table]]:
    for one in objects:
        data, name = below(one, "data"), text_at(one, "metadata", "name")
        if text_at(one, "kind") == "ConfigMap" and isinstance(data, Table) and name:
            yield name, data


def _read_object(one: Tree, found: Inputs, recognised: Recognised, carried: Carried) -> None:
    kind = text_at(one, "kind")
    if kind in _UNTOLD:
        found.remarks.append(Remark(one.line, f"{kind}: {_UNTOLD[kind]}"))
    if (
        isinstance(one, Table) and kind
    ):  # what an object says, not what was said of it: the last applied is in an annotation
        bare: Tree = one.without(("metadata", "status"))
    else:
        bare = one
    if source := recognised(bare):
        found.configurations.append(Configuration("", bare, source))
        if not kind:
            found.common.environment.update(_variables(bare))
    elif kind == "ConfigMap":
        data = below(one, "data")
        if isinstance(data, Table):
            _read_map(data, text_at(one, "metadata", "name") or "", found, recognised)
            found.common.environment.update(_variables(data))
    elif kind and kind == charts.POLICY and (text_at(one, "apiVersion") or "").startswith("nvidia.com/"):
        spec = below(one, "spec")
        called = f"devicePlugin.enabled of {kind} {text_at(one, 'metadata', 'name')}, by enabled: false"
        if isinstance(spec, Table):
            _read_release(Release("gpu-operator", spec, called), found, recognised)
    elif kind in charts.KINDS or not kind:
        for release in charts.releases(one, carried):
            _read_release(release, found, recognised)
        if not kind:
            found.common.environment.update(_variables(one))
        _read_generators(one, found, recognised, carried)
    else:
        found.configurations += _configurations(bare, "", recognised, found)


def _read_generators(one: Tree, found: Inputs, recognised: Recognised, carried: Carried) -> None:
    """The ConfigMaps that a kustomization.yaml makes, and what of it is not read."""
    if text_at(one, "kind") != "Kustomization" or below(one, "spec") is not None:
        return
    for generator in items_at(one, "configMapGenerator"):
        name = text_at(generator, "name") or ""
        data: dict[str, Tree] = {}
        for literal in _texts(generator, "literals"):
            key, _, text = literal.text.partition("=")
            data[key] = replace(literal, text=text.strip("'\""), kind="str")
        _read_map(Table.of(generator.line, data), name, found, recognised)
        for file in _texts(generator, "files"):
            path = file.text.rpartition("=")[2]
            if path.rpartition("/")[2] not in carried.files:
                why = f"ConfigMap {name} is made of {path}, which is not among these files; import it, too"
                found.remarks.append(Remark(file.line, why))
    for key in ("patches", "patchesStrategicMerge", "patchesJson6902", "replacements"):
        if (patches := below(one, key)) is not None:
            why = f"{key}: what they change is not read; import what `kustomize build` prints"
            found.remarks.append(Remark(patches.line, why))


def _read_map(data: Table, name: str, found: Inputs, recognised: Recognised) -> None:
    """The configurations in a ConfigMap; beside one, texts that are none are said."""
    before, broken = len(found.configurations), len(found.broken)
    unread: list[tuple[str, Tree]] = []
    for key, value in data.values.items():
        those = [replace(it, map=name) for it in _configurations(value, key, recognised, found)]
        found.configurations += those
        if not those and isinstance(value, Scalar) and "\n" in value.text.strip():
            unread.append((key, value))
    if len(found.configurations) == before:
        return
    said = {remark.sentence.split("'")[1] for remark in found.broken[broken:]}
    for key, value in unread:
        if key not in said:
            why = f"{key!r} beside it in ConfigMap {name} is no configuration that is known here, and is not read"
            found.remarks.append(Remark(value.line, why))


def _objects(document: Tree) -> Iterator[Tree]:
    """The document, or the objects of a list as kubectl prints it."""
    items = below(document, "items")
    if isinstance(items, Items) and (text_at(document, "kind") or "").endswith("List"):
        yield from items.items
    else:
        yield document


def _configurations(tree: Tree, name: str, recognised: Recognised, found: Inputs) -> Iterator[Configuration]:
    if source := recognised(tree):
        yield Configuration(name, tree, source)
    elif isinstance(tree, Table):
        for key, inner in tree.values.items():
            yield from _configurations(inner, key, recognised, found)
    elif isinstance(tree, Items):
        for inner in tree.items:
            yield from _configurations(inner, name, recognised, found)
    elif tree.kind == "str" and ("\n" in tree.text or ":" in tree.text):
        try:
            documents = embedded(tree)
        except ImportRefusedError as error:
            if name.endswith((".yaml", ".yml", ".json")) or ("\n" in tree.text and _ENTRY.search(tree.text)):
                found.broken.append(Remark(error.line or tree.line, f"in {name!r} {error.sentence}; it is not read"))
            return
        for inner in documents:
            if not isinstance(inner, Scalar):
                yield from _configurations(inner, name, recognised, found)


# --- charts ---


def _read_release(release: Release, found: Inputs, recognised: Recognised) -> None:
    """A chart's values: the containers and configurations in them, and the settings of the charts that are known."""
    kept = release.values.without(("configMaps",))
    texts = frozenset(text.text for text in scalars(kept))
    told = len(found.told)
    for name, tree in (values_at(release.values, "controllers") or {"": release.values}).items():
        called = f"{release.called or 'the chart'}, which makes the {name or 'plugin'} DaemonSet"
        _read_workload(tree, called, name, found, is_chart=True)
    before = len(found.configurations)
    found.configurations += _configurations(kept, "", recognised, found)
    for name, tree in values_at(release.values, "configMaps").items():
        data = below(tree, "data")
        if isinstance(data, Table):
            _read_map(data, name, found, recognised)
    sources = {it.source for it in found.configurations[before:]} | {it.source for it in found.told[told:]}
    source = charts.whose(release, sources)
    for it in found.told[told:]:
        it.texts, it.maps = texts, {**it.maps, **_persisted(release.values)}
    if not source:
        return
    read = charts.read_values(release, source, bool(found.told[told:]))
    found.remarks += read.remarks
    if read.document is not None:
        found.configurations.append(Configuration("", read.document, source))
    own = next((it for it in found.told[told:] if it.source == source), None)
    if own is None:
        own = Told(source, release.called or release.chart, release.values.line)
        found.told.append(own)
        if release.called:
            found.workloads.append((source, release.called))
    settings = own.settings
    settings.values.update(read.values)
    settings.environment = {**read.environment, **settings.environment}
    for name, value in read.arguments:
        settings.arguments.setdefault(name, value)
        settings.repeated.append((name, value))
    own.texts, own.maps = texts, {**own.maps, **read.maps}


def _persisted(values: Table) -> dict[str, int]:
    """The ConfigMaps that bjw-s' app-template mounts."""
    found: dict[str, int] = {}
    for volume in values_at(values, "persistence").values():
        name = below(volume, "name") or below(volume, "identifier")
        if text_at(volume, "type") == "configMap" and isinstance(name, Scalar):
            found[name.text] = name.line
    return found


# --- containers ---


def _containers(tree: Tree) -> Iterator[Table]:
    """The containers of a workload; in charts' values they may be named, as tables in a table."""
    if isinstance(tree, Table):
        for key, inner in tree.values.items():
            if key in ("containers", "initContainers"):
                every = (*items_at(inner), *values_at(inner).values())
                yield from (item for item in every if isinstance(item, Table))
            else:
                yield from _containers(inner)
    elif isinstance(tree, Items):
        for inner in tree.items:
            yield from _containers(inner)


def _words(container: Table) -> list[Scalar]:
    """Command and arguments; what a shell is told is taken apart."""
    words = [
        word
        for key in ("command", "args", "extraArgs")
        for one in [container.values.get(key)]
        for word in ([one] if isinstance(one, Scalar) and one.text else _texts(container, key))
    ]
    found: list[Scalar] = []
    for index, word in enumerate(words):
        parts = [word.text]
        if index and words[index - 1].text in ("-c", "-ec", "-lc"):
            with suppress(ValueError):
                parts = shlex.split(word.text)
        found += [word] if len(parts) == 1 else [Scalar(word.line, part, word.kind) for part in parts]
    return found


def _image(container: Table) -> str:
    """The image, which charts' values have in parts."""
    image = container.values.get("image")
    if not isinstance(image, Table):
        return image.text if isinstance(image, Scalar) else ""
    parts = [text_at(image, key) or "" for key in ("registry", "repository", "name", "image")]
    return "/".join(filter(None, parts)) + (f":{tag}" if (tag := text_at(image, "tag")) else "")


def _program(container: Table) -> str:
    """Its image and what it runs, as far as these tell whose it is."""
    return " ".join([_image(container), *(word.text for word in _words(container)[:3])])


def _read_workload(workload: Tree, called: str, name: str, found: Inputs, *, is_chart: bool = False) -> list[Table]:
    """Read what plugins in it are told; returns the containers of which it is not known whose they are."""
    containers = list(_containers(workload))
    if is_chart and not containers and isinstance(workload, Table) and "image" in workload.values:
        containers = [workload]
    if any(_STAYS.search(_program(container)) for container in containers):
        return []
    sources = [_source(container) for container in containers]
    if not is_chart or any(sources):
        found.workloads.append((next(filter(None, sources), ""), called))
    told = {source: Told(source, name, workload.line) for source in sources if source}
    mounted = _mounted(workload)
    for source, container in zip(sources, containers, strict=True):
        if source:
            _read_container(container, told[source].settings, found)
            told[source].maps |= mounted
    found.told += told.values()
    return [container for source, container in zip(sources, containers, strict=True) if not source]


def _mounted(workload: Tree) -> dict[str, int]:
    """The ConfigMaps of the volumes that a container mounts."""
    mounts = {
        text_at(mount, "name") for container in _containers(workload) for mount in items_at(container, "volumeMounts")
    }
    found: dict[str, int] = {}
    for volume in _volumes(workload):
        for source in (volume, *items_at(volume, "projected", "sources")):
            name = below(source, "configMap", "name")
            if isinstance(name, Scalar) and text_at(volume, "name") in mounts:
                found[name.text] = name.line
    return found


def _volumes(tree: Tree) -> Iterator[Tree]:
    if isinstance(tree, Table):
        for key, inner in tree.values.items():
            if key == "volumes" and isinstance(inner, Items):
                yield from inner.items
            else:
                yield from _volumes(inner)


def _source(container: Table) -> str:
    program = _program(container)
    return next((source for source, image in _IMAGES.items() if image.search(program)), "")


def _read_container(container: Table, of: Settings, found: Inputs) -> None:
    of.image = _image(container) or of.image
    for source in items_at(container, "envFrom"):
        name, prefix = text_at(source, "configMapRef", "name"), text_at(source, "prefix") or ""
        if name in found.maps:
            of.environment |= {f"{prefix}{key}": it for key, it in _variables(found.maps[name]).items()}
        else:
            found.remarks.append(Remark(source.line, _elsewhere("envFrom", source)))
    pairs = [(text_at(it, "name") or "", it) for it in items_at(container, "env")]
    for name, tree in (*values_at(container, "env").items(), *pairs):
        value = below(tree, "value") if isinstance(tree, Table) else tree
        reference = below(tree, "valueFrom")
        if isinstance(value, Scalar):
            of.environment[name] = as_argument(value.text, value.line)
        elif isinstance(reference, Table):
            name_of_map, key = (text_at(reference, "configMapKeyRef", it) or "" for it in ("name", "key"))
            there = below(found.maps.get(name_of_map), key)
            if isinstance(there, Scalar):
                of.environment[name] = as_argument(there.text, there.line)
            elif reference.values.keys() & {"configMapKeyRef", "secretKeyRef"}:
                found.remarks.append(Remark(tree.line, _elsewhere(name, reference)))
    for name, value in _arguments(_words(container)):
        of.arguments[name] = value
        of.repeated.append((name, value))


def _elsewhere(what: str, reference: Tree) -> str:
    table = next(iter(values_at(reference).values()), None)
    return f"{what}: its value is in {text_at(table, 'name')!r}, which is not among these files, and is not read"


def _arguments(words: list[Scalar]) -> Iterator[tuple[str, Scalar]]:
    """`--name=value`, `--name value`, and `--name` alone, which is true."""
    for index, word in enumerate(words):
        if (flag := _FLAG.fullmatch(word.text)) is None:
            continue
        following = words[index + 1] if index + 1 < len(words) else None
        if flag["value"] is not None:
            yield flag["name"], as_argument(flag["value"], word.line, block=word.block)
        elif following is not None and not _FLAG.fullmatch(following.text):
            yield flag["name"], as_argument(following.text, following.line, block=following.block)
        else:
            yield flag["name"], as_argument("true", word.line)


def _variables(tree: Tree) -> dict[str, Scalar]:
    """Whatever looks like a variable: `{name: X, value: "1"}` in a list, or `X: "1"`, as in a ConfigMap of variables."""
    found: dict[str, Scalar] = {}
    if isinstance(tree, Items):
        for item in tree.items:
            found |= _variables(item)
    elif isinstance(tree, Table):
        name, value = tree.values.get("name"), tree.values.get("value")
        if isinstance(name, Scalar) and isinstance(value, Scalar):
            found[name.text] = as_argument(value.text, value.line)
        for key, inner in tree.values.items():
            if isinstance(inner, Scalar) and "\n" not in inner.text and inner.kind != "null":
                found[key] = as_argument(inner.text, inner.line)
            elif not isinstance(inner, Scalar):
                found |= _variables(inner)
    return found


def filled_in(tree: Tree) -> Iterator[Remark]:
    """What other programs put in the place of texts before the plugin sees them."""
    for text in scalars(tree):
        if found := _FILLED_IN.search(text.text):
            how = str(found.lastgroup)
            line = text.line + text.block + text.text.count("\n", 0, found.start()) * text.block
            yield Remark(line, f"{found[0][:40]} {_BY[how]}")


def _called(workload: Tree) -> str:
    """`daemonset gpu-plugin of namespace kube-system`, and by what an operator makes it."""
    name, space = (text_at(workload, "metadata", key) for key in ("name", "namespace"))
    called = f"{(text_at(workload, 'kind') or '').lower()} {name or 'without a name'} of namespace {space or 'default'}"
    for owner in items_at(workload, "metadata", "ownerReferences"):
        called += f", by {text_at(owner, 'kind')} {text_at(owner, 'name')}, which would make it again"
    return called


def _texts(tree: Tree, key: str) -> list[Scalar]:
    """The texts of a list."""
    return [item for item in items_at(tree, key) if isinstance(item, Scalar)]
