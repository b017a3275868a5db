"""Reads KubeVirt's `permittedHostDevices`, from a KubeVirt or HyperConverged resource or alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from agent.importing.fields import Fields
from agent.importing.model import Draft, ImportRefusedError, Part, Sketch, Value
from agent.importing.readers import mediated
from agent.importing.settings import Settings
from agent.importing.values import USB_IDS, usb_ids
from agent.importing.yaml_tree import Items, Table, Tree, below

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
        if isinstance(found, Table) and (place or any(isinstance(found.values.get(key), Items) for key in KEYS)):
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
    fields = Fields(permitted, "permittedHostDevices")
    parts = [*_overlapping(list(_merged(map(_functions, fields.tables("pciHostDevices")), _with_selectors)))]
    parts += _merged(mediated.read(fields.tables("mediatedDevices"), beside), _with_selectors)
    sticks = [_sticks(table) for key in ("usb", "usbHostDevices") for table in fields.tables(key)]
    parts += _merged(sticks, _with_groups)
    fields.end()
    return Sketch(_SOURCE, (fields.part(), *parts))


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


def _overlapping(parts: list[Part]) -> Iterator[Part]:
    """The parts; functions that may be in one group, as a GPU and its sound are, and are in different resources, share it."""
    vendors = [_vendors(part) for part in parts]
    for index, part in enumerate(parts):
        others = set().union(*(it for other, it in enumerate(vendors) if other != index))
        if part.draft is None or not vendors[index] & others:
            yield part
            continue
        (group,) = part.draft.groups
        draft = replace(part.draft, groups=(replace(group, options={**group.options, "overlap": True}),))
        yield replace(part, draft=draft)


def _vendors(part: Part) -> set[str]:
    groups = part.draft.groups if part.draft else ()
    return {str(it["id"]).partition(":")[0] for group in groups for it in group.items("select")}


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
    fields = Fields.named(table, "resourceName", "pciHostDevices")
    selector = fields.text("pciVendorSelector") or fields.text("pciDeviceSelector") or ""
    why = f"it selects {selector or 'nothing'}, not IDs as in 10de:1eb8; it is left out"
    if not mediated.is_offered(fields, "pciVendorSelector", "" if _PCI_ID.fullmatch(selector) else why):
        return fields.part()
    select: list[Value] = [{"id": selector.lower()}]
    return fields.part(Draft.of(fields.about, {"select": select, "ids": "group"}, fields.line("resourceName"), "vfio"))


def _sticks(table: Table) -> Part:
    fields = Fields.named(table, "resourceName", "usb")
    selectors = [(selector.line, _selector(selector, fields)) for selector in fields.tables("selectors")]
    why = "" if selectors else "it has no selectors, and so no devices; it is left out"
    if not mediated.is_offered(fields, "selectors", why):
        return fields.part()
    usb: list[Value] = [selector for _, selector in selectors]
    lines = {f"usb[{index}]": line for index, (line, _) in enumerate(selectors)}
    options: dict[str, Value] = {"usb": usb, "permissions": _PERMISSIONS, "owner": _QEMU}
    if len(usb) > 1:
        options["together"] = "each"
    return fields.part(Draft.of(fields.about, options, fields.line("resourceName"), lines=lines))


def _selector(table: Table, of: Fields) -> Mapping[str, Value]:
    """One kind of stick; where it cannot be told, the resource is not sound."""
    fields = Fields(table, of.about, of.remarks)
    wanted = usb_ids(fields)
    fields.end()
    missing = [key for key in USB_IDS if key not in wanted]
    if fields.sound and missing:
        fields.lost("", f"a selector has no {' and no '.join(missing)}; the resource is left out")
    of.sound = of.sound and fields.sound and not missing
    return wanted
