"""Checks of what this process may do: capabilities, SELinux, namespaces, the kernel's events, inotify."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import Final

from agent.console.doctor.findings import Finding, Patient, failure, fine, warning
from agent.discovery.paths import Inotify
from backends.base import HostPath

_DAC_OVERRIDE, _SYS_PTRACE = 1, 19  # linux/capability.h
_IDENTITY: Final = re.compile(r"\s*0\s+0\s+4294967295\s*")
_FIRST_PIDS: Final = "pid:[4026531836]"  # the node's own PID namespace, PROC_PID_INIT_INO in linux/proc_ns.h
_TAGGED: Final = frozenset({"infiniband", "sriov"})
"""Backends that need events that the kernel keeps in the network namespace they happen in."""


def capabilities(patient: Patient) -> Iterator[Finding]:
    """Which rights are missing that what is configured needs? The kernel's log is looked at by itself."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _own(patient, "status"), re.MULTILINE)
    if found is None:
        yield warning("This process's capabilities cannot be read.", "Mount /proc.")
        return
    effective = int(found[1], 16)
    specs = [resource.spec for resource in patient.config.resources]
    binds = any(getattr(spec.options, "bind", "never") != "never" for spec in specs)
    missing = []
    if patient.uid and not effective >> _DAC_OVERRIDE & 1:
        missing.append("CAP_DAC_OVERRIDE: the kubelet's directory and device nodes may be closed to this user")
    if binds and not effective >> _SYS_PTRACE & 1:
        missing.append("CAP_SYS_PTRACE: what the host has mounted and routed cannot be read, so that nothing is bound")
    sys = patient.config.host.sys
    if (binds or any(spec.pre_start == "reset" for spec in specs)) and not os.access(sys / "bus/pci", os.W_OK):
        missing.append(f"the right to write to {sys}: drivers cannot be bound and hardware cannot be reset")
    if missing:
        found_missing = f"What is configured needs {'; and '.join(missing)}."
        yield warning(found_missing, "Add it (docs/installing.md), or run privileged.")
    else:
        yield fine("This process may do all that the configuration needs.")


def policies(excess: Sequence[str] | str) -> Iterator[Finding]:
    """Do admission policies bind this pod's token? `excess` is what it may write that it should not, or why that is unknown."""
    if isinstance(excess, str):
        yield fine(f"What this pod's token may write is not known: {excess}.")
    elif excess:
        yield warning(
            f"No admission policy keeps this pod's token to what Fairlead writes: {' and '.join(excess)} can be written with it.",
            "Apply the policies and roles of deploy/kubernetes/api-access, or the chart, of this version, with Kubernetes 1.30.",
        )
    else:
        yield fine("Admission policies bind this pod's token to what Fairlead writes.")


def selinux(patient: Patient) -> Iterator[Finding]:
    """Would SELinux keep a container from the kubelet's sockets?"""
    enforce = patient.config.host.local(HostPath("/sys/fs/selinux/enforce"))
    try:
        enforcing = enforce.read_text().strip() == "1"
    except OSError:
        yield fine("It is not on.")
        return
    context = _own(patient, "attr/current").rstrip("\0\n") or "unknown"
    if enforcing and ":container_t:" in context:
        yield failure(
            f"It is enforcing and this process runs as {context}, which may not connect to the kubelet.",
            "Set seLinuxOptions.type to container_device_plugin_t, or run privileged (spc_t).",
        )
    else:
        yield fine(f"It is {'enforcing' if enforcing else 'permissive'}; this process runs as {context}.")


def events(patient: Patient) -> Iterator[Finding]:
    """Do the kernel's hot-plug events reach this process?"""
    mode = patient.config.agent.uevents
    if mode == "off":
        resync = patient.config.agent.resync
        yield warning(f'agent.uevents is "off": new hardware is seen within {resync:g} s only.', 'Set it to "kernel".')
    elif not _IDENTITY.fullmatch(_own(patient, "uid_map")):
        yield failure(
            "This process is in a user namespace of its own, which the kernel sends no hardware events.",
            "Set hostUsers: true (the default), or run on the node itself.",
        )
    elif mode == "udev" and not patient.config.host.local(HostPath("/run/udev/control")).exists():
        yield failure(
            'agent.uevents is "udev", but no udevd runs here: /run/udev/control is missing.',
            "Mount the host's /run/udev and use the host's network, or set agent.uevents to \"kernel\".",
        )
    elif mode == "udev" and _is_hosts_network(patient) is False:
        yield failure(
            'agent.uevents is "udev", and this is not the host\'s network namespace: what its udevd says does not come here.',
            'Set hostNetwork: true, or set agent.uevents to "kernel".',
        )
    else:
        yield fine(f"They come from {'the kernel' if mode == 'kernel' else 'udevd'}.")


def network(patient: Patient) -> Iterator[Finding]:
    """Do events that belong to a network namespace reach this process, where a backend needs them?"""
    wanting = sorted(patient.backends() & _TAGGED)
    same = _is_hosts_network(patient)
    if same is None and wanting:
        first = patient.config.host.local(HostPath("/proc/1/ns"))
        yield warning(
            f"Whether it is the host's cannot be told from {first}; {', '.join(wanting)} needs it for its events.",
            "Set hostNetwork: true, mount the host's /proc, and set host.proc.",
        )
    elif same is None:
        yield fine("Nothing needs the host's.")
    elif same or not wanting:
        yield fine("It is the host's." if same else "It is not the host's, and nothing needs it.")
    else:
        yield warning(
            f"It is not the host's: {', '.join(wanting)} sees changes of links and HCAs at its polls only.",
            "Set hostNetwork: true.",
        )


def _is_hosts_network(patient: Patient) -> bool | None:
    """Is this the host's network namespace? None if its /proc is not the host's; yes without the right to look there."""
    first = patient.config.host.local(HostPath("/proc/1/ns"))
    try:
        known = str((first / "pid").readlink()) == _FIRST_PIDS  # a container's own /proc has its own process 1
        same = (patient.proc / "self/ns/net").stat().st_ino == (first / "net").stat().st_ino
    except OSError:
        return True
    return same if known else None


def boot(patient: Patient) -> Iterator[Finding]:
    """Does Fairlead come before the kubelet when the node boots?"""
    try:
        is_on_node = str((patient.proc / "self/ns/pid").readlink()) == _FIRST_PIDS
    except OSError:
        is_on_node = True
    if is_on_node:
        yield fine("It is no pod: as a service it may come before the kubelet, and no pod is lost in a reboot.")
    else:
        yield fine(
            "It is a pod, and comes after the kubelet: a reboot of the node ends pods without a controller that have "
            'devices. A service of the node comes before it (docs/operations.md, "A reboot").'
        )


def inotify(_patient: Patient) -> Iterator[Finding]:
    """Is there an inotify instance left for this user?"""
    try:
        Inotify().close()
    except OSError as error:
        yield failure(
            f"No directory can be watched: {error.strerror}.",
            "Raise fs.inotify.max_user_instances (sysctl); other programs of this user have used all of them.",
        )
    else:
        yield fine("Directories can be watched.")


def _own(patient: Patient, name: str) -> str:
    try:
        return (patient.proc / "self" / name).read_text(errors="replace")
    except OSError:
        return ""
