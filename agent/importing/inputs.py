"""Gathers, from the documents of several files, the configurations in them and the arguments of plugins' containers.

A configuration may stand alone, as a text in a ConfigMap or in a Helm values file, or in a list of such; the arguments
and the environment stand in a DaemonSet.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from msgspec import Struct, field

from agent.importing.model import ImportRefusedError
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, read_yaml, text_at

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


class Configuration(Struct, frozen=True):
    """One configuration among the documents."""

    name: str
    """The key under which it stands in a ConfigMap or a values file; empty if it stands alone."""
    document: Tree
    source: str


class Settings(Struct):
    """What a plugin is told beside its configuration; each value knows its line."""

    arguments: dict[str, Scalar] = field(default_factory=dict)
    """Without their dashes; the last of several."""
    repeated: list[tuple[str, Scalar]] = field(default_factory=list)
    """All of them, in their order."""
    environment: dict[str, Scalar] = field(default_factory=dict)
    values: dict[str, Tree] = field(default_factory=dict)
    """Keys of its Helm chart's values, or of its operator's resource."""
    domain: str | None = None
    """As the command's own --domain says."""

    def table(self, names: Mapping[str, tuple[str, str]]) -> Table:
        """What is said of each key, whose argument and variable are named: arguments win, then the environment, then values."""
        found: dict[str, Tree] = {key: self.values[key] for key in names if key in self.values}
        for key, (argument, variable) in names.items():
            if (said := self.arguments.get(argument) or self.environment.get(variable)) is not None:
                found[key] = said
        return Table.of(1, found)


class Inputs(Struct):
    """Everything that was found in the documents."""

    configurations: list[Configuration] = field(default_factory=list)
    settings: defaultdict[str, Settings] = field(default_factory=lambda: defaultdict(Settings))
    """By plugin; under "" what may be any plugin's."""
    kinds: set[str] = field(default_factory=set)
    """Of Kubernetes' objects."""
    workloads: list[tuple[str, str]] = field(default_factory=list)
    """Those that have containers: the plugin's that runs in it, empty if that is not known, and name and namespace."""

    def of(self, source: str, domain: str | None) -> Settings:
        """What a plugin is told, by its own containers before what may be any plugin's."""
        own, common = self.settings.get(source, Settings()), self.settings.get("", Settings())
        return Settings(
            {**common.arguments, **own.arguments},
            [*common.repeated, *own.repeated],
            {**common.environment, **own.environment},
            {**common.values, **own.values},
            domain,
        )


def gather(documents: Iterable[Tree], recognised: Callable[[Tree], str | None]) -> Inputs:
    """The configurations of documents, and the settings; `recognised` says whose configuration a tree is."""
    found, unknown = Inputs(), list[Table]()
    for document in documents:
        for one in _objects(document):
            kind = text_at(one, "kind")
            if kind:
                found.kinds.add(kind)
            if kind in WORKLOADS:
                unknown += _read_workload(one, found)
            else:
                found.configurations += _configurations(one, "", recognised)
                found.settings[""].environment.update(_variables(one))
                found.settings[""].values.update(_values(one))
    if not any(source for source, _ in found.workloads):  # beside one that is known they are no plugin's
        for container in unknown:
            _read_container(container, found.settings[""])
    return found


def as_argument(text: str, line: int) -> Scalar:
    """A value from a command line or an environment, where everything is a text, as YAML would read it."""
    kind = "bool" if text.lower() in ("true", "false") else "str"
    return Scalar(line, text.lower() if kind == "bool" else text, kind)


def _objects(document: Tree) -> Iterator[Tree]:
    """The document, or the objects of a list as kubectl prints it."""
    items = below(document, "items")
    if isinstance(items, Items) and (text_at(document, "kind") or "").endswith("List"):
        yield from items.items
    else:
        yield document


