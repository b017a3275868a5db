"""Checks the kubelet's directory, sockets and checkpoint, whether a Fairlead runs there, and whether others took our names."""

from __future__ import annotations

import os
import re
import socket
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from agent.config.resources import is_distinctive
from agent.console.advice import REASONS
from agent.console.doctor.findings import Finding, Level, Patient, failure, fine, warning
from agent.console.doctor.host import filesystem
from agent.console.views import Status
from agent.kubelet.client import listens
from agent.kubelet.lock import holder
from agent.kubelet.rivals import other_sockets
from agent.kubelet.witnesses import FILE_NAME, lack_of_room, record
from agent.model import State
from agent.runtime.errors import some
from agent.runtime.limits import SOCKET_DIRECTORY
from backends.base import PLACEHOLDER
from backends.errors import reason_of
from backends.linux import files

_PATIENCE: Final = 1.0  # seconds for a connection; a kubelet that runs takes it at once
_START: Final = "Start it: systemctl start fairlead, or fairlead run."
_OF_CONTAINERS: Final = ("overlay", "tmpfs")
_DEVICE_MANAGER: Final = "DevicePlugins has been on in every kubelet since 1.10"


def plugin_directory(patient: Patient) -> Iterator[Finding]:
    """Is the plugin directory there, and can sockets be made in it?"""
    directory = patient.config.agent.plugin_dir
    try:
        mode = directory.stat().st_mode
    except FileNotFoundError:
        yield failure(
            f"{directory} does not exist.",
            "In a container, mount the host's directory there (hostPath); on a node, start the kubelet, which makes it. "
            "If the kubelet's directory is elsewhere, set agent.plugin_dir.",
        )
        return
    except OSError as error:
        yield failure(f"{directory} cannot be looked at: {reason_of(error)}.", "Run as root.")
        return
    if not stat.S_ISDIR(mode):
        yield failure(f"{directory} is no directory.", "Set agent.plugin_dir to the kubelet's plugin directory.")
    elif os.statvfs(directory).f_flag & os.ST_RDONLY:
        yield failure(f"{directory} is mounted read-only.", "Mount it without readOnly: sockets are made in it.")
    elif not os.access(directory, os.W_OK | os.X_OK):
        yield failure(f"{directory} cannot be written to by user {patient.uid}.", "Run as root.")
    else:
        yield fine(f"{directory} can be written to.")


def kubelet_socket(patient: Patient) -> Iterator[Finding]:
    """Does a kubelet answer at its registration socket?"""
    directory = patient.config.agent.plugin_dir
    path = directory / "kubelet.sock"
    mend = f"Start the kubelet, and look whether it uses this directory; {_DEVICE_MANAGER}."
    if (kind := filesystem(patient, directory)) in _OF_CONTAINERS and not path.exists():
        mend = f"{directory} is of type {kind}, as what a container has by itself: mount the host's there (hostPath)."
    yield _connection(path, "nothing can be registered", mend)


def podresources(patient: Patient) -> Iterator[Finding]:
    """Does the kubelet say which pods hold what?"""
    path = patient.config.agent.pod_resources
    mend = (
        "Mount the host's pod-resources directory, or set agent.kubelet_root to the kubelet's --root-dir "
        "(k0s and microk8s have their own)."
    )
    found = _connection(path, "who holds what is not known, and no claim can end", mend)
    yield replace(found, level=min(found.level, Level.WARNING))


def checkpoint(patient: Patient) -> Iterator[Finding]:
    """Can the kubelet's own record of what pods hold be read?"""
    file = patient.config.agent.plugin_dir / FILE_NAME
    try:
        with files.opened(file, follow=False) as (opened, _):
            os.read(opened, 1)
    except FileNotFoundError:
        yield fine(f"{file} is not there yet; the kubelet writes it with the first list of devices.")
    except OSError as error:
        yield warning(
            f"{file} cannot be read: {reason_of(error)}; no claim can end.", "Run as root, or let SELinux allow it."
        )
    else:
        yield fine(f"{file} can be read.")
    if lack := lack_of_room(patient.config.agent.plugin_dir):
        yield failure(
            f"{lack}. The kubelet refuses each pod that asks for devices, for good.", "Make room on that disk."
        )


def agent(patient: Patient) -> Iterator[Finding]:
    """Does a Fairlead run on this plugin directory?"""
    directory = patient.config.agent.plugin_dir
    lock = directory / SOCKET_DIRECTORY / "lock"
    try:
        pid = holder(lock)
    except FileNotFoundError:
        if directory.is_dir():
            yield failure("No Fairlead has run on this plugin directory yet.", _START)
        else:
            yield fine("None can have run on a plugin directory that is not there.")
        return
    except OSError as error:
        yield warning(f"{lock} cannot be read: {reason_of(error)}.", "Run as root.")
        return
    if pid:
        yield fine(f"Fairlead runs as process {pid}.")
    else:
        yield failure("No Fairlead runs on this plugin directory.", _START)


def _connection(path: Path, consequence: str, mend: str) -> Finding:
    """Does somebody answer at this socket?"""
    if path.is_symlink():
        return failure(f"{path} is a symbolic link and not followed: {consequence}.", "Remove it. " + mend)
    if not path.exists():
        return failure(f"{path} does not exist: {consequence}.", mend)
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(_PATIENCE)
        try:
            link.connect(str(path))
        except ConnectionRefusedError:
            return failure(f"Nobody answers at {path}: {consequence}.", "The kubelet is down. " + mend)
        except PermissionError:
            denied = (
                "It is forbidden, by its mode or by SELinux. Run as root, and as container_device_plugin_t or spc_t."
            )
            return failure(f"{path} cannot be connected to: {consequence}.", denied)
        except OSError as error:
            return failure(f"{path} cannot be connected to: {reason_of(error)}: {consequence}.", mend)
    return fine(f"Somebody answers at {path}.")


# --- other plugins of our names: the kubelet listens to the last one that registers, and tells no other ---


MEND: Final = REASONS["overtaken"].do


def other_plugins(patient: Patient) -> Iterator[Finding]:
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


def taken_over(different: Mapping[str, str]) -> Iterator[Finding]:
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
