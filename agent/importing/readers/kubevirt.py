"""Reads KubeVirt's `permittedHostDevices`, from a KubeVirt or HyperConverged resource or alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from msgspec.structs import replace

from agent.importing.fields import USB_IDS, Fields, Settings, usb_ids
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, items_at, values_at

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
    parts += _merged(_mediated(fields.tables("mediatedDevices"), beside), _with_selectors)
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
    if not _is_offered(fields, "pciVendorSelector", "" if _PCI_ID.fullmatch(selector) else why):
        return fields.part()
    select: list[Value] = [{"id": selector.lower()}]
    return fields.part(Draft.of(fields.about, {"select": select, "ids": "group"}, fields.line("resourceName"), "vfio"))


def _sticks(table: Table) -> Part:
    fields = Fields.named(table, "resourceName", "usb")
    selectors = [(selector.line, _selector(selector, fields)) for selector in fields.tables("selectors")]
    why = "" if selectors else "it has no selectors, and so no devices; it is left out"
    if not _is_offered(fields, "selectors", why):
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


# --- mediated devices: those that KubeVirt permits, and those that it makes ---

_CONFIGURATION: Final = "mediatedDevicesConfiguration"
"""The key beside `permittedHostDevices` that says what is to be made."""

_LISTS: Final = ("mediatedDeviceTypes", "mediatedDevicesTypes")  # the older name is still read
_OFF: Final = {"disablemdevconfiguration"}  # a feature gate; HyperConverged spells it disableMDevConfiguration
_EXTERNAL: Final = "say externalResourceProvider: true here when Fairlead offers it, or KubeVirt's own plugin does too"
_GATES: Final = (("developerConfiguration", "featureGates"), ("featureGates",))


def _mediated(tables: Iterable[Table], beside: Table | None) -> Iterator[Part]:
    """The resources that permitted mediated devices mean; `beside` is the table around `permittedHostDevices`, if any."""
    remarks: list[Remark] = []
    wanted = _made(beside, remarks)
    selected = set[str]()
    for table in tables:
        part, kind = _mediated_resource(table, wanted)
        selected.add(kind)
        yield part
    for kind, line in wanted.items():
        if kind not in selected:
            why = "no resource selects this type by that word; if it is the ID of one, write create = true there"
            remarks.append(Remark(line, f"{_CONFIGURATION}: KubeVirt makes devices of type {kind}: {why}"))
    yield Part(tuple(remarks))


def _is_offered(fields: Fields, key: str, lacking: str) -> bool:
    """Whether a permitted device of KubeVirt's can be offered. `lacking`: what is wrong with `key`, or empty."""
    name, disabled = fields.text("resourceName"), fields.flag("disabled")
    is_external = fields.flag("externalResourceProvider")
    fields.end()
    if disabled:
        fields.remarks[:] = []
        fields.note("", "it is disabled, and so left out")
    elif fields.sound and name is None:
        fields.lost("resourceName", "it has no resourceName and is left out")
    elif fields.sound and lacking:
        fields.lost(key, lacking)
    elif fields.sound and not is_external:
        fields.note("resourceName", _EXTERNAL)
    return fields.sound and name is not None and not lacking and not disabled


def _mediated_resource(table: Table, wanted: Iterable[str]) -> tuple[Part, str]:
    """One resource, and the type that it selects."""
    fields = Fields.named(table, "resourceName", "mediatedDevices")
    kind = _normal(fields.text("mdevNameSelector") or "")
    why = "" if kind else "it has no mdevNameSelector, and so no devices; it is left out"
    if not _is_offered(fields, "mdevNameSelector", why):
        return fields.part(), kind
    options: dict[str, Value] = {"select": [{"type": kind}]}
    if kind in wanted:
        options["create"] = True
    return fields.part(Draft.of(fields.about, options, fields.line("resourceName"), "mdev")), kind


def _made(beside: Table | None, remarks: list[Remark]) -> dict[str, int]:
    """The types that KubeVirt makes on every node, each with its line."""
    table = beside.values.get(_CONFIGURATION) if beside is not None else None
    if not isinstance(table, Table):
        return {}
    assert beside is not None
    fields = Fields(table, _CONFIGURATION, remarks)
    kinds = {_normal(kind): fields.line(key) for key in _LISTS for kind in fields.texts(key)}
    for _ in fields.tables("nodeMediatedDeviceTypes"):
        fields.lost(
            "nodeMediatedDeviceTypes",
            "some nodes make other types; give those a configuration of their own, with create = true where they do",
        )
        break
    fields.end()
    if _is_off(beside):
        fields.note(_LISTS[0], "KubeVirt makes none, by DisableMDEVConfiguration, and neither does Fairlead")
        return {}
    if kinds:
        why = "a device is made when a pod is given it; take this out, or KubeVirt goes on making devices as well"
        fields.note(next(key for key in _LISTS if key in table.lines), why)
    return kinds


def _is_off(beside: Table) -> bool:
    for place in _GATES:
        gates = [(item.text, "true") for item in items_at(beside, *place) if isinstance(item, Scalar)]
        table = values_at(beside, *place)
        gates += [(key, value.text) for key, value in table.items() if isinstance(value, Scalar)]
        if any(name.lower() in _OFF and state.lower() == "true" for name, state in gates):
            return True
    return False


def _normal(kind: str) -> str:
    """As KubeVirt compares them."""
    return kind.strip().replace(" ", "_")
