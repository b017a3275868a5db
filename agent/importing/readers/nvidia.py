"""Reads the configuration of NVIDIA's device plugin (`version: v1`), its arguments, environment and Helm values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from msgspec import Struct, field

from agent.importing.fields import Fields, Settings, is_xid
from agent.importing.model import Draft, ImportRefusedError, Part, Remark, Sketch, Value
from agent.importing.yaml_tree import Items, Scalar, Table, Tree, below, items_at, text_at, values_at

_KEYS: Final = frozenset({"version", "flags", "resources", "sharing", "imex", "health"})
SECTIONS: Final = frozenset({"flags", "sharing", "imex"})
"""Keys that only its configuration has."""
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("renameByDefault", "failRequestsGreaterThanOne", "resources"), "below sharing.timeSlicing or sharing.mps"
    ),
    **dict.fromkeys(("timeSlicing", "mps"), "below sharing"),
    **dict.fromkeys(("sharing", "version", "flags", "health"), "at the top of the file"),
    "replicas": "in the list sharing.timeSlicing.resources",
}
"""Keys that the plugin knows at another place, and where. Where they are misplaced it passes over them."""

SETTINGS: Final = {
    "migStrategy": ("mig-strategy", "MIG_STRATEGY"),
    "failOnInitError": ("fail-on-init-error", "FAIL_ON_INIT_ERROR"),
    "nvidiaDriverRoot": ("nvidia-driver-root", "NVIDIA_DRIVER_ROOT"),
    "nvidiaDevRoot": ("nvidia-dev-root", "NVIDIA_DEV_ROOT"),
    "gdrcopyEnabled": ("gdrcopy-enabled", "GDRCOPY_ENABLED"),
    "gdsEnabled": ("gds-enabled", "GDS_ENABLED"),
    "mofedEnabled": ("mofed-enabled", "MOFED_ENABLED"),
    "deviceDiscoveryStrategy": ("device-discovery-strategy", "DEVICE_DISCOVERY_STRATEGY"),
    "passDeviceSpecs": ("pass-device-specs", "PASS_DEVICE_SPECS"),
    "deviceListStrategy": ("device-list-strategy", "DEVICE_LIST_STRATEGY"),
    "deviceIDStrategy": ("device-id-strategy", "DEVICE_ID_STRATEGY"),
    "cdiAnnotationPrefix": ("cdi-annotation-prefix", "CDI_ANNOTATION_PREFIX"),
    "nvidiaCTKPath": ("nvidia-cdi-hook-path", "NVIDIA_CDI_HOOK_PATH"),
    "containerDriverRoot": ("container-driver-root", "CONTAINER_DRIVER_ROOT"),
    "sharedDevicesAllocationPolicy": ("shared-devices-allocation-policy", "SHARED_DEVICES_ALLOCATION_POLICY"),
    "mpsRoot": ("mps-root", "MPS_ROOT"),
    "useNodeFeatureAPI": ("use-node-feature-api", "USE_NODE_FEATURE_API"),
    "compatWithCPUManager": ("", ""),  # of the Helm chart alone: passDeviceSpecs
    "imexChannelIDs": ("imex-channel-ids", "IMEX_CHANNEL_IDS"),
    "imexRequired": ("imex-required", "IMEX_REQUIRED"),
    "gfd": ("", ""),
    "plugin": ("", ""),
}
"""Key of the file → argument and variable; they win over the file."""

_DISCOVERY: Final = ("auto", "nvml", "tegra")
_FLAGS: Final = {"gdrcopyEnabled": "gdrcopy_enabled", "gdsEnabled": "gds_enabled", "mofedEnabled": "mofed_enabled"}
_NOT_NEEDED: Final = {
    "failOnInitError": "Fairlead never exits for a GPU that cannot be read; it says so",
    "nvidiaCTKPath": "it is for writing CDI specs, which nvidia-ctk does",
    "useNodeFeatureAPI": "it is GPU Feature Discovery's",
    "gfd": "it is GPU Feature Discovery's",
    "containerDriverRoot": "see [host]",
}
_XID_EVENTS: Final = "EventTypeXidCriticalError"
_MPS_ROOT: Final = "/run/nvidia/mps"
"""The default of its chart, and ours."""

_SOURCE: Final = (
    "From the configuration of NVIDIA's device plugin. Names, IDs and answers are the same; a GPU that had an XID recovers "
    "when it is reset. What is said by arguments and in the environment wins over the file; an import sees what it is given."
)


def is_it(document: Tree) -> bool:
    """Whether the document is one of the plugin's."""
    if not isinstance(document, Table) or not document.values or document.values.keys() - _KEYS:
        return False
    return bool(document.values.keys() & SECTIONS) or text_at(document, "version") == "v1"


