"""Makes resources of NVIDIA's MIG strategies and of its ways to share GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct, field

from agent.importing.fields import Fields
from agent.importing.model import Draft, Part, Remark, Value
from agent.importing.yaml_tree import Table, Tree

_DOMAIN: Final = "nvidia.com/"
_GPU: Final = "nvidia.com/gpu"
_MIG: Final = "nvidia.com/mig-"


class _Shared(Struct, frozen=True):
    """One resource that is shared."""

    replicas: int
    line: int
    remarks: tuple[Remark, ...]


class _Sharing(Struct):
    """How all are."""

    kind: str = ""
    """"timeSlicing" or "mps"."""
    suffix: str = ""
    one_only: bool | None = None
    """Is a container that asks for several refused? None: as is usual with this kind."""
    mps: Mapping[str, Value] = field(default_factory=dict)
    """Options of what is shared by MPS."""


def resources(
    tree: Tree | None, strategy: str, line: int, options: Mapping[str, Value], mps: Mapping[str, Value]
) -> Iterator[Part]:
    """The resources, MIG devices before whole GPUs.

    Args:
        tree: `sharing`.
        strategy: `migStrategy`, which stands in `line`.
        line: of it.
        options: what all resources have.
        mps: what those have beside that are shared by MPS.
    """
    remarks: list[Remark] = []
    if strategy == "single":
        why = "GPUs without MIG beside it, and several profiles, are offered too, where the plugin exits"
        remarks.append(Remark(line, f"migStrategy single: {why}", lost=False))
    elif strategy not in ("none", "mixed"):
        remarks.append(Remark(line, f"there is no migStrategy {strategy!r}; 'none' is taken"))
    if strategy not in ("single", "mixed"):
        options = {**options, "mig_devices": False}
    how, shared = _read(tree, remarks)
    how.mps = mps
    yield Part(tuple(remarks))
    names = [name for name in shared if name.startswith(_MIG)] if strategy == "mixed" else []
    for name, it in shared.items():
        if name != _GPU and name not in names:
            why = f"{name}: there is no such resource with migStrategy {strategy}; the plugin passes over it, too"
            yield Part((*it.remarks, Remark(it.line, why, lost=False)))
    for name in names:
        yield _part(name, {"profile": name.removeprefix(_MIG)}, how, shared.get(name), line, options)
    if strategy == "mixed":
        yield _part(f"{_MIG}{{profile}}", {}, how, None, line, options)
    yield _part(_GPU, {}, how, shared.get(_GPU), line, options)


def _part(
    name: str,
    select: Mapping[str, Value],
    how: _Sharing,
    shared: _Shared | None,
    line: int,
    options: Mapping[str, Value],
) -> Part:
    keys: dict[str, Value] = {"select": {"vendor": "10de", **select}, **options}
    if shared is None:
        return Part((), Draft.of(name, keys, line, "gpu"))
    keys["replicas"] = shared.replicas
    if how.one_only is not None:
        keys["fail_requests_greater_than_one"] = how.one_only
    if how.kind != "mps":
        return Part(shared.remarks, Draft.of(name + how.suffix, keys, shared.line, "gpu"))
    draft = Draft.of(name + how.suffix, {**keys, "sharing": "mps", **how.mps}, shared.line, "gpu")
    if "profile" not in select:
        return Part(shared.remarks, draft)
    why = f"{name}: MPS cannot share MIG devices, and the plugin does not start with it; it is commented out"
    return Part((*shared.remarks, Remark(shared.line, why)), draft, offered=False)


def _read(tree: Tree | None, remarks: list[Remark]) -> tuple[_Sharing, dict[str, _Shared]]:
    how = _Sharing()
    if not isinstance(tree, Table):
        return how, {}
    above = Fields(tree, "sharing", remarks)
    ways = {key: above.tree(key) for key in ("mps", "timeSlicing")}
    above.end()
    how.kind = next((key for key, way in ways.items() if isinstance(way, Table)), "")
    if not how.kind:
        return how, {}
    if how.kind == "mps":
        if isinstance(ways["timeSlicing"], Table):
            above.note("timeSlicing", "beside mps the plugin ignores timeSlicing, and so does this")
        above.note("mps", "the control daemon of MPS stays NVIDIA's, and goes on with this configuration: docs/gpu.md")
    way = ways[how.kind]
    assert isinstance(way, Table)
    fields = Fields(way, how.kind, remarks)
    how.suffix = ".shared" if fields.flag("renameByDefault") else ""
    if fields.tree("failRequestsGreaterThanOne") is not None:
        how.one_only = fields.flag("failRequestsGreaterThanOne")
    shared = {name: it for table in fields.tables("resources") for name, it in _entry(table, remarks)}
    fields.end()
    return how, shared


def _entry(table: Table, above: list[Remark]) -> Iterator[tuple[str, _Shared]]:
    name = Fields(table, "").text("name")
    name = name if name is None or "/" in name else f"{_DOMAIN}{name}"
    fields = Fields(table, name or "a shared resource")
    fields.text("name")
    replicas = fields.whole("replicas")
    for key in ("rename", "devices"):
        if fields.tree(key) is not None:
            fields.note(key, f"the plugin itself ignores {key}, and so does this")
    fields.end()
    if name is None:
        fields.lost("name", "it has no name and is left out")
    elif replicas is None or replicas < 2:
        fields.lost("replicas", "it has no replicas, of which the plugin wants 2 or more; it is not shared")
    else:
        yield name, _Shared(replicas, fields.line("replicas"), tuple(fields.remarks))
        return
    above += fields.remarks
