"""Recognises whose configuration a file is, and imports it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from agent.importing import cex, generic_device_plugin, kubevirt, smarter, solarflare, sriov
from agent.importing.model import Imported, ImportRefusedError, Sketch
from agent.importing.tree import Items, Scalar, Table, Tree, read_yaml
from agent.importing.writing import write

FORMATS: Final = ("generic-device-plugin", "smarter", "kubevirt", "cex", "solarflare", "sriov")
"""Their names, as the command has them."""


def import_text(text: str, source: str | None = None, domain: str | None = None) -> Imported:
    """What a configuration, of a source named in FORMATS or recognised, is as one of ours.

    `domain` is that of generic-device-plugin's resources, or the sriov-network-device-plugin's prefix.

    Raises:
        ImportRefusedError: it is no YAML, or no configuration that is known here.
    """
    documents = read_yaml(text)
    if not documents or all(isinstance(document, Scalar) and not document.text for document in documents):
        raise ImportRefusedError("the file is empty")
    every = [inner for document in documents for inner in _unwrapped(document)]
    if source is None:
        document, source = _recognised(every)
    elif len(every) > 1:
        document = next((document for document in every if _source(document) == source), every[0])
    else:
        document = every[0]
    return write(_reader(source, domain, documents)(document))


def _reader(source: str, domain: str | None, documents: Sequence[Tree]) -> Callable[[Tree], Sketch]:
    match source:
        case "cex":
            return lambda document: cex.read(document, cex.environment(documents))
        case "generic-device-plugin":
            return lambda document: generic_device_plugin.read(document, domain)
        case "smarter":
            return smarter.read
        case "solarflare":
            return solarflare.read
        case "sriov":
            return lambda document: sriov.read(document, domain)
        case _:
            return kubevirt.read


def _recognised(documents: list[Tree]) -> tuple[Tree, str]:
    """The one document that is a configuration, and whose.

    Raises:
        ImportRefusedError: there is none, or more than one.
    """
    known = [(document, source) for document in documents if (source := _source(document))]
    if len(known) > 1:
        line = known[1][0].line
        raise ImportRefusedError("here begins a second configuration; import them one by one", line)
    if known:
        return known[0]
    kinds = {kind for document in documents if (kind := _kind(document))}
    if "ConfigMap" in kinds:
        raise ImportRefusedError("this is a ConfigMap; import what stands in it, as a file of its own")
    if "DaemonSet" in kinds:
        raise ImportRefusedError(
            "this is a DaemonSet; for generic-device-plugin, write the values of its --device arguments as a list under "
            "'devices:' and import that"
        )
    raise ImportRefusedError(
        "this is no configuration of generic-device-plugin (a list 'devices'), smarter-device-manager (a list with "
        "devicematch), KubeVirt (permittedHostDevices), Crypto Express (cryptoconfigsets), Solarflare (a ConfigMap with "
        "onload-version) or sriov-network-device-plugin (resourceList); say --from if it is"
    )


def _unwrapped(document: Tree) -> list[Tree]:
    """The configurations that stand as texts in a ConfigMap, with their lines in the file; else the document itself."""
    data = document.values.get("data") if isinstance(document, Table) and _kind(document) == "ConfigMap" else None
    texts = data.values.values() if isinstance(data, Table) else ()
    inner: list[Tree] = []
    for text in texts:
        if isinstance(text, Scalar):
            first = text.line + ("\n" in text.text)  # a block begins in the next line
            with suppress(ImportRefusedError):
                inner += [it for it in read_yaml("\n" * (first - 1) + text.text) if _source(it)]
    return inner or [document]


def _source(document: Tree) -> str | None:
    if isinstance(document, Items):
        matches = (isinstance(item, Table) and "devicematch" in item.values for item in document.items)
        return "smarter" if any(matches) else None
    if not isinstance(document, Table):
        return None
    if any(isinstance(document.values.get(key), Items) for key in ("devices", "device")):
        return "generic-device-plugin"
    if cex.find(document) is not None:
        return "cex"
    if solarflare.find(document) is not None:
        return "solarflare"
    if sriov.is_it(document):
        return "sriov"
    return "kubevirt" if kubevirt.find(document) is not None else None


def _kind(document: Tree) -> str | None:
    kind = document.values.get("kind") if isinstance(document, Table) else None
    return kind.text if isinstance(kind, Scalar) else None
