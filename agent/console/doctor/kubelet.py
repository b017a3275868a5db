"""Checks that the kubelet gets what Fairlead offers: its directory, sockets and checkpoint, others of our names, and the daemon."""

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
from agent.console.doctor import Finding, Level, Patient, failure, fine, warning
from agent.console.doctor.host import filesystem
from agent.console.views import Status
from agent.kubelet.client import listens
from agent.kubelet.lock import holder
from agent.kubelet.rivals import other_sockets
from agent.kubelet.witnesses import FILE_NAME, lack_of_room, record
from agent.model import FORGOTTEN, TWO_PODS, State
from agent.runtime.errors import some
from agent.runtime.limits import SOCKET_DIRECTORY
from backends.base import PLACEHOLDER
from backends.errors import reason_of
from backends.linux import files

_PATIENCE: Final = (
    1.0  # seconds for a connection, which a kubelet that runs takes at once, and for each part of an answer
)
_START: Final = "Start it: systemctl start fairlead, or fairlead run."
_OF_CONTAINERS: Final = ("overlay", "tmpfs")
_DEVICE_MANAGER: Final = "DevicePlugins has been on in every kubelet since 1.10"


def plugin_directory(patient: Patient) -> Iterator[Finding]:
    """Checks that the plugin directory is there, and sockets can be made in it."""
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
    """Checks that a kubelet answers at its registration socket."""
    directory = patient.config.agent.plugin_dir
    path = directory / "kubelet.sock"
    mend = f"Start the kubelet, and look whether it uses this directory; {_DEVICE_MANAGER}."
    if (kind := filesystem(patient, directory)) in _OF_CONTAINERS and not path.exists():
        mend = f"{directory} is of type {kind}, as what a container has by itself: mount the host's there (hostPath)."
    yield _connection(path, "nothing can be registered", mend)


def podresources(patient: Patient) -> Iterator[Finding]:
    """Checks that the kubelet says which pods hold what."""
    path = patient.config.agent.pod_resources
    mend = (
        "Mount the host's pod-resources directory, or set agent.kubelet_root to the kubelet's --root-dir "
        "(k0s and microk8s have their own)."
    )
    found = _connection(path, "who holds what is not known, and no claim can end", mend)
    yield replace(found, level=min(found.level, Level.WARNING))


