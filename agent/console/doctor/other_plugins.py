"""Finds other plugins that may have registered a name of ours: the kubelet listens to the last one and tells no other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agent.config.templates import is_distinctive
from agent.console.advice import REASONS
from agent.console.doctor.findings import Finding, Patient, failure, fine, warning
from agent.console.views import Status
from agent.kubelet.checkpoint import record
from agent.kubelet.rivals import other_sockets
from agent.kubelet.transport.client import listens
from agent.model import State
from agent.runtime.errors import some
from backends.base import PLACEHOLDER

MEND: Final = REASONS["overtaken"].do


def sockets(patient: Patient) -> Iterator[Finding]:
    """Does another plugin serve beside us, under a name like that of a resource of ours?"""
    directory = patient.config.agent.plugin_dir
    others = sorted(name for name in other_sockets(directory) if listens(directory / name))
    resources = [resource.name for resource in patient.config.resources]
    alike = {name: like for name in resources if (like := [it for it in others if _is_like(it, name)])}
    for resource, names in alike.items():
        yield warning(
            f"{', '.join(names)}, beside the kubelet's socket, may be another plugin for {resource}: the kubelet listens "
            "to whoever registered last.",
            MEND,
        )
    if not alike:
        known = f"Others serve here, by their names for other resources: {', '.join(others)}."
        yield fine(known if others else "No other plugin serves in this directory.")


def differences(said: Status, plugin_dir: Path) -> dict[str, str]:
    """Resource → how what the kubelet has of it differs from what the daemon says it told; nothing where it is the same.

    A list that is on its way differs too: ask again before believing it.
    """
    _, registered = record(plugin_dir)
    found = {}
    for resource in said.resources:
        theirs = registered.get(resource.name)
        if theirs is None or not resource.served:
            continue
        ours = {i for it in resource.devices if it.state != State.UNHEALTHY.value for i in it.ids}
        if strange := sorted(theirs - ours):
            found[resource.name] = f"has {some(strange)}, which Fairlead does not offer"
        elif missing := sorted(ours - theirs):
            found[resource.name] = f"lacks {some(missing)}"
    return found


def findings(different: Mapping[str, str]) -> Iterator[Finding]:
    """A finding for each of these differences."""
    for resource, how in different.items():
        yield failure(
            f"The kubelet {how}, among its healthy devices of {resource}: another plugin has registered this name, or "
            "had and is gone.",
            MEND,
        )


def _is_like(socket_name: str, resource: str) -> bool:
    """Does it have the resource's own name as a word, as in `nvidia-gpu.sock`, or one that the template could give?"""
    if not is_distinctive(resource):
        return False
    word = ".+".join(map(re.escape, PLACEHOLDER.split(resource.rpartition("/")[2])[::2]))
    return re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", socket_name, re.IGNORECASE) is not None
