"""Checks how the host is seen, /sys, /dev, the kernel's log and modules, the state directory, CDI's files, and what we may do there."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from agent.cdi.spec import DIRECTORY
from agent.console.doctor import Finding, Level, Patient, failure, fine, warning
from agent.discovery import kmsg
from agent.discovery.paths import Inotify
from agent.runtime.errors import some
from backends.base import Host, HostPath
from backends.errors import reason_of
from backends.linux import files
from backends.linux.globs import Glob, is_glob

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
    "/dev/iommu": ("iommufd", "iommufd (Linux 6.2 and newer)"),
    "/dev/uinput": ("uinput", "uinput"),
    "/dev/uhid": ("uhid", "uhid"),
    "/dev/cuse": ("cuse", "cuse"),
    "/dev/ppp": ("ppp_generic", "ppp_generic"),
    "/dev/vsock": ("vsock", "vsock"),
    "/dev/loop-control": ("loop", "loop"),
    "/dev/loop0": ("loop", "loop"),
    "/dev/nbd0": ("nbd", "nbd"),
    "/dev/i2c-0": ("i2c_dev", "i2c-dev"),
    "/dev/ipmi0": ("ipmi_devintf", "ipmi_devintf and ipmi_si"),
    "/dev/cpu/0/msr": ("msr", "msr"),
    "/dev/kfd": ("amdgpu", "amdgpu"),
    "/dev/nvidia-uvm": ("nvidia_uvm", "nvidia-uvm, and make the node: `nvidia-modprobe -u -c=0` does both"),
    "/dev/infiniband/uverbs0": ("ib_uverbs", "ib_uverbs"),
    "/dev/infiniband/umad0": ("ib_umad", "ib_umad"),
    "/dev/infiniband/issm0": ("ib_umad", "ib_umad"),
    "/dev/infiniband/rdma_cm": ("rdma_ucm", "rdma_ucm"),
}
"""Node, of several the first → the module that makes it, and what to load."""

_NEEDED: Final = {"mdev": "/dev/vfio/vfio", "solarflare": "/dev/onload", "vfio": "/dev/vfio/vfio"}
"""Backend → a node that it needs whatever is configured."""

_COMPANIONS: Final = {
    "gpu": (("/dev/nvidiactl", "/dev/nvidia-uvm"),),
    "infiniband": tuple(("/sys/class/infiniband/*", f"/dev/infiniband/{name}") for name in ("rdma_cm", "umad0")),
}
"""Backend → where that is, pods are to get this, too, and get what they are given without it."""

_LEAST_FREE: Final = 1 << 20  # bytes; the state is some kilobytes


def sysfs(patient: Patient) -> Iterator[Finding]:
    """Checks that the host's /sys is seen, and can be written to where a backend writes."""
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
    """Checks that the host's /dev is seen, in which new nodes appear."""
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
    """Checks that the kernel's log can be read, where a backend needs it."""
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
    """Checks that the modules are loaded whose nodes the configuration names, or pods get beside their devices."""
    host = patient.config.host
    named = {path for resource in patient.config.resources for path in node_paths(resource.spec.options)}
    named |= {node for backend, node in _NEEDED.items() if backend in patient.backends()}
    if any(getattr(resource.spec.options, "iommu", None) == "iommufd" for resource in patient.config.resources):
        named.add("/dev/iommu")
    missing = [
        (node, load)
        for node, (module, load) in _MODULES.items()
        if any(_means(path, node) and not _is_there(host, path) for path in named)
        and not host.local(HostPath(f"/sys/module/{module}")).is_dir()
    ]
    for node, load in missing:
        finding = failure(f"{node} is not there, and the module that makes it is not loaded.", _loaded(load))
        # without a configuration file the user has not asked for the node
        yield finding if patient.config.source else replace(finding, level=Level.WARNING)
    lacking = list(_companions(patient))
    for resource, node in lacking:
        yield warning(f"{node} is not there: pods with {resource} go without it.", _loaded(_MODULES[node][1]))
    if not missing and not lacking:
        yield fine("None is missing for what is configured.")


