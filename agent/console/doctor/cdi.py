"""Checks of what goes to containers by CDI: can Fairlead write specifications, and does the runtime read them?"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Final

from agent.cdi.names import DIRECTORY
from agent.console.doctor.findings import Finding, Patient, failure, fine, warning
from agent.runtime.errors import some
from backends.base import HostPath
from backends.linux import files

_CONTAINERD: Final = HostPath("/etc/containerd/config.toml")
_MOST_READ: Final = 1 << 20  # bytes
_SWITCH: Final = re.compile(r"^\s*enable_cdi\s*=\s*(true|false)\b", re.MULTILINE)
_SECOND: Final = re.compile(r"^\s*version\s*=\s*[12]\b", re.MULTILINE)


def cdi(patient: Patient) -> Iterator[Finding]:
    """Where a resource asks for CDI: is there a place for specifications, and does containerd heed them?"""
    wanting = [it.name for it in patient.config.resources if it.spec.edits != "inline"]
    if not wanting:
        yield fine("Nothing that is configured goes by CDI.")
        return
    directory = patient.config.host.local(DIRECTORY)
    place = directory if directory.exists() else directory.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield failure(
            f"{place} cannot be written: {some(wanting)} cannot go by CDI.",
            f"Mount the host's {DIRECTORY}, writable, and set host.run if it is mounted elsewhere.",
        )
    elif (lost := [it.name for it in patient.config.resources if it.spec.edits == "cdi"]) and _ignores_it(patient):
        yield warning(
            f"containerd has no CDI by {_CONTAINERD}, and starts containers without what {some(lost)} should give them.",
            'Set enable_cdi = true below its CRI plugin, or edits = "both".',
        )
    else:
        yield fine(f"{directory} can be written.")


def _ignores_it(patient: Patient) -> bool:
    """Does containerd's configuration say so, as far as it is seen from here? Version 3 of it is containerd 2, which has CDI on."""
    try:
        text = files.read(patient.config.host.local(_CONTAINERD), _MOST_READ).decode(errors="replace")
    except OSError:
        return False
    if (switch := _SWITCH.search(text)) is not None:
        return switch[1] == "false"
    return _SECOND.search(text) is not None