def _configurations(tree: Tree, name: str, recognised: Callable[[Tree], str | None]) -> Iterator[Configuration]:
    if source := recognised(tree):
        yield Configuration(name, tree, source)
    elif isinstance(tree, Table):
        for key, below in tree.values.items():
            yield from _configurations(below, key, recognised)
    elif isinstance(tree, Items):
        for below in tree.items:
            yield from _configurations(below, name, recognised)
    elif tree.kind == "str" and ("\n" in tree.text or ":" in tree.text):
        with suppress(ImportRefusedError):
            for below in read_yaml(tree.text, tree.line + ("\n" in tree.text)):  # a block begins in the next line
                if not isinstance(below, Scalar):
                    yield from _configurations(below, name, recognised)


def _containers(tree: Tree) -> Iterator[Table]:
    if isinstance(tree, Table):
        for key, below in tree.values.items():
            if key in ("containers", "initContainers") and isinstance(below, Items):
                yield from (item for item in below.items if isinstance(item, Table))
            else:
                yield from _containers(below)
    elif isinstance(tree, Items):
        for below in tree.items:
            yield from _containers(below)


def _words(container: Table) -> list[Scalar]:
    return [item for key in ("command", "args") for item in _scalars(container.values.get(key))]


def _program(container: Table) -> str:
    """Its image and what it runs, as far as these tell whose it is."""
    return " ".join([text_at(container, "image") or "", *(word.text for word in _words(container)[:3])])


def _read_workload(workload: Tree, found: Inputs) -> list[Table]:
    """Read what plugins in it are told; returns the containers of which it is not known whose they are."""
    containers = list(_containers(workload))
    if any(_STAYS.search(_program(container)) for container in containers):
        return []
    sources = [_source(container) for container in containers]
    found.workloads.append((next(filter(None, sources), ""), _called(workload)))
    for source, container in zip(sources, containers, strict=True):
        if source:
            _read_container(container, found.settings[source])
    return [container for source, container in zip(sources, containers, strict=True) if not source]


def _source(container: Table) -> str:
    program = _program(container)
    return next((source for source, image in _IMAGES.items() if image.search(program)), "")


def _read_container(container: Table, of: Settings) -> None:
    of.environment.update(_variables(container.values.get("env", Items(0, ()))))
    for name, value in _arguments(_words(container)):
        of.arguments[name] = value
        of.repeated.append((name, value))


def _arguments(words: list[Scalar]) -> Iterator[tuple[str, Scalar]]:
    """`--name=value`, `--name value`, and `--name` alone, which is true."""
    for index, word in enumerate(words):
        if (flag := _FLAG.fullmatch(word.text)) is None:
            continue
        following = words[index + 1] if index + 1 < len(words) else None
        if flag["value"] is not None:
            yield flag["name"], as_argument(flag["value"], word.line)
        elif following is not None and not _FLAG.fullmatch(following.text):
            yield flag["name"], as_argument(following.text, following.line + ("\n" in following.text))
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
        for key, below in tree.values.items():
            if isinstance(below, Scalar) and "\n" not in below.text and below.kind != "null":
                found[key] = as_argument(below.text, below.line)
            elif not isinstance(below, Scalar):
                found |= _variables(below)
    return found


def _values(tree: Tree) -> Mapping[str, Tree]:
    """The keys of Helm values, or of an operator's `spec`, that say something."""
    spec = tree.values.get("spec", tree) if isinstance(tree, Table) else None
    every = spec.values.items() if isinstance(spec, Table) else ()
    return {key: value for key, value in every if not (isinstance(value, Scalar) and value.kind == "null")}


def _called(workload: Tree) -> str:
    """`daemonset gpu-plugin of namespace kube-system`, and by what an operator makes it."""
    name, space = (text_at(workload, "metadata", key) for key in ("name", "namespace"))
    called = f"{(text_at(workload, 'kind') or '').lower()} {name or 'without a name'} of namespace {space or 'default'}"
    owners = below(workload, "metadata", "ownerReferences")
    for owner in owners.items if isinstance(owners, Items) else ():
        called += f", by {text_at(owner, 'kind')} {text_at(owner, 'name')}, which would make it again"
    return called


def _scalars(tree: Tree | None) -> Iterator[Scalar]:
    if isinstance(tree, Items):
        yield from (item for item in tree.items if isinstance(item, Scalar))