def _loaded(load: str) -> str:
    return f"Load {load}." if " " in load else f"Load it: modprobe {load}"


def _companions(patient: Patient) -> Iterator[tuple[str, str]]:
    """Each node that pods do not get beside their devices, with the first resource that would give it."""
    host = patient.config.host
    told = set[str]()
    for resource in patient.config.resources:
        for beside, node in _COMPANIONS.get(resource.spec.backend, ()):
            every = node.removesuffix("0") + ("*" if node.endswith("0") else "")
            wanted = getattr(resource.spec.options, HostPath(node).name.removesuffix("0"), True)  # the option umad
            if wanted and node not in told and _is_there(host, beside) and not _is_there(host, every):
                told.add(node)
                yield resource.name, node


def _means(path: str, node: str) -> bool:
    return Glob(path).takes(node) if is_glob(path) else path == node


def _is_there(host: Host, path: str) -> bool:
    """Whether anything is at the path, or matches it if it is a glob."""
    if not is_glob(path):
        return os.path.lexists(host.local(HostPath(path)))
    found = Glob(path, files=True)
    return any(found.takes(match) for match in found.matches(host))


def state_directory(patient: Patient) -> Iterator[Finding]:
    """Checks that the state that must outlive a restart can be written."""
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


# --- what goes to containers by CDI: whether specifications can be written, and the runtime reads them ---


_CONTAINERD: Final = HostPath("/etc/containerd/config.toml")
_MOST_READ: Final = 1 << 20  # bytes
_SWITCH: Final = re.compile(r"^\s*enable_cdi\s*=\s*(true|false)\b", re.MULTILINE)
_SECOND: Final = re.compile(r"^\s*version\s*=\s*[12]\b", re.MULTILINE)


def cdi(patient: Patient) -> Iterator[Finding]:
    """Checks, where a resource asks for CDI, that specifications can be written and containerd heeds them."""
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
    """Whether containerd's configuration, as seen from here, ignores CDI. Version 3 of it is containerd 2, which has CDI on."""
    try:
        text = files.read(patient.config.host.local(_CONTAINERD), _MOST_READ).decode(errors="replace")
    except OSError:
        return False
    if (switch := _SWITCH.search(text)) is not None:
        return switch[1] == "false"
    return _SECOND.search(text) is not None


# --- what this process may do: capabilities, SELinux, namespaces, the kernel's events, inotify ---


_DAC_OVERRIDE, _SYS_PTRACE = 1, 19  # linux/capability.h
_IDENTITY: Final = re.compile(r"\s*0\s+0\s+4294967295\s*")
_FIRST_PIDS: Final = "pid:[4026531836]"  # the node's own PID namespace, PROC_PID_INIT_INO in linux/proc_ns.h
_TAGGED: Final = frozenset({"infiniband", "sriov"})
"""Backends that need events that the kernel keeps in the network namespace they happen in."""


def capabilities(patient: Patient) -> Iterator[Finding]:
    """Checks that no right is missing that what is configured needs. The kernel's log has a check of its own."""
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
    """Checks that admission policies bind this pod's token. `excess`: what more it may write, or why that is unknown."""
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
    """Checks that SELinux does not keep a container from the kubelet's sockets."""
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
    """Checks that the kernel's hot-plug events reach this process."""
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
    """Checks that events that belong to a network namespace reach this process, where a backend needs them."""
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
    """Whether this is the host's network namespace. None if /proc is not the host's; True without the right to look."""
    first = patient.config.host.local(HostPath("/proc/1/ns"))
    try:
        known = str((first / "pid").readlink()) == _FIRST_PIDS  # a container's own /proc has its own process 1
        same = (patient.proc / "self/ns/net").stat().st_ino == (first / "net").stat().st_ino
    except OSError:
        return True
    return same if known else None


def boot(patient: Patient) -> Iterator[Finding]:
    """Says whether Fairlead comes before the kubelet when the node boots: as a service it may, as a pod it does not."""
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
    """Checks that an inotify instance is left for this user."""
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
