"""Reads KubeVirt's `permittedHostDevices`, from a KubeVirt or HyperConverged resource or alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from agent.importing.fields import Fields
from agent.importing.inputs import Settings
from agent.importing.model import Draft, DraftGroup, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.readers import mediated
from agent.importing.tree import Table, Tree, below
from agent.importing.values import usb_id

KEYS: Final = frozenset({"pciHostDevices", "mediatedDevices", "usb", "usbHostDevices"})
"""What `permittedHostDevices` may have; `usbHostDevices` is HyperConverged's name for `usb`."""

_PLACES: Final = (
    (),
    ("permittedHostDevices",),
    ("configuration", "permittedHostDevices"),
    ("spec", "permittedHostDevices"),
    ("spec", "configuration", "permittedHostDevices"),
)
_PCI_ID: Final = re.compile("[0-9a-f]{4}:[0-9a-f]{4}", re.IGNORECASE)
_PERMISSIONS: Final = "mrw"  # as KubeVirt's own plugin gives a stick
_QEMU: Final = 107  # the user of virtual machines, to whom it gives a stick's node (pkg/util: NonRootUID)
_EXTERNAL: Final = "say externalResourceProvider: true here when Fairlead offers it, or KubeVirt's own plugin does too"
_SOURCE: Final = (
    "From KubeVirt's permittedHostDevices. The IDs of PCI functions are the same, those of others are not: they stay when a "
    "stick is plugged in again, and a mediated device has its UUID; no virtual machine names them."
)


def find(document: Tree) -> Table | None:
    """The permitted host devices in a document, if it has any."""
    return _find(document)[0]


def _find(document: Tree) -> tuple[Table | None, Table | None]:
    """The same, and the table in which they stand."""
    for place in _PLACES:
        found, above = below(document, *place), below(document, *place[:-1]) if place else None
        if isinstance(found, Table) and (place or found.values.keys() & KEYS):
            return found, above if isinstance(above, Table) else None
    return None, None


def read(document: Tree | None, _settings: Settings) -> Sketch:
    """The resources that the permitted host devices mean.

    Raises:
        ImportRefusedError: there are none.
    """
    permitted, beside = _find(document) if document is not None else (None, None)
    if permitted is None:
        raise ImportRefusedError("there is no permittedHostDevices, nor a list that it would have", 1)
    remarks: list[Remark] = []
    fields = Fields(permitted, "permittedHostDevices", remarks)
    parts = [*_merged(map(_functions, fields.tables("pciHostDevices")), _with_selectors)]
    parts += _merged(mediated.read(fields.tables("mediatedDevices"), beside, _EXTERNAL), _with_selectors)
    sticks = [_sticks(table) for key in ("usb", "usbHostDevices") for table in fields.tables(key)]
    parts += _merged(sticks, _with_groups)
    fields.end()
    return Sketch(_SOURCE, (Part(tuple(remarks)), *parts))


def _merged(parts: Iterable[Part], join: Callable[[Draft, Draft], Draft]) -> Iterator[Part]:
    """The parts; those of one resource are one."""
    by_name: dict[str, Part] = {}
    for part in parts:
        if part.draft is None:
            yield part
        elif (before := by_name.get(part.draft.name)) is None or before.draft is None:
            by_name[part.draft.name] = part
        else:
            by_name[part.draft.name] = Part(before.remarks + part.remarks, join(before.draft, part.draft))
    yield from by_name.values()


def _with_groups(one: Draft, other: Draft) -> Draft:
    """Several kinds of sticks: a group for each."""
    return replace(one, groups=one.groups + other.groups)


def _with_selectors(one: Draft, other: Draft) -> Draft:
    """Several models of PCI functions, or types of mediated devices: a selector for each."""
    (first,), (second,) = one.groups, other.groups
    selectors: list[Value] = [*first.items("select"), *second.items("select")]
    options = {**first.options, **second.options, "select": selectors}
    return replace(one, groups=(replace(first, options=options),))


def _functions(table: Table) -> Part:
    """Functions of one model, which are on vfio-pci already: KubeVirt's plugin binds nothing either."""
    name = Fields(table, "pciHostDevices", []).text("resourceName")
    remarks: list[Remark] = []
    fields = Fields(table, name or "pciHostDevices", remarks)
    fields.text("resourceName")
    selector = fields.text("pciVendorSelector") or fields.text("pciDeviceSelector")
    external, disabled = fields.flag("externalResourceProvider"), fields.flag("disabled")
    fields.end()
    if disabled:
        return Part((Remark(table.line, f"{name}: it is disabled, and so left out", lost=False),))
    if fields.sound and name is None:
        fields.lost("resourceName", "it has no resourceName and is left out")
    elif fields.sound and (selector is None or not _PCI_ID.fullmatch(selector)):
        fields.lost("pciVendorSelector", f"it selects {selector or 'nothing'}, not IDs as in 10de:1eb8; it is left out")
    if not fields.sound or name is None or selector is None or not _PCI_ID.fullmatch(selector):
        return Part(tuple(remarks))
    if not external:
        fields.note("resourceName", _EXTERNAL)
    line = fields.line("resourceName")
    select: list[Value] = [{"id": selector.lower()}]
    return Part(tuple(remarks), Draft(name, (DraftGroup({"select": select, "ids": "group"}, line),), line, "vfio"))


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
        fields.note("resourceName", _EXTERNAL)
    usb: list[Value] = [selector for _, selector in selectors if selector is not None]
    lines = {f"usb[{index}]": line for index, (line, _) in enumerate(selectors)}
    options: dict[str, Value] = {"usb": usb, "permissions": _PERMISSIONS, "owner": _QEMU}
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
