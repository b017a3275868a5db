"""Reads the ConfigMap of Solarflare's device plugin (sfc-device-plugin)."""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields
from agent.importing.model import Draft, ImportRefusedError, Sketch, Value
from agent.importing.settings import Settings
from agent.importing.yaml_tree import Table, Tree

_NAME: Final = "solarflare/smartNIC"
_EXPRESSION: Final = r"(?m)[\r\n]+^.*SFC[6-9].*$"
_KEYS: Final = frozenset({"onload-version", "resource-name"})
_SOURCE: Final = (
    "From the ConfigMap of Solarflare's device plugin. The IDs of the devices are PCI addresses, not names of interfaces; "
    "no pod names them."
)


def find(document: Tree) -> Table | None:
    """The plugin's keys in a ConfigMap, or alone; None if they are not there."""
    data = document.values.get("data", document) if isinstance(document, Table) else None
    return data if isinstance(data, Table) and data.values.keys() >= _KEYS else None


def read(document: Tree | None, _settings: Settings) -> Sketch:
    """The resource that the ConfigMap means.

    Raises:
        ImportRefusedError: it is not that ConfigMap.
    """
    if (data := find(document) if document is not None else None) is None:
        raise ImportRefusedError("Solarflare's ConfigMap has the keys onload-version and resource-name in its data", 1)
    fields = Fields.named(data, "resource-name", _NAME)
    fields.text("resource-name")
    fields.lost(
        "resource-name",
        "the plugin moved a card's interface into its pod and gave it the address in the pod's annotation sfc-nic-ip; "
        "Fairlead leaves that to a CNI plugin: see docs/sriov.md",
    )
    if (expression := fields.text("reg-exp-sfc")) is not None and expression != _EXPRESSION:
        fields.lost(
            "reg-exp-sfc", "reg-exp-sfc may have chosen some models; all Solarflare cards are offered: add select"
        )
    if fields.text("node-label-onload-version"):
        fields.lost("node-label-onload-version", "the node gets no annotation with Onload's version")
    for key in ("k8s-api", "socket-name"):
        if fields.text(key):
            fields.note(key, f"{key} is not needed, and left out")
    options: dict[str, Value] = {}
    if version := fields.text("onload-version"):
        options["onload_version"] = version
    fields.end()
    draft = Draft.of(fields.about, options, fields.line("resource-name"), "solarflare")
    return Sketch(_SOURCE, (fields.part(draft),))
