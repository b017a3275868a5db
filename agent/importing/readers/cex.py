"""Reads the configuration sets of IBM's Crypto Express plugin (`cex_resources.json`), and its environment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from agent.importing.fields import Fields, Settings
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree

KEY: Final = "cryptoconfigsets"

_PREFIX: Final = "cex.s390.ibm.com/"
_PLACE: Final = ("adapter", "domain")
_MODES: Final = ("ep11", "cca", "accel")
_GENERATION: Final = re.compile("cex([0-9]{1,2})")
_SOURCE: Final = (
    "From the configuration sets of IBM's Crypto Express device plugin. Resources, IDs, nodes and mounts are the same; a "
    "wrong set is left out alone, where the plugin withdraws all."
)
_OVERCOMMIT: Final = "APQN_OVERCOMMIT_LIMIT"
_LIVE: Final = "APQN_LIVE_SYSFS"
_LIMITS: Final = {_OVERCOMMIT: (1, 100), _LIVE: (0, 1)}  # the plugin takes the nearest for what is beyond them
_DROPPED: Final = {
    "APQN_CHECK_INTERVAL": "the kernel's events tell of cards at once",
    "CRYPTOCONFIG_CHECK_INTERVAL": "a configuration that changes is read at once",
    "PODLISTER_POLL_INTERVAL": "the kubelet is asked when something changes",
    "RESOURCE_DELETE_NEVER_USED": "a node goes with its pod",
    "RESOURCE_DELETE_UNUSED": "a node goes with its pod",
    "METRICS_POLL_INTERVAL": "metrics are read when they are asked for",
    "CEX_PROM_EXPORTER_COLLECTOR_SERVICE": "Fairlead serves metrics itself",
    "CEX_PROM_EXPORTER_COLLECTOR_SERVICE_NAMESPACE": "Fairlead serves metrics itself",
    "CEX_PROM_EXPORTER_COLLECTOR_SERVICE_PORT": "Fairlead serves metrics itself",
    "APSYSFS_BUSDIR": "see [host] sys",
    "APSYSFS_DEVSDIR": "see [host] sys",
    "ZCRYPT_CLASSDIR": "see [host] sys",
    "PROC_SYSINFO_FILE": "see [host] proc",
    "SHADOWSYSFS_BASEDIR": "the copies lie in /run/fairlead/shadowsysfs",
    "CCS_JSON_FILE": "this is what was imported",
    "NODENAME": "see [kubernetes]",
}


def find(document: Tree) -> Table | None:
    """The document, if it has configuration sets."""
    return document if isinstance(document, Table) and isinstance(document.values.get(KEY), Items) else None


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that configuration sets mean.

    Raises:
        ImportRefusedError: there are none.
    """
    table = find(document) if document is not None else None
    if table is None:
        raise ImportRefusedError(f"there is no list {KEY!r}", 1)
    fields = Fields(table, KEY)
    variables = {name: it for name, it in settings.environment.items() if name in {*_LIMITS, *_DROPPED}}
    common = _common(variables, fields.remarks)
    parts = [_set(one, common) for one in fields.tables(KEY)]
    fields.end()
    return Sketch(_SOURCE, (fields.part(), *_compared(parts)))


def _common(variables: Mapping[str, Scalar], remarks: list[Remark]) -> dict[str, Value]:
    """The keys that the environment gives every set."""
    for name, value in variables.items():
        if name in _DROPPED:
            remarks.append(Remark(value.line, f"{name} is not needed: {_DROPPED[name]}", lost=False))
    numbers = {name: _clamped(name, variables[name], remarks) for name in _LIMITS if name in variables}
    common: dict[str, Value] = {}
    if numbers.get(_OVERCOMMIT, 1) > 1:
        common["overcommit"] = numbers[_OVERCOMMIT]
    if not numbers.get(_LIVE, 1):
        common["live_sysfs"] = False
    return common


