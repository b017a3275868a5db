"""Reads the arguments of AMD's device plugin, which has no configuration file."""

from __future__ import annotations

from typing import Final

from agent.importing.fields import Fields
from agent.importing.model import Draft, Part, Sketch
from agent.importing.settings import Settings
from agent.importing.yaml_tree import Tree

_SOURCE: Final = "From the arguments of AMD's device plugin. Names, IDs and nodes are the same."
_NAMES: Final = {name: (name, "") for name in ("pulse", "resource_naming_strategy", "driver_type")}
_NAMING, _DRIVER = "resource_naming_strategy", "driver_type"


def read(_document: Tree | None, settings: Settings) -> Sketch:
    """The resources that the plugin's arguments mean."""
    fields = Fields(settings.table(_NAMES), "AMD's device plugin")
    naming, driver = fields.text(_NAMING) or "single", fields.text(_DRIVER) or "container"
    if fields.text("pulse"):
        fields.note("pulse", "pulse is not needed: health is always watched, each GPU's its own")
    if naming not in ("single", "mixed"):
        fields.lost(_NAMING, f"there is no {_NAMING} {naming!r}; 'single' is taken")
    if driver != "container":
        why = f"{_DRIVER} {driver!r} gives GPUs to virtual machines: the backend vfio does that, see docs/vfio.md"
        fields.lost(_DRIVER, why)
    fields.end()
    names = ["amd.com/{partition}"] if naming == "mixed" else []
    options, line = {"select": {"vendor": "1002"}}, fields.line(_NAMING)
    drafts = [Draft.of(name, options, line, "gpu") for name in (*names, "amd.com/gpu")]
    return Sketch(_SOURCE, (fields.part(), *(Part((), it, driver == "container") for it in drafts)))
