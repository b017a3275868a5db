"""Recognises whose configurations files have, and imports them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from types import MappingProxyType
from typing import Final

from msgspec.structs import replace

from agent.importing.inputs import WORKLOADS, Configuration, Inputs, Settings, as_argument, gather
from agent.importing.model import Imported, ImportRefusedError, Sketch
from agent.importing.places import Places
from agent.importing.readers import cex, generic, gke, intel, kubevirt, nvidia, rdma, rocm, smarter, solarflare, sriov
from agent.importing.writing import write
from agent.importing.yaml_tree import Scalar, Tree, read_yaml, text_at

_READERS: Final[Mapping[str, Callable[[Tree | None, Settings], Sketch]]] = {
    "nvidia": nvidia.read,
    "gke": gke.read,
    "rocm": rocm.read,
    "intel": intel.read,
    "kubevirt": kubevirt.read,
    "generic": generic.read,
    "smarter": smarter.read,
    "rdma": rdma.read,
    "sriov": sriov.read,
    "cex": cex.read,
    "solarflare": solarflare.read,
}
FORMATS: Final = tuple(_READERS)
"""Their names, as the command has them."""

_BY_ARGUMENTS: Final = frozenset({"nvidia", "gke", "rocm", "intel"})
"""These plugins run without a file."""

_SHAPES: Final[Mapping[str, Callable[[Tree], bool]]] = {
    "smarter": smarter.is_it,
    "nvidia": nvidia.is_it,
    "gke": gke.is_it,
    "rdma": rdma.is_it,
    "intel": intel.is_it,
    "generic": generic.is_it,
    "cex": lambda tree: cex.find(tree) is not None,
    "solarflare": lambda tree: solarflare.find(tree) is not None,
    "sriov": sriov.is_it,
    "kubevirt": lambda tree: kubevirt.find(tree) is not None,
}
"""Whose configuration a tree is; the first that fits."""


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
    found = gather(documents, _source)
    for name, value in environment.items():
        found.settings[""].environment[name] = as_argument(value, 1)
    if source is not None:
        meant = {source: _configuration(source, found, entry, domain)}
        if meant[source] is None and not _is_meant(source, found) and not found.kinds & WORKLOADS:
            if source in _BY_ARGUMENTS:
                raise ImportRefusedError(f"there is neither a configuration of {source} nor its DaemonSet here", 1)
            meant[source] = Configuration("", documents[0], source)  # the reader says what it misses
    else:
        meant = {it: _configuration(it, found, entry, domain) for it in FORMATS if _is_meant(it, found)}
    if not meant:
        raise ImportRefusedError(_unknown(found))
    written = write(
        [_READERS[it](which.document if which else None, found.of(it, domain)) for it, which in meant.items()], places
    )
    return replace(written, peers=tuple(_peers(found, meant.keys())))


def _peers(found: Inputs, meant: Set[str]) -> Iterator[str]:
    """What has to go: of each plugin its workloads; where none is known, those of which it is not known whose they are."""
    strangers = [called for source, called in found.workloads if not source]
    for source in meant:
        known = [called for other, called in found.workloads if other == source]
        if source == "kubevirt":
            yield "KubeVirt's own plugins, by externalResourceProvider: true at each of these resources"
        elif source == "intel" and intel.KIND in found.kinds:
            yield f"the {intel.KIND}, whose operator takes the DaemonSet away"
        elif len(meant) == 1:
            yield from known or strangers or ["the plugin's DaemonSet"]
        else:
            yield from known or [f"the DaemonSet of {source}"]


def _is_meant(source: str, found: Inputs) -> bool:
    if source == "nvidia" and len(nvidia.SETTINGS.keys() & found.settings[""].values.keys()) > 1:
        return True  # the values of its Helm chart
    return source in found.settings or any(it.source == source for it in found.configurations)


def _configuration(source: str, found: Inputs, entry: str | None, domain: str | None) -> Configuration | None:
    """The plugin's configuration; None if it has none beside its arguments.

    Raises:
        ImportRefusedError: it has several, and nothing says which.
    """
    every = [it for it in found.configurations if it.source == source]
    entry = entry or _default(found, source, domain)
    if len(every) < 2 and (entry is None or not every or every[0].name in ("", entry)):
        return every[0] if every else None
    if chosen := [it for it in every if it.name == entry]:
        return chosen[0]
    if len({it.name for it in every}) == len(every):
        names = ", ".join(it.name or "one that has no name" for it in every)
        raise ImportRefusedError(
            f"there are {len(every)} configurations of {source}: {names}; choose one with --entry, node by node",
            every[0].document.line,
        )
    raise ImportRefusedError("here begins a second configuration; import them one by one", every[1].document.line)


def _default(found: Inputs, source: str, domain: str | None) -> str | None:
    """The configuration that nodes have without a label that names another."""
    settings = found.of(source, domain)
    said = settings.environment.get("DEFAULT_CONFIG")
    return (said.text if said else text_at(settings.values.get("config"), "default")) or None


def _unknown(found: Inputs) -> str:
    if found.kinds & {"ConfigMap", "DaemonSet"}:
        return (
            f"there is no known plugin's configuration in this {' and '.join(sorted(found.kinds))}, nor a container of one; "
            "say --from, or import the file that it has mounted"
        )
    return (
        "this is no configuration of NVIDIA's plugin (version: v1), GKE's (GPUSharingConfig), generic-device-plugin (a "
        "list 'devices'), smarter-device-manager (a list with devicematch), KubeVirt (permittedHostDevices), Crypto Express "
        "(cryptoconfigsets), Solarflare (a ConfigMap with onload-version), k8s-rdma-shared-dev-plugin (configList) or "
        "sriov-network-device-plugin (resourceList), nor a DaemonSet of one; say --from if it is"
    )


def _source(document: Tree) -> str | None:
    return next((source for source, is_it in _SHAPES.items() if is_it(document)), None)
