"""Reads KubeVirt's mediated devices: those that it permits, and those that it makes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from agent.importing.fields import Fields
from agent.importing.model import Draft, Part, Remark, Value
from agent.importing.yaml_tree import Items, Scalar, Table, below

CONFIGURATION: Final = "mediatedDevicesConfiguration"
"""The key beside `permittedHostDevices` that says what is to be made."""

_LISTS: Final = ("mediatedDeviceTypes", "mediatedDevicesTypes")  # the older name is still read
_OFF: Final = {"disablemdevconfiguration"}  # a feature gate; HyperConverged spells it disableMDevConfiguration
_EXTERNAL: Final = "say externalResourceProvider: true here when Fairlead offers it, or KubeVirt's own plugin does too"
_GATES: Final = (("developerConfiguration", "featureGates"), ("featureGates",))


def read(tables: Iterable[Table], beside: Table | None) -> Iterator[Part]:
    """The resources that permitted mediated devices mean; `beside` is the table around `permittedHostDevices`, if any."""
    remarks: list[Remark] = []
    wanted = _made(beside, remarks)
    selected = set[str]()
    for table in tables:
        part, kind = _resource(table, wanted)
        selected.add(kind)
        yield part
    for kind, line in wanted.items():
        if kind not in selected:
            why = "no resource selects this type by that word; if it is the ID of one, write create = true there"
            remarks.append(Remark(line, f"{CONFIGURATION}: KubeVirt makes devices of type {kind}: {why}"))
    yield Part(tuple(remarks))


def is_offered(fields: Fields, key: str, lacking: str) -> bool:
    """Can a permitted device of KubeVirt's be offered? `lacking` is what is wrong with `key`, empty if nothing is."""
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


def _resource(table: Table, wanted: Iterable[str]) -> tuple[Part, str]:
    """One resource, and the type that it selects."""
    fields = Fields.named(table, "resourceName", "mediatedDevices")
    kind = _normal(fields.text("mdevNameSelector") or "")
    why = "" if kind else "it has no mdevNameSelector, and so no devices; it is left out"
    if not is_offered(fields, "mdevNameSelector", why):
        return fields.part(), kind
    options: dict[str, Value] = {"select": [{"type": kind}]}
    if kind in wanted:
        options["create"] = True
    return fields.part(Draft.of(fields.about, options, fields.line("resourceName"), "mdev")), kind


def _made(beside: Table | None, remarks: list[Remark]) -> dict[str, int]:
    """The types that KubeVirt makes on every node, each with its line."""
    table = beside.values.get(CONFIGURATION) if beside is not None else None
    if not isinstance(table, Table):
        return {}
    assert beside is not None
    fields = Fields(table, CONFIGURATION, remarks)
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
        found = below(beside, *place)
        if isinstance(found, Items):
            gates = [(item.text, "true") for item in found.items if isinstance(item, Scalar)]
        elif isinstance(found, Table):
            gates = [(key, value.text) for key, value in found.values.items() if isinstance(value, Scalar)]
        else:
            continue
        if any(name.lower() in _OFF and state.lower() == "true" for name, state in gates):
            return True
    return False


def _normal(kind: str) -> str:
    """As KubeVirt compares them."""
    return kind.strip().replace(" ", "_")
