"""Recognises whose configuration a file is, and imports it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agent.importing import generic_device_plugin, kubevirt, smarter
from agent.importing.model import Imported, ImportRefusedError, Sketch
from agent.importing.tree import Items, Scalar, Table, Tree, read_yaml
from agent.importing.writing import write

FORMATS: Final = ("generic-device-plugin", "smarter", "kubevirt")
"""Their names, as the command has them."""


def import_text(text: str, source: str | None = None, domain: str | None = None) -> Imported:
    """What a configuration, of a source named in FORMATS or recognised, is as one of ours.

    `domain` is that of generic-device-plugin's resources.

    Raises:
        ImportRefusedError: it is no YAML, or no configuration that is known here.
    """
    documents = read_yaml(text)
    if not documents or all(isinstance(document, Scalar) and not document.text for document in documents):
        raise ImportRefusedError("the file is empty")
    if source is None:
        document, source = _recognised(documents)
    elif len(documents) > 1:
        document = next((document for document in documents if _source(document) == source), documents[0])
    else:
        document = documents[0]
    return write(_reader(source, domain)(document))


def _reader(source: str, domain: str | None) -> Callable[[Tree], Sketch]:
    match source:
        case "generic-device-plugin":
            return lambda document: generic_device_plugin.read(document, domain)
        case "smarter":
            return smarter.read
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
        "devicematch) or KubeVirt (permittedHostDevices); say --from if it is"
    )


def _source(document: Tree) -> str | None:
    if isinstance(document, Items):
        matches = (isinstance(item, Table) and "devicematch" in item.values for item in document.items)
        return "smarter" if any(matches) else None
    if not isinstance(document, Table):
        return None
    if any(isinstance(document.values.get(key), Items) for key in ("devices", "device")):
        return "generic-device-plugin"
    return "kubevirt" if kubevirt.find(document) is not None else None


def _kind(document: Tree) -> str | None:
    kind = document.values.get("kind") if isinstance(document, Table) else None
    return kind.text if isinstance(kind, Scalar) else None
