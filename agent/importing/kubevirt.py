"""Reads KubeVirt's `permittedHostDevices`, from a KubeVirt or HyperConverged resource or alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from agent.importing.fields import Fields
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.tree import Table, Tree
from agent.importing.usb import usb_id

KEYS: Final = frozenset({"pciHostDevices", "mediatedDevices", "usb", "usbHostDevices"})
"""What `permittedHostDevices` may have; `usbHostDevices` is HyperConverged's name for `usb`."""

_PLACES: Final = (
    (),
    ("permittedHostDevices",),
    ("configuration", "permittedHostDevices"),
    ("spec", "permittedHostDevices"),
    ("spec", "configuration", "permittedHostDevices"),
)
_NOT_YET: Final = {
    "pciHostDevices": ("a PCI device for virtual machines needs the backend vfio", "pciVendorSelector"),
    "mediatedDevices": ("a mediated device needs the backend mdev", "mdevNameSelector"),
}
_PERMISSIONS: Final = "mrw"  # as KubeVirt's own plugin gives a stick
_SOURCE: Final = (
    "From KubeVirt's permittedHostDevices. The IDs of the devices are other ones: they stay when a stick is plugged in "
    "again; no virtual machine names them."
)


def find(document: Tree) -> Table | None:
    """The permitted host devices in a document, if it has any."""
    for place in _PLACES:
        found: Tree | None = document
        for key in place:
            found = found.values.get(key) if isinstance(found, Table) else None
        if isinstance(found, Table) and (found.values.keys() & KEYS if not place else True):
            return found
    return None


def read(document: Tree) -> Sketch:
    """The resources that the permitted host devices mean.

    Raises:
        ImportRefusedError: there are none.
    """
    permitted = find(document)
    if permitted is None:
        raise ImportRefusedError("there is no permittedHostDevices, nor a list that it would have", 1)
    remarks: list[Remark] = []
    fields = Fields(permitted, "permittedHostDevices", remarks)
    parts = [_not_yet(table, key) for key in _NOT_YET for table in fields.tables(key)]
    parts += _merged([_sticks(table) for key in ("usb", "usbHostDevices") for table in fields.tables(key)])
    fields.end()
    return Sketch(_SOURCE, (Part(tuple(remarks)), *parts))


def _merged(parts: Iterable[Part]) -> Iterator[Part]:
    """The parts; those of one resource are one, with a group for each of them."""
    by_name: dict[str, Part] = {}
    for part in parts:
        if part.draft is None:
            yield part
        elif (before := by_name.get(part.draft.name)) is None or before.draft is None:
            by_name[part.draft.name] = part
        else:
            draft = replace(before.draft, groups=before.draft.groups + part.draft.groups)
            by_name[part.draft.name] = Part(before.remarks + part.remarks, draft)
    yield from by_name.values()


def _not_yet(table: Table, key: str) -> Part:
    remarks: list[Remark] = []
    fields = Fields(table, key, remarks)
    why, selector = _NOT_YET[key]
    name = fields.text("resourceName") or "a resource without a name"
    selected = fields.text(selector) or fields.text("pciDeviceSelector") or "without a selector"
    keeps = "the plugin that offers it now" if fields.flag("externalResourceProvider") else "KubeVirt's own plugin"
    sentence = f"{name} ({selected}): {why}, which Fairlead does not have yet; leave it to {keeps}"
    return Part((Remark(fields.line("resourceName"), sentence),))


def _sticks(table: Table) -> Part:
    name = Fields(table, "usb", []).text("resourceName")
    remarks: list[Remark] = []
    fields = Fields(table, name or "usb", remarks)
    fields.text("resourceName")
    selectors = [
        (selector.line, _selector(selector, name or "usb", remarks)) for selector in fields.tables("selectors")
    ]
    external, disabled = fields.flag("externalResourceProvider"), fields.flag("disabled")
    fields.end()
    if disabled:
        return Part((Remark(table.line, f"{name}: it is disabled, and so left out", lost=False),))
    if not fields.sound or name is None or not selectors or any(selector is None for _, selector in selectors):
        if fields.sound and name is None:
            fields.lost("resourceName", "it has no resourceName and is left out")
        elif fields.sound and not selectors:
            fields.lost("selectors", "it has no selectors, and so no devices; it is left out")
        return Part(tuple(remarks))
    if not external:
        fields.lost(
            "resourceName",
            "KubeVirt's own plugin makes the node of a stick belong to the user of virtual machines, 107; Fairlead "
            "leaves nodes as they are: let a udev rule do it",
        )
        fields.note(
            "resourceName",
            "say externalResourceProvider: true here when Fairlead offers it, or KubeVirt's own plugin does too",
        )
    usb: list[Value] = [selector for _, selector in selectors if selector is not None]
    lines = {f"usb[{index}]": line for index, (line, _) in enumerate(selectors)}
    options: dict[str, Value] = {"usb": usb, "permissions": _PERMISSIONS}
    if len(usb) > 1:
        options["together"] = "each"
    line = fields.line("resourceName")
    return Part(tuple(remarks), Draft(name, (DraftGroup(options, line, lines),), line))


def _selector(table: Table, name: str, remarks: list[Remark]) -> Mapping[str, Value] | None:
    fields = Fields(table, name, remarks)
    wanted = {key: written for key in ("vendor", "product") if (written := usb_id(fields, key)) is not None}
    fields.end()
    missing = [key for key in ("vendor", "product") if key not in wanted]
    if fields.sound and missing:
        fields.lost("", f"a selector has no {' and no '.join(missing)}; the resource is left out")
    return wanted if fields.sound and not missing else None