def checkpoint(patient: Patient) -> Iterator[Finding]:
    """Checks that the kubelet's own record of what pods hold can be read."""
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
    """Checks that a Fairlead runs on this plugin directory."""
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
    """What a connection to this socket finds: a process that answers, or a failure with `consequence`."""
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
    """Warns of another plugin that serves beside us, under a name like that of a resource of ours."""
    directory = patient.config.agent.plugin_dir
    others = sorted(name for name in other_sockets(directory) if listens(directory / name))
    resources = [resource.name for resource in patient.config.resources]
    alike = {name: like for name in resources if (like := [it for it in others if _is_like(it, name)])}
    for resource, names in alike.items():
        yield warning(
            f"{', '.join(names)}, beside the kubelet's socket, may be another plugin for {resource}: the kubelet listens "
            "to the one that registered last.",
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
    """Whether the resource's own name is a word of it, as in `nvidia-gpu.sock`, or one that the template could give."""
    if not is_distinctive(resource):
        return False
    word = ".+".join(map(re.escape, PLACEHOLDER.split(resource.rpartition("/")[2])[::2]))
    return re.search(rf"(?<![a-z0-9]){word}(?![a-z0-9])", socket_name, re.IGNORECASE) is not None


# --- the daemon, by what it says itself ---


_MENDS: Final = {
    "log": "See to it that whatever reads its stderr goes on reading.",
    "restarts": "Its log says more (`part-failed`, `part-restarts`).",
    "http": "Its log has the traceback (`http-failed`); please report it.",
    "kernel-log": "Raise log_buf_len= of the kernel if it comes again; what these lines said is lost.",
    "claims": "Look at the kubelet's log; pods keep what they have meanwhile.",
    "connections": "Raise its limit of open files: LimitNOFILE= of the service.",
}
"""What to do about the problems of a part; of the others, their own sentence says it."""


def daemon(said: Status | str) -> Iterator[Finding]:
    """Findings from its status, or from why there is none."""
    if isinstance(said, str):
        mend = "Start it, or run this as root; if it runs, its log says what keeps it from that socket."
        yield warning(f"{said[:1].upper()}{said[1:].rstrip('.')}.", mend)
        return
    for mistake in said.configuration.mistakes:
        yield failure(f"It runs with an earlier configuration: {mistake}", "Mend the file.")
    if said.configuration.needs_restart:
        yield warning(
            f"It was started with other settings: {', '.join(said.configuration.needs_restart)}.",
            "Restart it: systemctl restart fairlead, or delete the pod.",
        )
    for problem in said.problems:
        if problem.backend:
            continue  # of hardware, which the checks above have looked at
        if problem.subject == "state":
            yield failure(
                f"{problem.message}.", "Mend state_dir's disk; `fairlead drain` again what is missing.", "state"
            )
        else:
            mend = _MENDS.get(problem.subject, "Mend what it names; Fairlead tries again by itself.")
            yield warning(f"{problem.message}.", mend, problem.subject.replace(" ", "-"))
    yield from _held_twice(said)
    for it in said.witnesses:
        if it.heard:
            yield fine(f"It hears {it.name}.", "witnesses")
        elif not it.needed:
            yield fine(f"It need not hear {it.name}: {it.why}.", "witnesses")
        else:
            yield warning(f"It does not hear {it.name}: {it.why.rstrip('.')}.", "Mend what it names.", "witnesses")
    missing = [resource for resource in said.resources if not resource.served]
    if waiting := said.kubelet.waiting_for:
        without = f" {len(missing)} of its {len(said.resources)} resources are not registered." if missing else ""
        yield failure(f"It is {waiting}.{without}", "The checks above say what is wrong there.")
    for resource in missing:
        if waiting and not resource.complaint:
            continue
        why = f": {resource.complaint.rstrip('.')}" if resource.complaint else ""
        yield failure(
            f"{resource.name} is not registered with the kubelet{why}.",
            MEND
            if resource.overtaken
            else "Look at the kubelet's log for the name; the checks above say whether it answers.",
        )
    if not missing:
        yield fine(f"All its {len(said.resources)} resources are registered, and the kubelet listens to each.")


def _held_twice(said: Status) -> Iterator[Finding]:
    """What two pods hold, or will, if the kubelet that has forgotten the first one has its way."""
    for resource, device in ((one, it) for one in said.resources for it in one.devices):
        who = " and ".join(dict.fromkeys(it.name for held in device.held for it in held.holders)) or "nobody knows who"
        about = f"{device.key} of {resource.name} is {device.reason}: {device.message} ({who})."
        if device.reason == TWO_PODS:
            yield failure(about, "Delete one of these pods; its next one gets another device.")
        elif device.reason == FORGOTTEN:
            yield warning(about, f"Delete that pod, or, if no pod has it: fairlead undrain {device.ids[0]}.")


# --- what answers over HTTP ---


_READS: Final = 8  # what is ours says so in the first two: headers, and the first metric
_OURS: Final = b"fairlead_build_info"


def http(patient: Patient) -> Iterator[Finding]:
    """Checks that Fairlead is what answers at [http] listen."""
    listen = patient.config.http.listen
    if not patient.config.http.is_on:
        yield fine("It is off.")
        return
    try:
        said = _metrics(listen)
    except OSError as error:
        yield warning(
            f"Nobody answers at {listen}: {reason_of(error)}; probes and metrics fail.",
            "Start Fairlead; if it runs, its log says why it cannot listen there.",
        )
        return
    if _OURS in said:
        yield fine(f"Fairlead answers at {listen}.")
    else:
        yield failure(
            f"Something else answers at {listen}: Fairlead cannot listen there, and probes fail.",
            "Set another port in [http] listen, and in the probes; `ss -lptn` names who has this one.",
        )


def _metrics(listen: str) -> bytes:
    """The beginning of what is answered to a scraper."""
    with _connected(listen) as link:
        link.settimeout(_PATIENCE)
        link.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(link.recv(4096) for _ in range(_READS))


def _connected(listen: str) -> socket.socket:
    scheme, _, path = listen.partition(":")
    if scheme != "unix":
        host, _, port = listen.rpartition(":")
        return socket.create_connection((host.strip("[]"), int(port)), _PATIENCE)
    link = socket.socket(socket.AF_UNIX)
    try:
        link.settimeout(_PATIENCE)
        link.connect(path)
    except OSError:
        link.close()
        raise
    return link
