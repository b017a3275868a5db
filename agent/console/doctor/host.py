"""Checks of how the host's trees are seen: /sys, /dev, the kernel's log and modules, the state directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from agent.console.doctor.findings import Finding, Patient, failure, fine, warning
from agent.discovery.sources import kmsg
from backends.base import HostPath
from backends.errors import reason_of

_READS_KERNEL_LOG: Final = frozenset({"gpu"})
_WRITES_SYSFS: Final = frozenset({"cex", "vfio"})
_MODULES: Final = {
    "/dev/kvm": ("kvm", "kvm_intel or kvm_amd; and turn virtualization on in the firmware"),
    "/dev/net/tun": ("tun", "tun"),
    "/dev/vhost-net": ("vhost_net", "vhost_net"),
    "/dev/vhost-vsock": ("vhost_vsock", "vhost_vsock"),
    "/dev/fuse": ("fuse", "fuse"),
    "/dev/vfio/vfio": ("vfio", "vfio-pci"),
    "/dev/onload": ("onload", "onload (onload_tool reload)"),
}
"""Node → the module that makes it, and what to load."""

_NEEDED: Final = {"mdev": "/dev/vfio/vfio", "solarflare": "/dev/onload", "vfio": "/dev/vfio/vfio"}
"""Backend → a node that it needs whatever is configured."""

_LEAST_FREE: Final = 1 << 20  # bytes; the state is some kilobytes


def sysfs(patient: Patient) -> Iterator[Finding]:
    """Is the host's /sys seen, and can it be written to where a backend writes?"""
    path = patient.config.host.sys
    if not (path / "devices").is_dir():
        yield failure(f"{path} has no devices: it is not the host's /sys.", "Mount it, and set host.sys.")
        return
    writers = sorted(
        {
            it.spec.backend
            for it in patient.config.resources
            if it.spec.pre_start == "reset" or getattr(it.spec.options, "create", None)
        }
        | (patient.backends() & _WRITES_SYSFS)
    )
    if writers and os.statvfs(path).f_flag & os.ST_RDONLY:
        yield warning(
            f"{path} is read-only: {', '.join(writers)} can bind no driver, make no function and reset nothing.",
            "Mount it without readOnly where that is asked for.",
        )
    else:
        yield fine(f"{path} shows the kernel's devices.")


def dev(patient: Patient) -> Iterator[Finding]:
    """Is the host's /dev seen, in which new nodes appear?"""
    path = patient.config.host.dev
    kind = filesystem(patient, path)
    if not path.is_dir():
        yield failure(f"{path} is no directory.", "Mount the host's /dev, and set host.dev.")
    elif kind not in (None, "devtmpfs"):
        yield warning(
            f"{path} is of type {kind}, as in a container: new device nodes of the host do not appear in it.",
            "Mount the host's /dev (hostPath), and set host.dev if it is mounted elsewhere.",
        )
    else:
        yield fine(f"{path} is the host's.")


def kernel_log(patient: Patient) -> Iterator[Finding]:
    """Can the kernel's log be read, where a backend needs it?"""
    wanting = sorted(patient.backends() & _READS_KERNEL_LOG)
    path = patient.config.host.local(HostPath("/dev/kmsg"))
    if not wanting:
        yield fine("Nothing that is configured reads it.")
        return
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        reason = reason_of(error)
        mend = "Run privileged, or add CAP_SYSLOG and let this process open the host's /dev/kmsg (device 1:11)."
        if kmsg.is_denied_by_cgroup(error, patient.proc):
            reason, mend = f"{reason}: {kmsg.DENIED}", f"{kmsg.ALLOW[:1].upper()}{kmsg.ALLOW[1:]}."
        found = f"{path} cannot be read: {reason}; XIDs of NVIDIA GPUs are heard by NVML alone, if at all."
        yield warning(found, mend)
    else:
        yield fine(f"{path} can be read, for {', '.join(wanting)}.")


def modules(patient: Patient) -> Iterator[Finding]:
    """Are the modules loaded that make the nodes which the configuration names?"""
    host = patient.config.host
    named = {path for resource in patient.config.resources for path in node_paths(resource.spec.options)}
    named |= {node for backend, node in _NEEDED.items() if backend in patient.backends()}
    missing = [
        (node, load)
        for node, (module, load) in _MODULES.items()
        if node in named
        and not host.local(HostPath(node)).exists()
        and not host.local(HostPath(f"/sys/module/{module}")).is_dir()
    ]
    for node, load in missing:
        yield failure(f"{node} is not there, and the module that makes it is not loaded.", f"Load {load}.")
    if not missing:
        yield fine("None is missing for what is configured.")


def state_directory(patient: Patient) -> Iterator[Finding]:
    """Can what must outlive a restart be written?"""
    directory = patient.config.agent.state_dir
    nearest = next(path for path in (directory, *directory.parents) if path.exists())
    mend = "Mount a host directory there that can be written to, or set agent.state_dir."
    if not os.access(nearest, os.W_OK | os.X_OK) or os.statvfs(nearest).f_flag & os.ST_RDONLY:
        yield warning(f"{nearest} cannot be written to: drains are lost at a restart.", mend)
    elif (free := os.statvfs(nearest)).f_bavail * free.f_frsize < _LEAST_FREE:
        yield warning(f"The file system of {nearest} is full: drains are lost at a restart.", mend)
    else:
        yield fine(f"{directory} can be written to.")


def filesystem(patient: Patient, path: Path) -> str | None:
    """The type of the file system that a path is on, by the longest mount point above it; None if it is not told."""
    try:
        lines = (patient.proc / "self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    best, kind = -1, None
    for line in lines:
        before, separator, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape")) if separator else None
        if point is not None and path.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind


def node_paths(options: object) -> Iterator[str]:
    """The node paths that a `chardev` resource names; other backends have none."""
    for holder in (options, *getattr(options, "groups", ())):
        for one in getattr(holder, "paths", ()):
            yield one.path