def read(document: Tree | None, settings: Settings) -> Sketch:
    """The resources that a configuration means, with the plugin's arguments, environment and values.

    Raises:
        ImportRefusedError: it is of another version, or none.
    """
    if document is not None and not is_it(document):
        raise ImportRefusedError("the configuration of NVIDIA's plugin has version: v1, and flags or sharing", 1)
    file = document if isinstance(document, Table) else Table(1, {}, {})
    above = Fields(file, "NVIDIA's device plugin")
    remarks = above.remarks
    if (version := above.text("version")) not in (None, "v1"):
        raise ImportRefusedError(f"this is version {version!r} of the plugin's configuration; v1 is known", above.line("version"))  # fmt: skip
    fields = Fields(_effective(file, settings), "NVIDIA's device plugin", remarks)
    options = _options(fields)
    options |= _xids(settings, remarks) or _health(above.tree("health"), remarks)
    options |= _imex(fields, above)
    strategy = fields.text("migStrategy") or "none"
    mps_root = fields.text("mpsRoot") or _MPS_ROOT
    for key, why in _NOT_NEEDED.items():
        if fields.tree(key) is not None:
            fields.note(key, f"{key} is not needed: {why}")
    for key in ("compatWithCPUManager", "plugin"):
        fields.tree(key)
    _misplaced(fields)
    fields.end()
    for key in ("flags", "imex"):
        above.tree(key)
    if above.tree("resources") is not None:
        above.note("resources", "resources: the plugin itself ignores patterns and names, and so does this")
    mps = {} if mps_root == _MPS_ROOT else {"mps_root": mps_root}
    parts = _resources(above.tree("sharing"), strategy, fields.line("migStrategy"), options, mps)
    above.end()
    return Sketch(_SOURCE, (fields.part(), *parts))


def _misplaced(fields: Fields) -> None:
    """Say where keys belong that the plugin does not look for among its flags."""
    for key, where in _ELSEWHERE.items():
        if fields.tree(key) is not None:
            fields.note(key, f"{key} belongs {where}; the plugin passes over it here, and so does this")


def _effective(file: Table, settings: Settings) -> Table:
    """All flags: the file's, flat, below what arguments, the environment and values say."""
    said: dict[str, Tree] = dict(values_at(file, "flags"))
    said |= values_at(said.pop("plugin", None))
    for key, name in (("channelIDs", "imexChannelIDs"), ("required", "imexRequired")):
        if (tree := below(file, "imex", key)) is not None:
            said[name] = tree
    if root := below(settings.values.get("mps"), "root"):
        said["mpsRoot"] = root  # of the Helm chart
    said |= settings.table(SETTINGS).values
    said = {key: tree for key, tree in said.items() if not (isinstance(tree, Scalar) and tree.kind == "null")}
    return Table.of(file.line, said)


def _options(fields: Fields) -> dict[str, Value]:
    options = _strategy(fields)
    if named := fields.text("deviceIDStrategy"):
        options["device_id_strategy"] = named
    if fields.flag("passDeviceSpecs") or fields.flag("compatWithCPUManager"):
        options["pass_device_specs"] = True
    if (root := fields.text("nvidiaDevRoot") or fields.text("nvidiaDriverRoot") or "/") != "/":
        options["device_driver_root"] = root
    fields.text("nvidiaDriverRoot")
    options |= {option: True for key, option in _FLAGS.items() if fields.flag(key)}
    if prefix := fields.text("cdiAnnotationPrefix"):
        options["cdi_annotation_prefix"] = prefix
    policy = fields.text("sharedDevicesAllocationPolicy") or "distributed"
    if policy == "packed":
        options["placement"] = "pack"
    elif policy != "distributed":
        fields.lost("sharedDevicesAllocationPolicy", f"there is no policy {policy!r}; 'distributed' is taken")
    if (how := fields.text("deviceDiscoveryStrategy") or "auto") not in _DISCOVERY:
        fields.lost("deviceDiscoveryStrategy", f"there is no deviceDiscoveryStrategy {how!r}; 'auto' is taken")
    elif how != "auto":
        fields.note("deviceDiscoveryStrategy", f"{how}: Fairlead sees by itself what a machine is, as with 'auto'")
    return options