def _clamped(name: str, value: Scalar, remarks: list[Remark]) -> int:
    least, most = _LIMITS[name]
    number = int(value.text) if re.fullmatch("-?[0-9]{1,9}", value.text) else 1  # the default of both
    nearest = max(least, min(most, number))
    if str(nearest) != value.text:
        why = f"is {value.text!r}, not a number from {least} to {most}; {nearest} is taken, as the plugin does"
        remarks.append(Remark(value.line, f"{name} {why}"))
    return nearest


def _set(table: Table, common: Mapping[str, Value]) -> Part:
    fields = Fields.named(table, "setname", "a set")
    name = fields.text("setname")
    if project := fields.text("project"):
        why = f"{project!r} cannot be enforced by a device plugin; give other namespaces a ResourceQuota of 0"
        fields.lost("project", f"the project {why}")
    apqns = [_apqn(one, fields) for one in fields.tables("apqns")]
    options: dict[str, Value] = {"apqns": [apqn for _, apqn in apqns]}
    if mode := fields.text("cexmode"):
        options["mode"] = mode
        fields.note("cexmode", "the plugin ignores cexmode; now cards in another mode are left out")
        if mode not in _MODES:
            fields.lost("cexmode", f"{mode!r} is none of {', '.join(_MODES)}; the set is left out")
            fields.sound = False
    if generation := fields.text("mincexgen"):
        if known := _GENERATION.fullmatch(generation):
            options["min_generation"] = int(known[1])
        else:
            fields.lost("mincexgen", f"{generation!r} is none of cex4 to cex9; the set is left out")
            fields.sound = False
    options |= common
    for key in ("overcommit", "livesysfs"):
        if fields.whole(key) is not None:
            fields.lost(key, f"the plugin ignores {key} of a set, and so does this import; write it into the resource")
    fields.end()
    if name is None:
        fields.lost("setname", "it has no setname and is left out")
    if not fields.sound or name is None or any(not apqn for _, apqn in apqns):
        return fields.part()
    lines = {f"apqns[{index}]": line for index, (line, _) in enumerate(apqns)}
    return fields.part(Draft.of(f"{_PREFIX}{name}", options, fields.line("setname"), "cex", lines))


def _apqn(table: Table, of: Fields) -> tuple[int, Mapping[str, Value]]:
    """One queue, with its line; empty if it cannot be told."""
    fields = Fields(table, of.about, of.remarks)
    found: dict[str, Value] = {key: n for key in _PLACE if (n := fields.whole(key)) is not None}
    missing = [key for key in _PLACE if key not in found]
    if machine := fields.text("machineid"):
        found["machine"] = machine
    fields.end()
    if fields.sound and missing:
        fields.lost("", f"an APQN has no {' and no '.join(missing)}; the set is left out")
    return table.line, {} if missing or not fields.sound else found


def _compared(parts: Iterable[Part]) -> Iterator[Part]:
    """The sets; where an earlier one has a queue of theirs on any machine, that is told."""
    seen: list[tuple[Mapping[str, Any], str]] = []
    for part in parts:
        remarks = list(part.remarks)
        if part.draft is not None:
            (group,), name = part.draft.groups, part.draft.name
            for index, one in enumerate(group.items("apqns")):
                owner = next((other for before, other in seen if other != name and _may_meet(one, before)), None)
                if owner is not None:
                    what = f"adapter {one['adapter']}, domain {one['domain']}"
                    why = f"{what} is in {owner} too, which comes first and has it; the plugin withdraws all sets then"
                    remarks.append(Remark(group.line_of(f"apqns[{index}]"), f"{name}: {why}"))
                seen.append((one, name))
        yield Part(tuple(remarks), part.draft)


def _may_meet(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    machines = one.get("machine"), other.get("machine")
    return all(one[key] == other[key] for key in _PLACE) and (machines[0] == machines[1] or None in machines)
