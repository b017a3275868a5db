"""Recognises whose configurations files have, and imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from agent.importing.fields import Settings, as_argument
from agent.importing.inputs import WORKLOADS, Configuration, Inputs, filled_in, gather
from agent.importing.model import Imported, ImportRefusedError, Part, Places, Remark, Sketch
from agent.importing.readers import cex, generic, gpu, kubevirt, network, nvidia, smarter
from agent.importing.writing import write
from agent.importing.yaml_tree import Scalar, Tree, plain, read_yaml, text_at

_READERS: Final[Mapping[str, Callable[[Tree | None, Settings], Sketch]]] = {
    "nvidia": nvidia.read,
    "gke": gpu.read_gke,
    "rocm": gpu.read_amd,
    "intel": gpu.read_intel,
    "kubevirt": kubevirt.read,
    "generic": generic.read,
    "smarter": smarter.read,
    "rdma": network.read_rdma,
    "sriov": network.read_sriov,
    "cex": cex.read,
    "solarflare": network.read_solarflare,
}
FORMATS: Final = tuple(_READERS)
"""Their names, as the command has them."""

_BY_ARGUMENTS: Final = frozenset({"nvidia", "gke", "rocm", "intel"})
"""These plugins run without a file."""

_SHAPES: Final[Mapping[str, Callable[[Tree], bool]]] = {
    "smarter": smarter.is_it,
    "nvidia": nvidia.is_it,
    "gke": gpu.is_gke,
    "rdma": network.is_rdma,
    "intel": gpu.is_intel,
    "generic": generic.is_it,
    "cex": lambda tree: cex.find(tree) is not None,
    "solarflare": lambda tree: network.solarflare(tree) is not None,
    "sriov": network.is_sriov,
    "kubevirt": lambda tree: kubevirt.find(tree) is not None,
}
"""Whose configuration a tree is; the first that fits."""


_NO_CONFIGURATION: Final = (
    "this is no configuration of NVIDIA's plugin (version: v1), GKE's (GPUSharingConfig), generic-device-plugin (a "
    "list 'devices'), smarter-device-manager (a list with devicematch), KubeVirt (permittedHostDevices), Crypto Express "
    "(cryptoconfigsets), Solarflare (a ConfigMap with onload-version), k8s-rdma-shared-dev-plugin (configList) or "
    "sriov-network-device-plugin (resourceList), nor a DaemonSet of one, nor the values of a chart that installs one; say "
    "--from if it is"
)


def import_files(
    texts: Mapping[str, str],
    source: str | None = None,
    domain: str | None = None,
    entry: str | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Imported:
    """What the configurations in files are as one of ours.

    Args:
        texts: by the files' names.
        source: of FORMATS, whose configuration alone is meant; None: all that are recognised.
        domain: that of generic-device-plugin's resources, or the sriov-network-device-plugin's prefix.
        entry: the key of the one that is meant, where a ConfigMap has several.
        environment: variables of the plugin's, beside those that the files tell.

    Raises:
        ImportRefusedError: one is no YAML, or there is no configuration that is known here, or several of one plugin.
    """
    places = Places.of(texts)
    documents = [document for name, text in texts.items() for document in read_yaml(text, places.first[name])]
    if not documents or all(isinstance(document, Scalar) and not document.text for document in documents):
        raise ImportRefusedError("the file is empty")
    found = gather(documents, _source, texts)
    for name, value in environment.items():
        found.common.environment[name] = as_argument(value, 1)
    if source is not None:
        meant = {source: _configuration(source, found, entry, domain)}
        if meant[source] is None and not _is_meant(source, found) and not found.kinds & WORKLOADS:
            if source in _BY_ARGUMENTS:
                raise ImportRefusedError(f"there is neither a configuration of {source} nor its DaemonSet here", 1)
            meant[source] = Configuration("", documents[0], source)  # the reader says what it misses
    else:
        meant = {it: _configuration(it, found, entry, domain) for it in FORMATS if _is_meant(it, found)}
    if not meant:
        if found.broken:
            raise ImportRefusedError(found.broken[0].sentence, found.broken[0].line)
        raise ImportRefusedError(*_unknown(found))
    sketches = [_read(it, which, found, found.of(it, domain, entry)) for it, which in meant.items()]
    beside = Part((*found.broken, *found.remarks, *_beside(meant, found)))
    written = write([replace(sketches[0], parts=(beside, *sketches[0].parts)), *sketches[1:]], places)
    return replace(written, peers=tuple(_peers(found, meant.keys())))


def _read(source: str, which: Configuration | None, found: Inputs, settings: Settings) -> Sketch:
    """What a plugin's reader makes of its configuration and of what it is told.

    Raises:
        ImportRefusedError: the reader cannot do without a configuration, and there is none.
    """
    missing = [
        (name, line)
        for it in found.told
        if it.source == source
        for name, line in it.maps.items()
        if name not in found.maps
    ]
    try:
        sketch = _READERS[source](which.document if which else None, settings)
    except ImportRefusedError as error:
        if which is None and missing:
            name, line = missing[0]
            why = f"the configuration is in ConfigMap {name}, which is not among these files; import it, too"
            raise ImportRefusedError(why, line) from error
        raise
    trees = [which.document] if which else []
    trees += [*settings.arguments.values(), *settings.environment.values(), *settings.values.values()]
    remarks = [Remark(it.line, it.sentence) for tree in trees for it in filled_in(tree)]
    if which is None and not any(name == "device" for name in settings.arguments):
        remarks += [
            Remark(line, f"ConfigMap {name} is not among these files; if a configuration is in it, import it, too")
            for name, line in missing
        ]
    return replace(sketch, parts=(Part(tuple(dict.fromkeys(remarks))), *sketch.parts))


def _beside(meant: Mapping[str, Configuration | None], found: Inputs) -> Iterator[Remark]:
    """ConfigMaps with configurations that nothing mounts which is there and runs the plugin."""
    for it in found.configurations:
        if it.source in meant and it.map and _is_out_of_force(it, found):
            is_taken = meant[it.source] is it
            taken = "it is imported all the same" if is_taken else "it is left out"
            why = f"{it.name}: no container here mounts ConfigMap {it.map}, so this is not in force; {taken}"
            yield Remark(it.document.line, why, lost=is_taken)


def _is_out_of_force(it: Configuration, found: Inputs) -> bool:
    runs = [told for told in found.told if told.source == it.source]
    return bool(it.map and runs) and not any(it.map in told.maps or it.map in told.texts for told in runs)


def _peers(found: Inputs, meant: Set[str]) -> Iterator[str]:
    """What has to go: of each plugin its workloads; where none is known, those of which it is not known whose they are."""
    strangers = [called for source, called in found.workloads if not source]
    for source in meant:
        known = [called for other, called in found.workloads if other == source]
        if source == "kubevirt":
            yield "KubeVirt's own plugins, by externalResourceProvider: true at each of these resources"
        elif source == "intel" and gpu.INTEL_KIND in found.kinds:
            yield f"the {gpu.INTEL_KIND}, whose operator takes the DaemonSet away"
        elif len(meant) == 1:
            yield from known or strangers or ["the plugin's DaemonSet"]
        else:
            yield from known or [f"the DaemonSet of {source}"]


def _is_meant(source: str, found: Inputs) -> bool:
    return any(it.source == source for it in found.told) or any(it.source == source for it in found.configurations)


def _configuration(source: str, found: Inputs, entry: str | None, domain: str | None) -> Configuration | None:
    """The plugin's configuration; None if it has none beside its arguments.

    Raises:
        ImportRefusedError: it has several, and nothing says which.
    """
    every = [it for it in found.configurations if it.source == source]
    every = [it for it in every if not _is_out_of_force(it, found)] or every
    every = [it for n, it in enumerate(every) if not any(_is_same(it, other) for other in every[:n])]
    runs = entry
    if entry not in {it.name for it in every}:  # then it may name a ConfigMap, or what runs the plugin and mounts one
        maps = {entry, *(name for it in found.told if it.name == entry for name in it.maps)}
        every = [it for it in every if it.map in maps] or every
        if entry in {it.map for it in every} | {it.name for it in found.told}:
            entry = None
    entry = entry or _default(found, source, domain, runs)
    if entry is None and len(every) > 1:
        every = _mounted(every, found, source) or every
    if len(every) < 2 and (entry is None or not every or every[0].name in ("", entry)):
        return every[0] if every else None
    if chosen := [it for it in every if it.name == entry]:
        return chosen[0]
    by_map = len({it.map for it in every}) == len(every)
    if by_map or len({it.name for it in every}) == len(every):
        names = ", ".join((by_map and it.map) or it.name or "one that has no name" for it in every)
        raise ImportRefusedError(
            f"there are {len(every)} configurations of {source}: {names}; choose one with --entry, node by node",
            every[0].document.line,
        )
    raise ImportRefusedError("here begins a second configuration; import them one by one", every[1].document.line)


def _is_same(one: Configuration, other: Configuration) -> bool:
    """Whether both are one configuration, as a values file and what a chart made of it."""
    return (one.name == other.name or not one.name or not other.name) and plain(one.document) == plain(other.document)


def _mounted(every: list[Configuration], found: Inputs, source: str) -> list[Configuration]:
    """Those that the plugin's arguments name, as `--config=/config/NAME` does."""
    named = {
        settings.arguments[key].text.rpartition("/")[2]
        for settings in [it.settings for it in found.told if it.source == source]
        for key in ("config", "config-file")
        if key in settings.arguments
    }
    return [it for it in every if it.name in named]


def _default(found: Inputs, source: str, domain: str | None, runs: str | None) -> str | None:
    """The configuration that nodes have without a label that names another."""
    settings = found.of(source, domain, runs)
    said = settings.environment.get("DEFAULT_CONFIG")
    return (said.text if said else text_at(settings.values.get("config"), "default")) or None


def _unknown(found: Inputs) -> tuple[str, int | None]:
    """Why nothing is imported, and the line if one says it."""
    if found.remarks:
        return found.remarks[0].sentence, found.remarks[0].line
    if found.kinds & {"ConfigMap", "DaemonSet"}:
        why = f"there is no known plugin's configuration in this {' and '.join(sorted(found.kinds))}, nor a container of one; "
        return f"{why}say --from, or import the file that it has mounted", None
    return _NO_CONFIGURATION, None


def _source(document: Tree) -> str | None:
    return next((source for source, is_it in _SHAPES.items() if is_it(document)), None)