def _strategy(fields: Fields) -> dict[str, Value]:
    if isinstance(fields.tree("deviceListStrategy"), Items):
        several = fields.texts("deviceListStrategy")
    else:
        several = [one.strip() for one in (fields.text("deviceListStrategy") or "").split(",") if one.strip()]
    if cdi := next((one for one in several if one.startswith("cdi-")), None):
        why = "the plugin wrote the CDI specifications that this names; from now on nvidia-ctk has to: docs/gpu.md"
        fields.lost("deviceListStrategy", f"{cdi}: {why}")
    if not several:
        return {}
    return {"device_list_strategy": several if len(several) > 1 else several[0]}


def _imex(fields: Fields, above: Fields) -> dict[str, Value]:
    tree = fields.tree("imexChannelIDs")
    texts = [item.text for item in items_at(tree) if isinstance(item, Scalar)]
    texts = tree.text.strip("[] ").split(",") if isinstance(tree, Scalar) else texts
    channels = [text.strip() for text in texts if text.strip()]
    required = fields.flag("imexRequired")
    if required and not channels:
        fields.note("imexRequired", "required means nothing without channels")
    if channels not in ([], ["0"]):
        fields.lost("imexChannelIDs", "the plugin knows no IMEX channels but [0], and does not start; 0 is taken")
    imex = above.tree("imex")
    if isinstance(imex, Table):
        inner = Fields(imex, "imex", above.remarks)
        for key in ("channelIDs", "required"):
            inner.tree(key)
        inner.end()
    return {"imex": "required" if required else "optional"} if channels else {}


def _xids(settings: Settings, remarks: list[Remark]) -> dict[str, Value]:
    """What is said beside the plugin's own set, which is ours too; what is enabled wins over what is disabled."""
    off = _listed(settings.environment.get("DP_DISABLE_HEALTHCHECKS"), remarks)
    on = _numbers(_listed(settings.environment.get("DP_ENABLE_HEALTHCHECKS"), remarks))
    ignored: Value = [xid for xid in _numbers(off) if xid not in on]
    if {"all", "xids"} & set(off):
        ignored = "all"
    return {key: value for key, value in (("xid_critical", on), ("xid_ignored", ignored)) if value}


def _health(tree: Tree | None, remarks: list[Remark]) -> dict[str, Value]:
    """What the file says of XIDs; its lists stand in the place of the plugin's own, and ignored ones count first."""
    if not isinstance(tree, Table):
        return {}
    fields = Fields(tree, "health", remarks)
    disabled, types, critical = fields.flag("disabled"), fields.texts("eventTypes"), fields.tree("criticalXIDs")
    ignored = _numbers(fields.texts("ignoredXIDs"))
    fields.end()
    if disabled or (types and _XID_EVENTS not in types):
        return {"xid_ignored": "all"}
    if isinstance(critical, Items):
        only: Value = [xid for xid in _numbers(fields.texts("criticalXIDs")) if xid not in ignored]
        return {"xid_critical": only, "xid_ignored": "all"}
    return {"xid_critical": "all", "xid_ignored": ignored} if ignored else {}


def _listed(said: Scalar | None, remarks: list[Remark]) -> list[str]:
    words = [word.strip().lower() for word in said.text.split(",") if word.strip()] if said else []
    known = [word for word in words if word in ("all", "xids") or is_xid(word)]
    sentence = "is neither an XID nor all nor xids; it is left out"
    remarks += [Remark(said.line, f"{word!r} {sentence}") for word in words if said and word not in known]
    return known


def _numbers(words: list[str]) -> list[int]:
    return [int(word) for word in words if is_xid(word)]


# --- MIG strategies and ways to share GPUs, as resources ---

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
    """Whether a container that asks for several is refused. None: as is usual with this kind."""
    mps: Mapping[str, Value] = field(default_factory=dict)
    """Options of what is shared by MPS."""


def _resources(
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
    how, shared = _sharing(tree, remarks)
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


def _sharing(tree: Tree | None, remarks: list[Remark]) -> tuple[_Sharing, dict[str, _Shared]]:
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
